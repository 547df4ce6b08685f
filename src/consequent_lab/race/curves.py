"""What is seen of a training run: a line of metrics for every evaluation, after so many steps."""

import math
from typing import Any

Curve = list[dict[str, float]]  # "iteration", and metrics by their names


def packed(curve: Curve) -> dict[str, list[Any]]:
    """Returns a curve as columns, those of files, with the five digits that are worth keeping.

    >>> packed([{"iteration": 0, "loss": 2.3456789}, {"iteration": 4, "loss": 1.0}])
    {'step': [0, 4], 'loss': [2.3457, 1.0]}
    """
    metrics = [name for name in curve[0] if name != "iteration"]
    columns: dict[str, list[Any]] = {"step": [line["iteration"] for line in curve]}
    return columns | {name: [float(f"{line[name]:.5g}") for line in curve] for name in metrics}


def unpacked(columns: dict[str, list[Any]]) -> Curve:
    """Returns the curve; null is what was not finite.

    >>> unpacked({"step": [0, 4], "loss": [2.5, 1.0]})[-1]
    {'iteration': 4, 'loss': 1.0}
    """
    names = ["iteration" if name == "step" else name for name in columns]
    rows = ([math.nan if value is None else value for value in row] for row in zip(*columns.values(), strict=True))
    return [dict(zip(names, row, strict=True)) for row in rows]
