"""`consequent watch`: a run while it trains, or as it ended."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from consequent_lab.comparison import TEST_ACCURACY, TEST_LOSS, TRAINING_LOSS
from consequent_lab.kept_runs import TrainedRun, run_in
from consequent_lab.numbers import three_digits
from consequent_lab.progress import shown_seconds
from consequent_lab.runs import RunFolder
from consequent_lab.screen import console

BLOCKS = "▁▂▃▄▅▆▇█"
CURVE_WIDTH = 48


@dataclass(frozen=True)
class Watch:
    """Show a run's loss and its speed.

    On a terminal it is live until the run ends or Ctrl-C is pressed; elsewhere it is shown once. Watching needs nothing
    but the run's folder and does not disturb it.
    """

    place: tyro.conf.Positional[Path] = Path("runs")
    """A run's folder, or one with runs in it: then the run that was written to last."""
    every: float = 1.0
    """Seconds between two looks."""
    once: bool = False
    """Look once, on a terminal too."""

    def __post_init__(self) -> None:
        if not 0.05 <= self.every < float("inf"):
            raise ValueError(f"--every must be at least 0.05 seconds, got {self.every}")

    def run(self) -> None:
        """Shows the run."""
        folder = latest_run(self.place)
        screen = console()
        picture, is_running = shown(folder)
        if self.once or not screen.is_terminal:
            screen.print(picture)
            return
        with Live(picture, console=screen, auto_refresh=False) as live:
            while is_running:
                time.sleep(self.every)
                picture, is_running = shown(folder)
                live.update(picture, refresh=True)


def latest_run(place: Path) -> RunFolder:
    """Returns the run at a place, or the one among several that was written to last.

    Raises:
        ValueError: if there is none.
    """
    found = [path.parent for path in place.rglob("config.json")] if place.is_dir() else []
    if not found:
        raise ValueError(f"{place} has no runs: name the folder of a run (with config.json), or one with runs in it")
    return RunFolder(max(found, key=_written_at))


def _written_at(path: Path) -> float:
    metrics = path / "metrics.jsonl"
    return (metrics if metrics.exists() else path / "config.json").stat().st_mtime


def shown(folder: RunFolder) -> tuple[RenderableType, bool]:
    """Returns the run as it is now, and whether it may get on."""
    run = run_in(folder)
    return picture_of(run), not run.is_finished


# ---- the picture -------------------------------------------------------------------------------------------------


def picture_of(run: TrainedRun) -> RenderableType:
    """Returns the run, as far as it got, as a panel."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_column()
    total = _total(run)
    facts.add_row("iteration", _progress(run, total))
    speed = _speed(run)
    if speed is not None:
        left = f", {shown_seconds((total - run.iterations) / speed)} left" if total and not run.is_finished else ""
        facts.add_row("speed", f"{three_digits(speed)} iterations per second{left}")
    for word, metrics in (
        ("training loss", TRAINING_LOSS),
        ("test loss", TEST_LOSS),
        ("test accuracy", TEST_ACCURACY),
    ):
        curve = [value for _, value in run.curve(*metrics)]
        if curve:
            is_accuracy = metrics is TEST_ACCURACY
            shown = f"{100 * curve[-1]:.2f} %" if is_accuracy else three_digits(curve[-1])
            facts.add_row(word, Text.assemble((sparkline(curve, log=not is_accuracy), "cyan"), f"  {shown}"))
    title = Text(run.config.title, style="bold")
    return Panel(facts, title=title, title_align="left", expand=False)


def _progress(run: TrainedRun, total: int | None) -> RenderableType:
    words = Text(f"{run.iterations:,}" + (f" of {total:,}" if total else ""))
    if run.is_finished:
        words.append(f", {run.outcome['outcome']}", style="bold red" if run.diverged else "bold green")
    if not total:
        return words
    line = Table.grid(padding=(0, 2))
    line.add_row(ProgressBar(total=total, completed=run.iterations, width=CURVE_WIDTH), words)
    return line


def _total(run: TrainedRun) -> int | None:
    """Returns the run's iterations; None before an epoch's length is known."""
    if run.config.iterations is not None:
        return run.config.iterations
    last = next((line for line in reversed(run.lines) if line.get("epoch")), None)
    return None if last is None else run.config.total_iterations(round(last["iteration"] / last["epoch"]))


def _speed(run: TrainedRun) -> float | None:
    """Returns iterations per second over the last lines."""
    timed = [(line["iteration"], line["seconds"]) for line in run.lines[-6:] if "seconds" in line]
    if len(timed) < 2 or timed[-1][1] <= timed[0][1]:
        return None
    return float((timed[-1][0] - timed[0][0]) / (timed[-1][1] - timed[0][1]))


def sparkline(values: Sequence[float], log: bool, width: int = CURVE_WIDTH) -> str:
    """Returns a curve of finite values as blocks of eight heights, of logarithms if asked and all are positive.

    Of more values than there is room for, evenly spread ones are taken, the last one among them.

    >>> sparkline([1, 10, 100, 1000], log=True), sparkline([0.5, 0.5], log=False)
    ('▁▃▆█', '▁▁')
    """
    if len(values) > width:
        values = [values[round(place * (len(values) - 1) / (width - 1))] for place in range(width)]
    heights = [math.log(value) for value in values] if log and min(values) > 0 else list(values)
    low, high = min(heights), max(heights)
    scale = 7 / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((height - low) * scale)] for height in heights)
