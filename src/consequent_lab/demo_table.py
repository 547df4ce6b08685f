"""The table of the demo: epochs, seconds and test accuracy of every optimiser."""

from rich.box import SIMPLE_HEAD
from rich.table import Table

from consequent_lab.race.contestants import CONTESTANTS
from consequent_lab.race.measures import TimeTo
from consequent_lab.race.results import Results
from consequent_lab.race.table import Spread, settings_of, spread_of

HEADS = (
    "optimiser",
    "epochs to training loss 0.01",
    "seconds",
    "training loss at the end",
    "test accuracy",
    "settings",
)


def seconds_per_step(results: Results, name: str) -> float:
    """Returns the median of what was measured of a contestant."""
    return float(results.of_kind("time", name)[-1]["milliseconds"]["eager"]["median"]) / 1e3


def epochs_to_target(results: Results, name: str) -> Spread:
    """Returns the epochs that the finals of a contestant took."""
    (final, *_) = finals = results.finals(name)
    assert isinstance(results.task.measure, TimeTo)
    per_epoch = final["steps"] / results.task.epochs
    return Spread(tuple(steps / per_epoch for steps in spread_of(results.task.measure, finals).values))


def demo_rows(results: Results) -> list[tuple[str, ...]]:
    """Returns a row of cells for every contestant, the first at the target first."""
    loss, accuracy = results.task.reported
    rows = []
    for name in (name for name in CONTESTANTS if results.finals(name)):
        finals, epochs = results.finals(name), epochs_to_target(results, name)
        pace = seconds_per_step(results, name) * finals[0]["steps"] / results.task.epochs
        cells = (
            name,
            epochs.text(".1f"),
            Spread(tuple(pace * value for value in epochs.values)).text(".2f"),
            f"{spread_of(loss, finals).median:.1e}",
            spread_of(accuracy, finals).text("", "test_accuracy"),
            settings_of(results, name),
        )
        rows.append((epochs.median, cells))
    return [cells for _, cells in sorted(rows)]


def results_table(results: Results) -> Table:
    """Returns the table for the terminal."""
    seeds = len(results.finals(results.task.contestants[0]))
    caption = f"median (lowest–highest) of {seeds} seeds; seconds: steps × the time of a step, one thread, alone"
    table = Table(box=SIMPLE_HEAD, pad_edge=False, caption=caption)
    for head in HEADS:
        table.add_column(head, justify="left" if head in (HEADS[0], HEADS[-1]) else "right")
    for cells in demo_rows(results):
        table.add_row(*cells, style="bold" if cells[0].startswith("C-") else None)
    return table


def markdown_lines(results: Results) -> list[str]:
    """Returns the table for the README."""
    rows = [HEADS, ("---", *("---:",) * (len(HEADS) - 2), "---"), *demo_rows(results)]
    return [f"| {' | '.join(cells)} |" for cells in rows]
