"""The library's own warning."""


class ConsequentWarning(UserWarning):
    """Something was done differently from what was asked; the message says what, and what to do."""
