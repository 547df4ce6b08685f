"""Checks of numbers that users give."""

import math
from numbers import Real


def check_nonnegative(name: str, value: float, remedy: str) -> None:
    """Raise unless the value is a finite number ≥ 0.

    Args:
        name: of the argument.
        value: what was given.
        remedy: what to do instead.
    """
    _check_number(name, value, remedy)
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} must be finite and ≥ 0, got {value!r}; {remedy}")


def check_positive(name: str, value: float, remedy: str) -> None:
    """Raise unless the value is a finite number > 0; the arguments are as above."""
    _check_number(name, value, remedy)
    if not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name} must be finite and > 0, got {value!r}; {remedy}")


def _check_number(name: str, value: float, remedy: str) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}; {remedy}")
