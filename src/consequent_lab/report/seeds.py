"""Several runs of one contestant, told as one curve."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from consequent_lab.paper.findings import Panel, Series


@dataclass(frozen=True)
class Curve:
    """A series and the weight it has in the picture."""

    series: Series
    role: Literal["alone", "one of several", "median"]


def curves(panel: Panel) -> list[Curve]:
    """Returns what to draw, from back to front: medians lie on top of the runs that they tell of."""
    groups: dict[str, list[Series]] = {}
    for series in panel.series:
        groups.setdefault(series.group, []).append(series)
    runs: list[Curve] = []
    medians: list[Curve] = []
    for group in groups.values():
        summary = middle(group, panel)
        runs += [Curve(series, "one of several" if summary else "alone") for series in group]
        medians += [Curve(summary, "median")] if summary else []
    return runs + medians


def middle(runs: Sequence[Series], panel: Panel) -> Series | None:
    """Returns the median curve of several runs; None if there is one, or no x axis along which they have equal places.

    It ends where the shortest run ends, and has a gap where a run has no value: the median of those that are left would
    look better than the runs were.
    """
    length = min(len(column) for run in runs for column in run.columns.values())
    aligned = any(
        all(run.columns[axis.column][:length] == runs[0].columns[axis.column][:length] for run in runs)
        for axis in panel.x
    )
    if len(runs) < 2 or length == 0 or not aligned:
        return None
    columns: dict[str, list[float]] = {}
    for axis in (*panel.x, *panel.y):
        values = np.array([run.columns[axis.column][:length] for run in runs], dtype=float)  # None is NaN
        columns[axis.column] = np.median(values, axis=0).tolist()  # and so is the median of any with it
    group = runs[0].group
    return Series(f"{group}, median of {len(runs)}", columns, group, runs[0].style)
