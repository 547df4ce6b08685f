"""The tables of `consequent bench`."""

from math import isfinite
from statistics import median

from rich.box import SIMPLE_HEAD
from rich.table import Table

from consequent_lab.precision import Moment
from consequent_lab.scaling import Curve
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
        what = f"  {comparison.ours} ÷ {comparison.baseline}{', memory' if comparison.quantity == 'memory' else ''}"
        target = "–" if comparison.target is None else f"≤ {comparison.target:g}"
        table.add_row(what, *_numbers(row), *([target, _verdict(row)] if judge else []))
    return table


def failures(played: list[Played]) -> list[str]:
    """Returns a sentence for every entrant that could not be measured."""
    return [
        f"{one.match.task.title}, {one.match.mode}: {entrant} failed: {error}"
        for one in played
        for entrant, error in one.timings.errors.items()
    ]


def scaling_table(curves: list[Curve]) -> Table:
    """Returns the table of exponents."""
    table = Table(
        box=SIMPLE_HEAD, pad_edge=False, caption="time ∝ size^exponent, fitted over the upper half of the sizes"
    )
    table.add_column("what grows", ratio=1)
    for heading in ("largest", "SGD", "C-SGD", "correction", "predicted\nhere"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("predicted for the largest sizes", ratio=1)
    for curve in curves:
        exponents = [curve.exponent(quantity) for quantity in ("plain", "ours", "correction")]
        largest = f"{curve.sizes[-1]:,}" if curve.points else "–"
        numbers = [f"{value:.2f}" if isfinite(value) else "–" for value in (*exponents, curve.predicted)]
        what = f"[bold]{curve.sweep.axis}[/] ({curve.sweep.title})"
        table.add_row(what, largest, *numbers, curve.sweep.prediction, end_section=True)
    return table


def precision_table(moments: list[Moment]) -> Table:
    """Returns the table of the updates' relative errors, by format of the Gram matrix."""
    table = Table(
        box=SIMPLE_HEAD,
        pad_edge=False,
        caption="relative error of the update against float64, by the format of the Gram matrix: median and largest\n"
        "over the layers, and how many factorisations failed; solves are in float32",
    )
    table.add_column("network, iteration", ratio=1)
    table.add_column("loss", justify="right")
    for name in moments[0].formats:
        table.add_column(name, justify="right")
    for place, moment in enumerate(moments):
        if place == 0 or moments[place - 1].setup is not moment.setup:
            table.add_row(f"[bold]{moment.setup.title}, λ = {moment.setup.damping:g}[/]")
        cells = [_errors(moment, name) for name in moment.formats]
        table.add_row(f"  iteration {moment.iteration:,}", f"{moment.loss:.2g}", *cells)
    return table


def _errors(moment: Moment, name: str) -> str:
    found = moment.errors(name)
    failed = moment.failures(name)
    text = f"{median(found):.0e} … {found[-1]:.0e}" if found else ""
    return f"{text}\n[red]{failed} of {len(moment.layers)} failed[/]" if failed else text


def _numbers(row: Row) -> tuple[str, str, str]:
    if row.ratio is None or row.ours is None or row.baseline is None:
        return "–", "–", "failed"
    ratio = f"{row.ratio.median:.2f}"
    if row.ratio.low < row.ratio.high:
        ratio += f" ({row.ratio.lower_quartile:.2f}–{row.ratio.upper_quartile:.2f})"
    unit = "MiB" if row.comparison.quantity == "memory" else "ms"
    return f"{_three_digits(row.ours)} {unit}", f"{_three_digits(row.baseline)} {unit}", ratio


def _verdict(row: Row) -> str:
    if row.error is not None:
        return "[red]failed[/]"
    return {True: "[green]met[/]", False: "[red]missed[/]", None: ""}[row.met]


def _three_digits(value: float) -> str:
    """Returns the number with three digits, or all before the point.

    >>> [_three_digits(value) for value in (0.01234, 1.234, 12.34, 1234.5)]
    ['0.0123', '1.23', '12.3', '1234']
    """
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
