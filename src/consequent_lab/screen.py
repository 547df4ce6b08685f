"""The terminal, or what stands in for it."""

from rich.console import Console


def console() -> Console:
    """Returns the console; where there is no terminal, lines are long enough for a table."""
    screen = Console(highlight=False)
    return screen if screen.is_terminal else Console(highlight=False, width=120)
