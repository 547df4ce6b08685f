"""A figure as the data that the page's script draws from."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Literal

import numpy as np

from consequent_lab.paper.findings import Axis, Contours, Figure, Number, Panel
from consequent_lab.report.curve_styles import CurveStyle, curve_styles
from consequent_lab.report.seeds import curves

DIGITS = 5  # more than a screen shows
CONTOURS = 16


def payload(figure: Figure) -> dict[str, Any]:
    """Returns a figure as what JSON can say. Groups are numbered in the order of the legend."""
    styles = curve_styles(figure)
    return {
        "name": figure.name,
        "styles": [asdict(style) | {"dashes": style.dashes} for style in styles.values()],
        "panels": [_panel(panel, styles) for panel in figure.panels],
    }


def choices(panels: list[Panel], direction: Literal["x", "y"]) -> list[Sequence[Axis]]:
    """Returns the axes among which a reader can choose in this direction, once for all panels that offer the same."""
    offered = [panel.x if direction == "x" else panel.y for panel in panels]
    return list({tuple(axis.column for axis in axes): axes for axes in offered if len(axes) > 1}.values())


def columns_of(panels: int) -> int:
    """Returns how many panels stand side by side where there is room.

    >>> [columns_of(panels) for panels in range(1, 8)]
    [1, 2, 3, 2, 3, 3, 3]
    """
    return 2 if panels == 4 else min(panels, 3)


def aspect(panel: Panel) -> float:
    """Returns width ÷ height for a panel with equal scales: as its contours or curves have it, within limits."""
    if panel.contours:
        width, height = (_extent(side) for side in (panel.contours.x, panel.contours.y))
    else:
        width, height = (
            _extent([value for series in panel.series for value in series.columns[axes[0].column]])
            for axes in (panel.x, panel.y)
        )
    return round(min(1.8, max(0.6, width / (1.15 * height))), 3) if height else 1.0  # the axes' numbers need room, too


def _extent(values: Sequence[Number]) -> float:
    present = [value for value in values if value is not None]
    return max(present, default=0.0) - min(present, default=0.0)


def _panel(panel: Panel, styles: dict[str, CurveStyle]) -> dict[str, Any]:
    numbers = {group: number for number, group in enumerate(styles)}
    shown = [axis.column for axis in (*panel.x, *panel.y)]
    return {
        "x": [_axis(axis, panel) for axis in panel.x],
        "y": [_axis(axis, panel) for axis in panel.y],
        "equalScales": panel.equal_scales,
        "pointsAlone": all(series.style == "markers" for series in panel.series),
        "contours": contour_lines(panel.contours) if panel.contours else [],
        "extent": _ends(panel.contours) if panel.contours else None,
        "curves": [
            {
                "label": curve.series.label,
                "group": numbers[curve.series.group],
                "style": curve.series.style,
                "role": curve.role,
                "columns": {name: [*map(rounded, curve.series.columns[name])] for name in shown},
            }
            for curve in curves(panel)
        ],
    }


def contour_lines(contours: Contours) -> list[list[list[Number]]]:
    """Returns lines of equal height, each as its x and y.

    They are at equal steps of the square root: for a parabola they then lie at equal distances.
    """
    from contourpy import contour_generator

    heights = np.array(contours.heights)
    roots = np.sqrt(heights - heights.min())
    generator = contour_generator(contours.x, contours.y, roots)
    levels = np.linspace(0, roots.max(), CONTOURS + 2)[1:-1]
    lines: list[Any] = [line for level in levels for line in generator.lines(level)]
    return [[[*map(rounded, line[:, side].tolist())] for side in (0, 1)] for line in lines]


def _ends(contours: Contours) -> dict[str, list[float]]:
    return {name: [values[0], values[-1]] for name, values in (("x", contours.x), ("y", contours.y))}


def _axis(axis: Axis, panel: Panel) -> dict[str, Any]:
    values = [value for series in panel.series for value in series.columns[axis.column] if value is not None]
    return {**asdict(axis), "hasLog": bool(values) and min(values) >= 0 < max(values)}


def rounded(value: Number) -> Number:
    """Returns the number with five digits; whole ones as they are, without a decimal point.

    >>> rounded(0.123456789), rounded(1234567.0), rounded(None)
    (0.12346, 1234567, None)
    """
    if value is None:
        return None
    if float(value).is_integer() and abs(value) < 1e15:
        return int(value)
    return float(f"{value:.{DIGITS}g}")
