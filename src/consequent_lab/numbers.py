"""How numbers are shown."""


def three_digits(value: float) -> str:
    """Returns the number with three digits, or all before the point.

    >>> [three_digits(value) for value in (0.01234, 1.234, 12.34, 1234.5)]
    ['0.0123', '1.23', '12.3', '1234']
    """
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
