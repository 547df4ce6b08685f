"""The tables of `consequent bench`."""

from rich.box import SIMPLE_HEAD
from rich.table import Table

from consequent_lab.first_step import FirstStep
from consequent_lab.numbers import three_digits
from consequent_lab.speed import Played, Row


def speed_table(rows: list[Row], *, judge: bool) -> Table:
    """Returns the table of ratios.

    Args:
        rows: its lines.
        judge: whether to show the targets and say which are met.
    """
    table = Table(box=SIMPLE_HEAD, pad_edge=False, caption="medians; of the ratios round by round, with quartiles")
    table.add_column("C- ÷ other", ratio=1)
    for heading in ("C-", "other", "ratio", *(["target", ""] if judge else [])):
        table.add_column(heading, justify="right", no_wrap=True)
    for place, row in enumerate(rows):
        if place == 0 or rows[place - 1].match is not row.match:
            table.add_row(f"[bold]{row.match.task.title}, {row.match.mode}[/]")
        comparison = row.comparison
        what = f"  {row.ours} ÷ {comparison.baseline}{', memory' if comparison.quantity == 'memory' else ''}"
        target = "–" if comparison.target is None else f"≤ {comparison.target:g}" if row.is_best else ""
        table.add_row(what, *_numbers(row), *([target, _verdict(row)] if judge else []))
    return table


def first_step_table(steps: list[FirstStep], *, judge: bool) -> Table:
    """Returns the table of first steps."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, caption="the first step of a new process")
    table.add_column("Triton's cache", ratio=1)
    for heading in ("seconds", *(["target", ""] if judge else [])):
        table.add_column(heading, justify="right", no_wrap=True)
    for step in steps:
        seconds = step.error or "–" if step.seconds is None else three_digits(step.seconds)
        verdict = {True: "[green]met[/]", False: "[red]missed[/]", None: "[red]failed[/]"}[step.met]
        judged = [f"≤ {step.target:g}", verdict] if judge else []
        table.add_row(f"{step.task}, {step.ours}, {step.cache}", seconds, *judged)
    return table


def failures(played: list[Played]) -> list[str]:
    """Returns a sentence for every entrant that could not be measured."""
    return [
        f"{one.match.task.title}, {one.match.mode}: {entrant} failed: {error}"
        for one in played
        for entrant, error in one.timings.errors.items()
    ]


def _numbers(row: Row) -> tuple[str, str, str]:
    if row.ratio is None or row.value is None or row.baseline is None:
        return "–", "–", "failed"
    ratio = f"{row.ratio.median:.2f}"
    if row.ratio.low < row.ratio.high:
        ratio += f" ({row.ratio.lower_quartile:.2f}–{row.ratio.upper_quartile:.2f})"
    unit = "MiB" if row.comparison.quantity == "memory" else "ms"
    return f"{three_digits(row.value)} {unit}", f"{three_digits(row.baseline)} {unit}", ratio


def _verdict(row: Row) -> str:
    if row.error is not None:
        return "[red]failed[/]"
    return {True: "[green]met[/]", False: "[red]missed[/]", None: ""}[row.met]
