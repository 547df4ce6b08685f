"""Runs as curves in one picture."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from consequent_lab.comparison import TEST_ACCURACY, TEST_LOSS, TRAINING_LOSS, SeenRun, by_label
from consequent_lab.records import write_atomically

INK = "#333333"
# Okabe and Ito's colours, told apart by colour-blind readers too; the dashes tell more runs than colours apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", INK)
FAINT = "#777777"
DASHES = ("-", (0, (4, 2)), (0, (1, 1.5)))


def draw_comparison(path: Path, runs: Sequence[SeenRun]) -> None:
    """Draws training loss against iterations and seconds, and what the test set says against iterations.

    A line is the median over seeds, a band their range, where several were read at the same iterations. The file's
    ending is its format (png, svg, pdf).
    """
    test = TEST_ACCURACY if any(run.curve(*TEST_ACCURACY) for run in runs) else TEST_LOSS
    groups = by_label(runs)
    styles = _styles(groups)
    figure = Figure(figsize=(14, 4.6 + 0.22 * math.ceil(len(groups) / 3)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 3)
    words = ["training loss", "training loss", "test accuracy" if test is TEST_ACCURACY else "test loss"]
    for axes, metrics, by, word in zip(
        panels, (TRAINING_LOSS, TRAINING_LOSS, test), ("iteration", "seconds", "iteration"), words, strict=True
    ):
        for label, group in groups.items():
            _draw(axes, [run.curve(*metrics, by=by) for run in group], styles[label])
        axes.set_ylabel(word)
        axes.set_xlabel("iterations" if by == "iteration" else "seconds of training")
        if "accuracy" not in word and any(line.get_ydata().size for line in axes.lines):
            axes.set_yscale("log")
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(which="both", colors=INK)
        axes.grid(alpha=0.2)
    handles = [panels[0].plot([], [], label=label, **styles[label])[0] for label in groups]
    figure.legend(handles=handles, loc="outside lower left", ncols=3, frameon=False, fontsize=9, labelcolor=INK)
    write_atomically(path, lambda file: figure.savefig(file, format=path.suffix[1:], dpi=150))


def _styles(labels: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Returns a colour for an optimiser and its C- version, and other dashes for the second of both."""
    styles: dict[str, dict[str, Any]] = {}
    seen: dict[str, int] = {}  # by the plain one's label
    for label in labels:
        plain = label.replace("C-", "")
        is_second = plain in seen
        number = seen.setdefault(plain, len(seen))
        styles[label] = {"color": COLOURS[number % 7], "linestyle": DASHES[(number // 7 + is_second) % 3]}
    return styles


def _draw(axes: Axes, curves: list[list[tuple[float, float]]], style: dict[str, Any]) -> None:
    curves = [curve for curve in curves if curve]
    if not curves:
        return
    length = min(map(len, curves))
    places = np.array([[place for place, _ in curve[:length]] for curve in curves])
    values = np.array([[value for _, value in curve[:length]] for curve in curves])
    middle = np.median(places, axis=0)
    axes.plot(middle, np.median(values, axis=0), linewidth=1.8, **style)
    if len(curves) > 1:
        axes.fill_between(middle, values.min(0), values.max(0), color=style["color"], alpha=0.15, linewidth=0)
