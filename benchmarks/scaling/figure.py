"""The picture of the scaling study."""

import math
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from benchmarks.scaling.study import Curve
from consequent_lab.records import write_atomically
from consequent_lab.report.static import FAINT, INK

# Okabe and Ito's colours, told apart by colour-blind readers too.
LINES = {
    "plain": ("SGD", "#56B4E9", "s"),
    "ours": ("C-SGD", "#0072B2", "o"),
    "backward": ("C-SGD, at backward", "#009E73", "D"),
    "correction": ("the correction", "#D55E00", "^"),
}
MOST_TICKS = 7


def draw_scaling(path: Path, curves: list[Curve], machine: str) -> None:
    """Draws a panel for every curve: milliseconds of both steps and of their difference, and the fitted powers.

    Args:
        path: the PNG file to write.
        curves: with at least one point each.
        machine: where it was measured.
    """
    columns = min(3, len(curves))
    rows = math.ceil(len(curves) / columns)
    figure = Figure(figsize=(4.3 * columns, 3.9 * rows + 1), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, curve in zip(grid, curves, strict=False):
        _draw_panel(axes, curve)
    for axes in grid[len(curves) :]:
        axes.set_visible(False)
    figure.suptitle(f"How the time of a training step grows, {machine}", fontsize=14, color=INK)
    figure.supxlabel(
        "Symbols: medians. Bars: quartiles. Dashed: the fitted power, where the time grows. "
        "The correction: of the better one of both. In brackets: the power of the operation counts there.",
        fontsize=9.5,
        color=FAINT,
    )
    write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=150))


def _draw_panel(axes: Axes, curve: Curve) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_title(curve.sweep.title, fontsize=10, color=INK)
    axes.set_xlabel(curve.sweep.axis)
    axes.set_ylabel("milliseconds")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.2)
    sizes = np.array(curve.sizes, dtype=float)
    shown = curve.sizes[:: math.ceil(len(curve.sizes) / MOST_TICKS)]
    axes.xaxis.set_major_locator(FixedLocator(shown))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:,.0f}"))
    for quantity, (name, colour, marker) in LINES.items():
        points = [getattr(point, quantity) for point in curve.points]
        if None in points:
            continue  # of a file from before it was measured
        medians = np.array([point.median for point in points])
        below = medians - [point.lower_quartile for point in points]
        above = [point.upper_quartile for point in points] - medians
        exponent = curve.exponent(quantity)
        power = f"∝ size$^{{{exponent:.2f}}}$" if math.isfinite(exponent) else "(flat)"
        if quantity == "correction" and math.isfinite(curve.predicted):
            power += f" [{curve.predicted:.2f}]"
        seen = np.where(medians > 0, medians, np.nan)  # a difference lost in the noise has no logarithm
        axes.errorbar(
            sizes, seen, (below, above), fmt=marker, color=colour, markersize=5, linewidth=1, label=f"{name} {power}"
        )
        axes.plot(sizes, seen, color=colour, linewidth=1, alpha=0.35)
        part = curve.fitted(quantity)
        _draw_fit(axes, sizes[part], medians[part], exponent, colour)
    axes.legend(loc="upper left", fontsize=9.5, frameon=False, handlelength=1, labelcolor=INK)
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * (high / low) ** 0.4)  # room for the legend
    decades = math.log10(high / low)
    axes.yaxis.set_major_locator(LogLocator(subs=(1,) if decades > 2.5 else (1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


def _draw_fit(axes: Axes, sizes: np.ndarray, medians: np.ndarray, exponent: float, colour: str) -> None:
    if not math.isfinite(exponent):
        return
    offset = np.exp(np.mean(np.log(medians) - exponent * np.log(sizes)))
    axes.plot(sizes, offset * sizes**exponent, color=colour, linewidth=1.8, linestyle=(0, (4, 2)))
