"""The terminal, or what stands in for it."""

from rich.console import Console


def console() -> Console:
    """Returns the console, which takes text as it is; where there is no terminal, lines are long enough for a table."""
    screen = Console(highlight=False, markup=False)
    return screen if screen.is_terminal else Console(highlight=False, markup=False, width=120)
