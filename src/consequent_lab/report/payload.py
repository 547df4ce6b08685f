"""A figure as the data that the page's script draws from."""

from dataclasses import asdict
from typing import Any

from consequent_lab.paper.findings import Axis, Figure, Number, Panel
from consequent_lab.report.looks import group_of, looks
from consequent_lab.report.seeds import curves

DIGITS = 7  # far more than a screen shows; float64's seventeen would double the size of the page


def payload(figure: Figure) -> dict[str, Any]:
    """Returns a figure as what JSON can say. Groups are numbered in the order of the legend."""
    appearance = looks(figure)
    numbers = {group: number for number, group in enumerate(appearance)}
    return {
        "name": figure.name,
        "looks": [asdict(look) for look in appearance.values()],
        "panels": [_panel(panel, numbers) for panel in figure.panels],
    }


def choices(panels: list[Panel], direction: str) -> list[Axis]:
    """Returns the axes among which a reader can choose in this direction (x or y): none if no panel offers several."""
    offered = [getattr(panel, direction) for panel in panels]
    axes = {axis.column: axis for axes in offered if len(axes) > 1 for axis in axes}
    return list(axes.values())


def aspect(panel: Panel) -> float:
    """Returns width ÷ height of a panel with equal scales: that of its contours, with room for the axes' numbers."""
    if panel.contours is None:
        return 1.0
    width, height = (abs(side[-1] - side[0]) for side in (panel.contours.x, panel.contours.y))
    return round(min(2.0, max(0.5, width / (1.15 * height))), 3)


def _panel(panel: Panel, numbers: dict[str, int]) -> dict[str, Any]:
    shown = [axis.column for axis in (*panel.x, *panel.y)]
    return {
        "x": [_axis(axis, panel) for axis in panel.x],
        "y": [_axis(axis, panel) for axis in panel.y],
        "equalScales": panel.equal_scales,
        "contours": {name: _rounded_all(values) for name, values in asdict(panel.contours).items()}
        if panel.contours
        else None,
        "curves": [
            {
                "label": curve.series.label,
                "group": numbers[group_of(curve.series)],
                "style": curve.series.style,
                "role": curve.role,
                "columns": {name: _rounded_all(curve.series.columns[name]) for name in shown},
            }
            for curve in curves(panel)
        ],
    }


def _axis(axis: Axis, panel: Panel) -> dict[str, Any]:
    values = [value for series in panel.series for value in series.columns[axis.column] if value is not None]
    return {**asdict(axis), "hasLog": min(values, default=0) >= 0 and max(values, default=0) > 0}


def _rounded_all(values: list[Any]) -> list[Any]:
    return [_rounded_all(value) if isinstance(value, list) else rounded(value) for value in values]


def rounded(value: Number) -> Number:
    """Returns the number with seven digits; whole ones without a decimal point.

    >>> rounded(0.123456789), rounded(40000.0), rounded(None)
    (0.1234568, 40000, None)
    """
    if value is None:
        return None
    if float(value).is_integer() and abs(value) < 1e15:
        return int(value)
    return float(f"{value:.{DIGITS}g}")
