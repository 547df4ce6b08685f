"""The terminal, or what stands in for it."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import Progress


def console() -> Console:
    """Returns the console; where there is no terminal, lines are long enough for a table."""
    screen = Console(highlight=False)
    return screen if screen.is_terminal else Console(highlight=False, width=120)


class LiveDisplay:
    """Shows bars on a terminal, from entering it to leaving it; elsewhere nothing moves.

    Args:
        screen: where to show them.
        bars: makes them.
    """

    def __init__(self, screen: Console, bars: Progress) -> None:
        self._screen = screen
        self._bars = bars if screen.is_terminal else None

    def __enter__(self) -> Self:
        if self._bars:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bars:
            self._bars.stop()
