"""What is seen of a training run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Point:
    """An evaluation after so many steps."""

    step: int
    metrics: dict[str, float]


def packed(curve: Sequence[Point]) -> dict[str, list[Any]]:
    """Returns a curve as columns, with the five digits that are worth keeping.

    >>> packed([Point(0, {"loss": 2.3456789}), Point(4, {"loss": 1.0})])
    {'step': [0, 4], 'loss': [2.3457, 1.0]}
    """
    names = curve[0].metrics
    columns: dict[str, list[Any]] = {"step": [point.step for point in curve]}
    for name in names:
        columns[name] = [float(f"{point.metrics[name]:.5g}") for point in curve]
    return columns


def unpacked(columns: dict[str, list[Any]]) -> list[Point]:
    """Returns the curve; null is what was not finite.

    >>> unpacked({"step": [0, 4], "loss": [2.5, 1.0]})[-1]
    Point(step=4, metrics={'loss': 1.0})
    """
    names = [name for name in columns if name != "step"]
    finite = {name: [math.nan if value is None else value for value in columns[name]] for name in names}
    rows = zip(*finite.values(), strict=True)
    return [Point(step, dict(zip(names, row, strict=True))) for step, row in zip(columns["step"], rows, strict=True)]
