"""Several runs of one contestant, told as one curve."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from consequent_lab.paper.findings import Number, Panel, Series
from consequent_lab.report.curve_styles import group_of


@dataclass(frozen=True)
class Curve:
    """A series and the weight it has in the picture."""

    series: Series
    role: Literal["alone", "one of several", "median"]


def curves(panel: Panel) -> list[Curve]:
    """Returns what to draw, from back to front: medians lie on top of the runs that they tell of."""
    groups: dict[str, list[Series]] = {}
    for series in panel.series:
        groups.setdefault(group_of(series), []).append(series)
    runs: list[Curve] = []
    medians: list[Curve] = []
    for group in groups.values():
        summary = middle(group, panel)
        runs += [Curve(series, "one of several" if summary else "alone") for series in group]
        medians += [Curve(summary, "median")] if summary else []
    return runs + medians


def middle(runs: Sequence[Series], panel: Panel) -> Series | None:
    """Returns the median curve of several runs, place by place.

    It ends where the shortest run ends, and has a gap where a run has no value: the median of those that are left would
    look better than the runs were.

    Args:
        runs: of one contestant.
        panel: where they are shown; there must be an axis along which the runs have the same places.

    Returns:
        The curve, or None if there is only one run, or no axis along which all have the same places.
    """
    length = min(len(column) for run in runs for column in run.columns.values())
    aligned = any(
        all(run.columns[axis.column][:length] == runs[0].columns[axis.column][:length] for run in runs)
        for axis in panel.x
    )
    if len(runs) < 2 or length == 0 or not aligned:
        return None
    columns = {
        axis.column: [_median([run.columns[axis.column][place] for run in runs]) for place in range(length)]
        for axis in (*panel.x, *panel.y)
    }
    group = group_of(runs[0])
    return Series(f"{group}, median of {len(runs)}", columns, group, runs[0].style)


def _median(values: list[Number]) -> Number:
    """Returns the median, or None if a value is missing.

    >>> _median([3.0, 1.0, 2.0]), _median([3.0, None, 2.0])
    (2.0, None)
    """
    present = [value for value in values if value is not None]
    return median(present) if len(present) == len(values) else None
