"""What an experiment found: figures, verdicts on the paper's statements, tables. Plain data, for any way to show it."""

from dataclasses import dataclass, field
from typing import Literal

Verdict = Literal["holds", "holds in part", "does not hold", "not measured"]
Number = float | None  # None: not measured there


@dataclass(frozen=True)
class Series:
    """One curve; series of one group are the same contestant (its seeds, say): one colour, one entry in a legend."""

    label: str
    columns: dict[str, list[Number]]  # equally long; an axis names the one that it shows
    group: str = ""  # the label, if empty
    style: Literal["line", "dashed", "markers", "line+markers"] = "line"


@dataclass(frozen=True)
class Axis:
    """A column of every series, shown along an axis."""

    column: str
    title: str
    log: bool = False


@dataclass(frozen=True)
class Contours:
    """Heights over a rectangle, to be drawn below the curves."""

    x: list[float]
    y: list[float]
    heights: list[list[float]]  # a list for each y


@dataclass(frozen=True)
class Panel:
    """One coordinate system. Of several axes the reader chooses; the first is shown first."""

    title: str
    series: list[Series]
    x: list[Axis]
    y: list[Axis]
    contours: Contours | None = None
    equal_scales: bool = False  # a unit of x is as long as a unit of y


@dataclass(frozen=True)
class Figure:
    """Panels side by side. Axes of the same column in several panels are chosen together."""

    name: str  # of its files
    title: str
    caption: str
    panels: list[Panel]


@dataclass(frozen=True)
class Statement:
    """What the paper says, and what was found."""

    paper: str
    measured: str
    verdict: Verdict
    remark: str = ""  # the reason, as far as it was found; how it was measured


@dataclass(frozen=True)
class Table:
    """Rows of text and numbers."""

    title: str
    columns: list[str]
    rows: list[list[str | Number]]


@dataclass(frozen=True)
class Finding:
    """One experiment."""

    name: str
    title: str
    summary: str
    commands: list[str]  # that make it again
    figures: list[Figure] = field(default_factory=list)
    statements: list[Statement] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
