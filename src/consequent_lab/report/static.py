"""Figures as files, fit for a paper: the same styles as on the page, PNG and SVG, the same bytes every time."""

import math
import re
from collections.abc import Collection, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from consequent_lab.paper.findings import Axis, Contours, Figure, Panel
from consequent_lab.records import write_atomically
from consequent_lab.report.curve_styles import DASHES, CurveStyle, curve_styles
from consequent_lab.report.payload import aspect, choices, columns_of
from consequent_lab.report.seeds import Curve, curves

INK, FAINT = "#333333", "#777777"
LETTERS_PER_INCH = 14  # of a legend
POINTS_PER_PIXEL = 0.58  # widths of lines are in pixels on the page and in points here
SYMBOLS = {"circle": "o", "x": "x", "diamond": "D", "square": "s", "triangle-up": "^"}
SETTINGS: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # matplotlib brings it along: the same letters everywhere
    "font.size": 8.5,
    "svg.hashsalt": "consequent",  # names within an SVG file are random otherwise
    "axes.unicode_minus": True,
}
# Nothing that changes from one day or version to the next.
METADATA: dict[str, dict[str, Any]] = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}


def draw(figure: Figure, folder: Path) -> list[Path]:
    """Draws a figure once for every choice of axes that it offers; returns the files, none if nothing was measured.

    NAME.png and NAME.svg have the first axes, the others have the columns of theirs in the name, as in
    NAME-accuracy-seconds.png.
    """
    if not any(panel.series for panel in figure.panels):
        return []
    paths = []
    for y, x in product(_others(figure, "y"), _others(figure, "x")):
        name = "-".join([figure.name, *(_slug(column) for column in (y, x) if column)])
        files = [folder / f"{name}.png", folder / f"{name}.svg"]
        draw_once(figure, files, {x, y})
        paths += files
    return paths


def draw_once(figure: Figure, paths: Sequence[Path], chosen: Collection[str] = ()) -> None:
    """Draws a figure with the axes of the chosen columns, else with the first ones; files end in their format."""
    with matplotlib.rc_context(SETTINGS):
        canvas = _drawn(figure, chosen)
        for path in paths:
            kind = path.suffix[1:]
            options: dict[str, Any] = {"format": kind, "dpi": 200, "metadata": METADATA[kind], "facecolor": "white"}
            write_atomically(path, partial(canvas.savefig, **options))


def _others(figure: Figure, direction: Literal["x", "y"]) -> list[str]:
    """Returns the columns to choose instead of the first ones; an empty name stays with those."""
    return ["", *(axis.column for axes in choices(figure.panels, direction) for axis in axes[1:])]


