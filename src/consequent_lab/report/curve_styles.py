"""How a contestant's curve is drawn, on the page and in the static figures alike.

A C- version and its plain partner have one hue: the C- version a strong, solid line, the plain one a lighter, dashed
line, with BatchNorm a dotted one. The hues follow Okabe and Ito's, which colour-blind readers tell apart; dashes say
the same once more.
"""

import re
from dataclasses import dataclass
from itertools import cycle
from typing import Literal, get_args

import numpy as np
from matplotlib.colors import LinearSegmentedColormap, to_hex

from consequent_lab.paper.findings import Figure

Dash = Literal["solid", "dash", "dot", "longdashdot"]
Symbol = Literal["circle", "x", "diamond", "square", "triangle-up"]

# On and off in widths of the line, for all who draw.
DASHES: dict[Dash, tuple[float, ...]] = {
    "solid": (),
    "dash": (3.6, 1.6),
    "dot": (1.1, 1.3),
    "longdashdot": (7.0, 1.4, 1.1, 1.4),
}


@dataclass(frozen=True)
class Colour:
    """One colour, for a light and for a dark background."""

    light: str
    dark: str


@dataclass(frozen=True)
class Hue:
    """A strong colour and a softer one beside it."""

    strong: Colour
    soft: Colour


BLUE = Hue(Colour("#0072b2", "#58b2ee"), Colour("#4f94c1", "#4682ad"))
VERMILION = Hue(Colour("#d55e00", "#ff8f45"), Colour("#d67f43", "#b06a3b"))
GREEN = Hue(Colour("#00805c", "#30cc9c"), Colour("#3aa283", "#338f73"))
PURPLE = Hue(Colour("#a8478c", "#ee92cb"), Colour("#c07cab", "#a4658d"))
YELLOW = Hue(Colour("#8f6600", "#edc14a"), Colour("#b08c36", "#a3873a"))
GREY = Hue(Colour("#4d5562", "#d3d9e3"), Colour("#8b93a1", "#8b93a1"))

HUES = (BLUE, VERMILION, GREEN, PURPLE, YELLOW, GREY)
HUES_OF_OPTIMISERS = {
    "SGD": BLUE,
    "Nesterov": VERMILION,
    "Adam": GREEN,
    "SGD with momentum": PURPLE,
    "RMSprop": YELLOW,
    "plain": GREY,
    "cheaper": GREEN,
}
# From faint to strong, on a light and on a dark background.
RAMP = (("#a6cbe3", "#0072b2", "#15264f"), ("#35597a", "#58b2ee", "#e2f2ff"))


@dataclass(frozen=True)
class CurveStyle:
    """How the curves of one group are drawn."""

    colour: Colour
    dash: Dash
    width: float  # in pixels
    symbol: Symbol = "circle"
    points_only: bool = False  # no line in any panel

    @property
    def dashes(self) -> str:
        """The dashes as SVG wants them."""
        return " ".join(f"{length * self.width:.1f}" for length in DASHES[self.dash]) or "none"


def curve_styles(figure: Figure) -> dict[str, CurveStyle]:
    """Returns the style of every group of a figure, in the order of a legend: those of one optimiser side by side."""
    drawn: dict[str, set[str]] = {}
    for panel in figure.panels:
        for series in panel.series:
            drawn.setdefault(series.group, set()).add(series.style)
    if len(drawn) > 2 and len({re.sub(r"[\d.,]+", "#", group) for group in drawn}) == 1:
        return _stages(list(drawn))
    points = [group for group, used in drawn.items() if used == {"markers"}]
    optimisers = [_optimiser(group) for group in drawn]
    legend = sorted(drawn, key=lambda group: (group in points, optimisers.index(_optimiser(group))))
    if len(set(optimisers)) == 1 and 2 < len(legend) <= len(HUES):  # a hue for each version
        return {
            group: CurveStyle(hue.strong, _dash(group, _is_corrected(group)), 2.4)
            for group, hue in zip(legend, HUES, strict=False)
        }
    hues = _hues({_optimiser(group): group in points for group in legend})
    symbols = dict(zip(points, cycle(get_args(Symbol)), strict=False))
    compares = any(map(_is_corrected, legend))
    result, taken = {}, set()
    for group in legend:
        # Where there is no C- version nothing needs to stand back; a single point never does.
        strong = _is_corrected(group) or not compares or group in points
        hue, dash = hues[_optimiser(group)], _dash(group, strong)
        width = 2.4 if strong else 2.2 if dash == "dot" else 1.9  # dots look thinner than they are
        colour = hue.strong if strong else hue.soft
        if group not in points:  # where hues are used again, dashes tell curves apart
            dash = next((one for one in (dash, *DASHES) if (colour, one) not in taken), dash)
            taken.add((colour, dash))
        result[group] = CurveStyle(colour, dash, width, symbols.get(group, "circle"), group in points)
    return result


def _optimiser(group: str) -> str:
    """Returns what C- versions and those with BatchNorm have in common.

    >>> _optimiser("C-SGD"), _optimiser("Nesterov-BN"), _optimiser("start")
    ('SGD', 'Nesterov', 'start')
    """
    return re.sub(r"\bC-", "", group).removesuffix("-BN")


def _is_corrected(group: str) -> bool:
    return re.search(r"\bC-", group) is not None


def _dash(group: str, strong: bool) -> Dash:
    if group.endswith("-BN"):
        return "longdashdot" if strong else "dot"
    return "solid" if strong else "dash"


def _hues(optimisers: dict[str, bool]) -> dict[str, Hue]:
    """Gives every optimiser its hue; points that belong to none (a start, a target) are grey, others get what is free.

    Given is whether they are drawn as points only, in the order of the legend.
    """
    known = {
        name: HUES_OF_OPTIMISERS.get(name, GREY)
        for name, points_only in optimisers.items()
        if points_only or name in HUES_OF_OPTIMISERS
    }
    free = cycle([hue for hue in HUES if hue not in known.values()])
    return {name: known[name] if name in known else next(free) for name in optimisers}


def _stages(groups: list[str]) -> dict[str, CurveStyle]:
    """Gives stages of one thing, in the order of their numbers, colours from faint to strong."""
    names = sorted(groups, key=lambda name: [float(part) for part in re.findall(r"\d+\.?\d*", name.replace(",", ""))])
    ramps = [LinearSegmentedColormap.from_list("", stops) for stops in RAMP]
    return {
        name: CurveStyle(Colour(*(to_hex(ramp(place)) for ramp in ramps)), "solid", 2.2)
        for name, place in zip(names, np.linspace(0, 1, len(names)), strict=True)
    }
