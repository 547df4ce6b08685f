"""What the demo shows: progress while it runs, a table at the end."""

from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table

from consequent_lab.screen import LiveDisplay

if TYPE_CHECKING:  # Every command has a console; only the demo needs scikit-learn, which a race imports.
    from consequent_lab.demo_race import Progress
    from consequent_lab.summary import Summary

COLOURS = {"SGD": "blue", "Nesterov": "dark_orange", "Adam": "green"}


class ProgressDisplay(LiveDisplay):
    """A bar for every contestant on a terminal; elsewhere a plain line for every milestone.

    Args:
        screen: where to show it.
        names: the contestants.
        total: epochs of work of each.
    """

    def __init__(self, screen: Console, names: list[str], total: int) -> None:
        bars = Bars(
            TextColumn("{task.description:10}"),
            BarColumn(bar_width=30),
            TextColumn("{task.percentage:3.0f} %"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[text]}"),
            console=screen,
        )
        super().__init__(screen, bars)
        if self._bars:
            self._tasks = {name: self._bars.add_task(name, total=total, start=False, text="waiting") for name in names}

    def show(self, progress: "Progress") -> None:
        """Shows a piece of progress."""
        if self._bars:
            task = self._tasks[progress.contestant]
            self._bars.start_task(task)
            self._bars.update(task, advance=progress.epochs, text=progress.text)
        elif progress.milestone:
            self._screen.print(f"{progress.contestant:10} {progress.text}")


def results_table(summaries: "list[Summary]", target_loss: float, seeds: int) -> Table:
    """Returns the table of the race."""
    spread = f"median (lowest–highest) of {seeds} seeds" if seeds > 1 else "one seed"
    table = Table(box=SIMPLE_HEAD, pad_edge=False, caption=f"{spread}; seconds are processor time of one thread")
    table.add_column("optimiser", no_wrap=True)
    headings = {
        "learning\nrate": 8,
        f"epochs to\nloss {target_loss:g}": 9,
        f"seconds to\nloss {target_loss:g}": 11,
        "ms per\nepoch": 6,
        "final\ntraining\nloss": 8,
        "test\naccuracy": 8,
    }  # with the widths that fit a terminal of 80 columns, where the ranges get a line of their own
    for heading, width in headings.items():
        table.add_column(heading, justify="right", min_width=width)
    for summary in summaries:
        table.add_row(
            summary.name,
            f"{summary.learning_rate:g}{'*' if summary.at_edge else ''}",
            summary.epochs.show(".1f"),
            summary.seconds.show(".2f"),
            f"{summary.milliseconds_per_epoch:.0f}",
            f"{summary.final_loss.median:.1e}",
            f"{100 * summary.test_accuracy.median:.1f} %",
            style=COLOURS[summary.family],
            end_section=summary.name != summary.family,
        )
    return table