def _slug(column: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", column.lower()).strip("-") or "other"


def _drawn(figure: Figure, chosen: Collection[str]) -> Canvas:
    columns = columns_of(len(figure.panels))
    rows = math.ceil(len(figure.panels) / columns)
    width, height = {1: (5.6, 3.4), 2: (3.9, 3.1)}.get(columns, (3.0, 2.75))
    if all(panel.equal_scales for panel in figure.panels):
        height = 0.3 + 0.9 * width / min(aspect(panel) for panel in figure.panels)
    canvas = Canvas(figsize=(width * columns, height * rows + 0.75), layout="constrained")
    FigureCanvasAgg(canvas)
    grid = canvas.subplots(rows, columns, squeeze=False).ravel()
    styles = curve_styles(figure)
    for axes, panel in zip(grid, figure.panels, strict=False):
        x, y = (next((axis for axis in offered if axis.column in chosen), offered[0]) for offered in (panel.x, panel.y))
        _draw_panel(axes, panel, x, y, styles)
    for axes in grid[len(figure.panels) :]:
        axes.set_visible(False)
    canvas.suptitle(_text(figure.title), fontsize=11.5, color=INK, fontweight="bold")
    if styles:
        fitting = int(LETTERS_PER_INCH * width * columns / (8 + max(map(len, styles))))
        canvas.legend(
            handles=[_legend_line(group, line) for group, line in styles.items()],
            loc="outside lower center",
            ncols=max(1, min(len(styles), 2 * columns if columns > 1 else 4, fitting)),
            frameon=False,
            fontsize=8.5,
            labelcolor=INK,
            handlelength=3.2,
            title=_note_on_seeds(figure),
            title_fontproperties={"size": 8},
        )
    return canvas


def _note_on_seeds(figure: Figure) -> str | None:
    roles = {curve.role for panel in figure.panels for curve in curves(panel)}
    return "thin: single seeds; strong: their median, as far as all of them go" if "median" in roles else None


def _draw_panel(axes: Axes, panel: Panel, x: Axis, y: Axis, styles: dict[str, CurveStyle]) -> None:
    axes.set_title(_text(panel.title), fontsize=9.5, color=INK, loc="left")
    axes.set_xlabel(_text(x.title), color=INK)
    axes.set_ylabel(_text(y.title), color=INK)
    axes.tick_params(which="both", colors=INK, labelsize=8, width=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set(color=FAINT, linewidth=0.6)
    if panel.contours:
        _draw_contours(axes, panel.contours)
    else:
        axes.grid(color="#e4e4e4", linewidth=0.5)
        axes.set_axisbelow(True)
    if not panel.series:
        axes.annotate("no runs yet", (0.5, 0.5), xycoords="axes fraction", ha="center", color=FAINT)
    for curve in curves(panel):
        _draw_curve(axes, curve, x, y, styles[curve.series.group])
    for axis, shown in ((axes.xaxis, x), (axes.yaxis, y)):
        _scale(axis, shown.log)
    if panel.contours:
        axes.set_xlim(panel.contours.x[0], panel.contours.x[-1])
        axes.set_ylim(panel.contours.y[0], panel.contours.y[-1])
    if panel.equal_scales:
        axes.set_aspect("equal", adjustable="box" if panel.contours else "datalim")


def _draw_curve(axes: Axes, curve: Curve, x: Axis, y: Axis, line: CurveStyle) -> None:
    style, faint = curve.series.style, curve.role == "one of several"
    with_markers = style == "markers" or (style == "line+markers" and not faint)
    properties = _line_properties(line, with_line=style != "markers", with_markers=with_markers)
    if faint:
        properties |= {"linewidth": 0.6, "alpha": 0.5}
    axes.plot(
        *(np.array(curve.series.columns[axis.column], dtype=float) for axis in (x, y)),  # None is a gap
        markersize=6 if style == "markers" else 3,
        zorder=4 if line.points_only else 2 if faint else 3,
        **properties,
    )


def _line_properties(line: CurveStyle, *, with_line: bool, with_markers: bool) -> dict[str, Any]:
    return {
        "color": line.colour.light,
        "linewidth": POINTS_PER_PIXEL * line.width,
        "linestyle": "none" if not with_line else (0, DASHES[line.dash]) if DASHES[line.dash] else "-",
        "marker": SYMBOLS[line.symbol] if with_markers else None,
        "markeredgewidth": 1.6 if line.symbol == "x" else 0,
    }


def _draw_contours(axes: Axes, contours: Contours) -> None:
    """Draws lines at equal steps of the square root: for a parabola they lie at equal distances."""
    heights = np.array(contours.heights)
    roots = np.sqrt(heights - heights.min())
    levels = np.linspace(0, roots.max(), 17) if roots.max() > 0 else [0, 1]
    colours = matplotlib.colors.LinearSegmentedColormap.from_list("valley", ["#dfe5ec", "#ffffff"])
    axes.contourf(contours.x, contours.y, roots, levels=levels, cmap=colours, zorder=0)
    axes.contour(contours.x, contours.y, roots, levels=levels, colors="#c4ccd6", linewidths=0.5, zorder=1)


def _scale(axis: Any, log: bool) -> None:
    if not log:
        axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}".replace("-", "−")))
        return
    axis._set_axes_scale("log", nonpositive="mask")
    low, high = axis.get_view_interval()
    decades = math.log10(high / low) if 0 < low < high else 0
    if decades < 2.5:  # few powers of ten, or none: other numbers are needed
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades > 0.7 else (1, 1.2, 1.5, 2, 3, 4, 5, 7)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axis.set_minor_formatter(NullFormatter())


def _legend_line(group: str, line: CurveStyle) -> Line2D:
    properties = _line_properties(line, with_line=not line.points_only, with_markers=line.points_only)
    return Line2D([], [], label=_text(group), markersize=6, **properties)


def _text(text: str) -> str:
    r"""Returns text that matplotlib takes as it is: between dollars it would read mathematics.

    >>> _text("5 $ and 6 $")
    '5 \\$ and 6 \\$'
    """
    return text.replace("$", r"\$")
