"""What an experiment found: figures, verdicts on the paper's statements, tables. Plain data, for any way to show it.

Numbers that are not finite become None.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Verdict = Literal["holds", "holds in part", "does not hold", "not measured"]
Kind = Literal["empirical", "digits", "toy", "control"]
# What was looked at, in the order in which it counts.
KINDS: dict[Kind, str] = {
    "empirical": "the paper's networks and data",
    "digits": "small networks on the digits",
    "toy": "toys and algebra",
    "control": "controls: ours, not the paper's",
}
Number = float | None  # None: not measured there


def _finite(value: Number) -> Number:
    return value if value is not None and math.isfinite(value) else None


@dataclass(frozen=True)
class Series:
    """One curve; series of one group are the same contestant (its seeds, say): one colour, one line in a legend."""

    label: str
    columns: Mapping[str, Sequence[Number]]  # equally long; an axis names the one that it shows
    group: str = ""  # the label, if empty
    style: Literal["line", "markers", "line+markers"] = "line"

    def __post_init__(self) -> None:
        finite = {name: [_finite(value) for value in column] for name, column in self.columns.items()}
        object.__setattr__(self, "columns", finite)
        object.__setattr__(self, "group", self.group or self.label)


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
    x: Sequence[Axis]
    y: Sequence[Axis]
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
    """What the paper says, how that is measured, and what was found."""

    paper: str  # its own words; […] is what was left out; a control's are ours
    kind: Kind
    measure: str  # what is measured, and the limit up to which the statement holds
    measured: str
    parts: tuple[bool | None, ...]  # what became of each part of the statement, or setting; None: not measured
    circumstances: str = ""  # test accuracy, seeds and the size of the search
    remark: str = ""

    @property
    def verdict(self) -> Verdict:
        """The verdict on all parts; a statement of which a part was not measured holds in part at most.

        >>> [Statement("", "toy", "", "", parts).verdict for parts in ((True, True), (True, False), (False, None), ())]
        ['holds', 'holds in part', 'does not hold', 'not measured']
        """
        if all(part is None for part in self.parts):
            return "not measured"
        if not any(self.parts):
            return "does not hold"
        return "holds" if all(self.parts) else "holds in part"

    @property
    def share(self) -> str:
        """How many of several parts hold, of a statement that holds in part.

        >>> Statement("", "toy", "", "", (True, False, None)).share
        '1 of 3'
        """
        return f"{self.parts.count(True)} of {len(self.parts)}" if self.verdict == "holds in part" else ""


@dataclass(frozen=True)
class Table:
    """Rows of text and numbers."""

    title: str
    columns: list[str]
    rows: Sequence[Sequence[str | Number]]

    def __post_init__(self) -> None:
        finite = [[value if isinstance(value, str) else _finite(value) for value in row] for row in self.rows]
        object.__setattr__(self, "rows", finite)


@dataclass(frozen=True)
class Lead:
    """What a report begins with: a figure of the finding, what it shows in a sentence or two, and sizes of effects."""

    figure: str  # its name
    sentences: list[str]
    effects: Table


@dataclass(frozen=True)
class Finding:
    """One experiment."""

    name: str
    title: str
    summary: str
    figures: list[Figure] = field(default_factory=list)
    statements: list[Statement] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    lead: Lead | None = None
    is_small: bool = False  # shows the machinery on the digits: there are no statements then

    @property
    def command(self) -> str:
        """What makes it again."""
        return f"consequent reproduce {self.name}{' --quick' if self.is_small else ''}"
