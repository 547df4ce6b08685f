"""Findings are checked before anything is drawn: a mistake in one gets its name."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from consequent_lab.paper.findings import Contours, Figure, Finding, Number, Panel, Series, Table


def checked(findings: Sequence[Finding]) -> list[Finding]:
    """Returns the findings with None for numbers that are not finite.

    Raises:
        ValueError: if they cannot be shown; the message says which and why.
    """
    _refuse_twins("experiment", (finding.name for finding in findings))
    _refuse_twins("figure", (figure.name for finding in findings for figure in finding.figures))
    return [_checked_finding(finding) for finding in findings]


def _refuse_twins(kind: str, names: Iterable[str]) -> None:
    for name, count in Counter(names).items():
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
            raise ValueError(f"{kind} {name!r}: it names a file or an address; use letters, digits, - and _ only")
        if count > 1:
            raise ValueError(f"{kind} {name!r}: there are {count} of this name, and each needs its own")


def _checked_finding(finding: Finding) -> Finding:
    return replace(
        finding,
        figures=[_checked_figure(figure) for figure in finding.figures],
        tables=[_checked_table(table, finding.name) for table in finding.tables],
    )


def _checked_figure(figure: Figure) -> Figure:
    if not figure.panels:
        raise ValueError(f"figure {figure.name!r} has no panels")
    return replace(figure, panels=[_checked_panel(panel, f"figure {figure.name!r}") for panel in figure.panels])


def _checked_panel(panel: Panel, where: str) -> Panel:
    where = f"{where}, panel {panel.title!r}"
    if not panel.x or not panel.y:
        raise ValueError(f"{where}: it needs at least one axis in each direction")
    for series in panel.series:
        for axis in (*panel.x, *panel.y):
            if axis.column not in series.columns:
                raise ValueError(f"{where}: series {series.label!r} has no column {axis.column!r}, which an axis shows")
        lengths = {name: len(column) for name, column in series.columns.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"{where}: columns of series {series.label!r} differ in length: {lengths}")
    contours = _checked_contours(panel.contours, where) if panel.contours else None
    return replace(panel, series=[_finite_series(series) for series in panel.series], contours=contours)


def _checked_contours(contours: Contours, where: str) -> Contours:
    rows, columns = len(contours.y), len(contours.x)
    if len(contours.heights) != rows or any(len(row) != columns for row in contours.heights):
        raise ValueError(f"{where}: contours need {rows} rows of {columns} heights, for their {rows} y and {columns} x")
    if not all(math.isfinite(value) for row in (contours.x, contours.y, *contours.heights) for value in row):
        raise ValueError(f"{where}: contours must be finite")
    return contours


def _checked_table(table: Table, finding: str) -> Table:
    for number, row in enumerate(table.rows, start=1):
        if len(row) != len(table.columns):
            raise ValueError(
                f"experiment {finding!r}, table {table.title!r}: row {number} has {len(row)} entries "
                f"for {len(table.columns)} columns"
            )
    rows = [[value if isinstance(value, str) else _finite(value) for value in row] for row in table.rows]
    return replace(table, rows=rows)


def _finite_series(series: Series) -> Series:
    return replace(
        series, columns={name: [_finite(value) for value in column] for name, column in series.columns.items()}
    )


def _finite(value: Number) -> Number:
    return value if value is not None and math.isfinite(value) else None
