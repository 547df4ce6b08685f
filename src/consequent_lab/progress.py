"""How runs get on: a live line for each on a terminal; elsewhere a plain line now and then."""

import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

SECONDS_BETWEEN_LINES = 15.0
SECONDS_BETWEEN_REFRESHES = 0.25


# Is told how a run gets on: the name of one of RunLine's first four methods, and its arguments.
Watcher = Callable[..., None]


class ProgressBoard(Progress):
    """Shows any number of runs.

    Example:
        with ProgressBoard(screen) as board:
            train(config, folder, device, watcher=RunLine("C-SGD, seed 0", board))
    """

    def __init__(self, screen: Console, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(bar_width=10),
            # Where the screen is narrow, the text is cut and not the name.
            TextColumn("{task.fields[text]}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
            console=screen,
            refresh_per_second=2,
            expand=True,
            disable=not screen.is_terminal,
        )
        self.clock = clock


class RunLine:
    """Iterations per second, loss, accuracy and time left of one run."""

    def __init__(self, name: str, board: ProgressBoard) -> None:
        self._name = name
        self._board = board
        self._task = board.add_task(name, total=None, text="waiting")
        self._total = 0
        self._first = 0  # the iteration that this process began with, and when
        self._begun = self._shown_at = 0.0
        self._training = self._test = ""  # the last metrics
        self._end = ""  # what is to be said at the end, where it was not printed yet

    def __call__(self, event: str, *arguments: Any) -> None:
        """Something happens to the run."""
        getattr(self, event)(*arguments)

    def started(self, iteration: int, total: int) -> None:
        """The run starts, or goes on, at this iteration out of so many."""
        self._total, self._first = total, iteration
        self._begun = self._shown_at = self._board.clock()
        resumed = f"resumed at iteration {iteration:,} of {total:,}" if iteration else f"{total:,} iterations"
        self._show(iteration, resumed)

    def advanced(self, iteration: int) -> None:
        """So many iterations are done; on a GPU, are handed over. Called often."""
        now = self._board.clock()
        pause = SECONDS_BETWEEN_LINES if self._board.disable else SECONDS_BETWEEN_REFRESHES
        if now - self._shown_at >= pause:
            self._shown_at = now
            self._show(iteration, self._text(iteration, now))

    def read(self, line: dict[str, Any]) -> None:
        """A line of metrics was written; it is shown with the next refresh."""
        self._training = _shown(line, "train", "running") or self._training
        self._test = _shown(line, "test", "validation") or self._test

    def ended(self, outcome: dict[str, Any], skipped: bool) -> None:
        """The run is done, or was done before."""
        iteration = int(outcome["iteration"])
        text = f"{outcome['outcome']} at iteration {iteration:,}"
        if skipped:
            text += " before: skipped"
        else:
            text = _joined(f"{text}, {shown_seconds(outcome['seconds'])} of training", self._training, self._test)
        self._show(iteration, text, total=iteration)
        self._end = "" if self._board.disable else text

    def put_away(self, text: str) -> None:
        """Takes the line off the board; how the run ended, and the text, take its place among what was printed."""
        self._board.remove_task(self._task)
        self._board.refresh()
        if said := _joined(self._end, text):
            self._print(said)

    def _text(self, iteration: int, now: float) -> str:
        rate = (iteration - self._first) / max(now - self._begun, 1e-9)
        left = shown_seconds((self._total - iteration) / rate) if rate > 0 else "?"
        place = f"{iteration:,} of {self._total:,}"
        return _joined(place, f"{rate:.3g} it/s", self._training, self._test, f"{left} left")

    def _show(self, iteration: int, text: str, total: int | None = None) -> None:
        self._board.update(self._task, completed=iteration, total=total or self._total, text=text)
        if self._board.disable:
            self._print(text)

    def _print(self, text: str) -> None:
        self._board.console.print(f"{self._name}: {text}", markup=False, soft_wrap=True)


def _shown(line: dict[str, Any], *kinds: str) -> str:
    """Returns the metrics of the first of these kinds that a line has."""
    kind = next((kind for kind in kinds if f"{kind}_loss" in line), None)
    if kind is None:
        return ""
    loss, accuracy = line[f"{kind}_loss"], line.get(f"{kind}_accuracy")
    what = {"train": "training", "running": "mini-batches:"}.get(kind, kind)  # those of the epoch so far
    return f"{what} loss {loss:.3g}" + (f", accuracy {100 * accuracy:.2f} %" if accuracy is not None else "")


def _joined(*parts: str) -> str:
    return "; ".join(part for part in parts if part)


def shown_seconds(seconds: float) -> str:
    """Returns a time as people say it.

    >>> [shown_seconds(seconds) for seconds in (2.34, 59.6, 150, 7260)]
    ['2.3 s', '1 min 00 s', '2 min 30 s', '2 h 01 min']
    """
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"
