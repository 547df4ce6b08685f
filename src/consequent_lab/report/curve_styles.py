"""How a contestant's curve is drawn, on the page and in the static figures alike.

A C- version and its plain partner have one hue: the C- version a strong, solid line, the plain one a lighter, dashed
line, with BatchNorm a dotted one. The hues follow Okabe and Ito's, which colour-blind readers tell apart; dashes say
the same once more.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import cycle
from typing import Literal, get_args

from consequent_lab.paper.findings import Figure, Series

Dash = Literal["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"]

Symbol = Literal["circle", "x", "diamond", "square", "triangle-up"]

# On and off in widths of the line, for all who draw.
DASHES: dict[Dash, tuple[float, ...]] = {
    "solid": (),
    "dash": (3.6, 1.6),
    "dot": (1.1, 1.3),
    "dashdot": (4.5, 1.4, 1.1, 1.4),
    "longdash": (7.0, 1.8),
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


@dataclass(frozen=True)
class Stops:
    """Colours from faint to strong, for a light and for a dark background."""

    light: tuple[str, ...]
    dark: tuple[str, ...]


BLUE = Hue(Colour("#0072b2", "#58b2ee"), Colour("#4f94c1", "#4682ad"))
VERMILION = Hue(Colour("#d55e00", "#ff8f45"), Colour("#d67f43", "#b06a3b"))
GREEN = Hue(Colour("#00805c", "#30cc9c"), Colour("#3aa283", "#338f73"))
PURPLE = Hue(Colour("#a8478c", "#ee92cb"), Colour("#c07cab", "#a4658d"))
YELLOW = Hue(Colour("#8f6600", "#edc14a"), Colour("#b08c36", "#a3873a"))
GREY = Hue(Colour("#4d5562", "#d3d9e3"), Colour("#8b93a1", "#8b93a1"))

HUES = (BLUE, VERMILION, GREEN, PURPLE, YELLOW, GREY)
RAMP = Stops(("#a6cbe3", "#0072b2", "#15264f"), ("#35597a", "#58b2ee", "#e2f2ff"))
FAMILIES = {"nesterov": VERMILION, "adam": GREEN, "momentum": PURPLE, "rmsprop": YELLOW, "sgd": BLUE}  # first match

# Dashes of contestants with one hue, in this order until one is free.
DASH_ORDER: dict[tuple[bool, bool], tuple[Dash, ...]] = {
    (True, False): ("solid", "longdash", "longdashdot"),  # C-
    (True, True): ("longdashdot", "longdash", "dashdot"),  # C- with BatchNorm
    (False, False): ("dash", "dashdot", "dot"),  # plain
    (False, True): ("dot", "dashdot", "dash"),  # plain with BatchNorm
}


@dataclass(frozen=True)
class CurveStyle:
    """How the curves of one group are drawn."""

    colour: Colour
    dash: Dash
    width: float  # in pixels
    symbol: Symbol
    points_only: bool  # no line in any panel


@dataclass(frozen=True)
class Contestant:
    """What the name of a group says.

    >>> Contestant.named("C-SGD, lr 0.7")
    Contestant(base='SGD', consequentialist=True, batch_norm=False)
    >>> Contestant.named("Nesterov-BN")
    Contestant(base='Nesterov', consequentialist=False, batch_norm=True)
    >>> Contestant.named("SGD without BatchNorm").batch_norm
    False
    """

    base: str
    consequentialist: bool
    batch_norm: bool

    @classmethod
    def named(cls, group: str) -> "Contestant":
        """Reads the name of a group."""
        rest, prefixes = re.subn(r"\bC-(?=\w)", "", group)
        rest = re.sub(r"[\s,]*(without|no) (BN|BatchNorm)\b", "", rest)
        rest, norms = re.subn(r"[\s,+-]*(with |and )?\b(BN|BatchNorm)\b", "", rest)
        if any(family in rest.lower() for family in FAMILIES):  # a number after it is its learning rate
            rest = re.sub(r"[\s,(]*((learning rate|lr|μ)[\s=]*)?\d[\d.e-]*\)?$", "", rest)
        return cls(rest.strip() or group, prefixes > 0, norms > 0)


def dashes(curve_style: CurveStyle, style: str) -> tuple[float, ...]:
    """Returns the lengths on and off of a curve's line, in widths of it; none for a solid one.

    Args:
        curve_style: of its group.
        style: of the series; a dashed one is never solid.
    """
    return DASHES["dash" if style == "dashed" and curve_style.dash == "solid" else curve_style.dash]


def group_of(series: Series) -> str:
    """Returns the name of the group."""
    return series.group or series.label


def curve_styles(figure: Figure) -> dict[str, CurveStyle]:
    """Returns the style of every group of a figure, in the order of a legend: those of one base side by side."""
    styles: dict[str, set[str]] = {}
    for panel in figure.panels:
        for series in panel.series:
            styles.setdefault(group_of(series), set()).add(series.style)
    points = [group for group, used in styles.items() if used == {"markers"}]
    symbols = dict(zip(points, cycle(get_args(Symbol)), strict=False))
    named = {group: Contestant.named(group) for group in styles}
    bases = [contestant.base for contestant in named.values()]
    order_of_legend = sorted(named, key=lambda group: (group in points, bases.index(named[group].base)))
    contestants = {group: named[group] for group in order_of_legend}
    if _is_sequence(contestants):
        return {
            group: CurveStyle(colour, "solid", 2.2, "circle", False) for group, colour in _ramp(contestants).items()
        }
    if len(set(bases)) == 1 and 2 < len(contestants) <= len(HUES):  # variants of one optimiser: a hue for each
        return {
            group: CurveStyle(hue.strong, DASH_ORDER[one.consequentialist, one.batch_norm][0], 2.4, "circle", False)
            for (group, one), hue in zip(contestants.items(), HUES, strict=False)
        }
    hues = _hues({contestant.base: group in points for group, contestant in contestants.items()})
    compares = any(contestant.consequentialist for contestant in contestants.values())
    taken: set[tuple[str, Dash]] = set()
    result = {}
    for group, contestant in contestants.items():
        # Where there is no C- version nothing needs to stand back; a single point never does.
        strong = contestant.consequentialist or not compares or group in points
        order = DASH_ORDER[strong, contestant.batch_norm]
        dash = next((dash for dash in order if (contestant.base, dash) not in taken), order[0])
        taken.add((contestant.base, dash))
        hue = hues[contestant.base]
        result[group] = CurveStyle(
            hue.strong if strong else hue.soft,
            dash,
            2.4 if strong else 2.2 if dash == "dot" else 1.9,  # dots look thinner than they are
            symbols.get(group, "circle"),
            group in points,
        )
    return result


def _is_sequence(groups: Iterable[str]) -> bool:
    """Tells whether groups are stages of one thing.

    >>> _is_sequence(["iteration 100", "iteration 2,000", "iteration 10,000"]), _is_sequence(["SGD", "Adam", "Adam 2"])
    (True, False)
    """
    names = list(groups)
    return len(names) > 2 and len({re.sub(r"[\d.,]+", "#", name) for name in names}) == 1


def _ramp(groups: Iterable[str]) -> dict[str, Colour]:
    """Gives groups, in the order of their numbers, colours from faint to strong."""
    names = sorted(groups, key=lambda name: float(re.sub(r"[^\d.]", "", name).strip(".") or 0))
    places = [place / (len(names) - 1) for place in range(len(names))]
    return {
        name: Colour(_between(RAMP.light, place), _between(RAMP.dark, place))
        for name, place in zip(names, places, strict=True)
    }


def _between(stops: tuple[str, ...], place: float) -> str:
    """Returns the colour at a place between 0 and 1.

    >>> _between(("#000000", "#0000ff", "#ffffff"), 0.75)
    '#8080ff'
    """
    first = min(int(place * (len(stops) - 1)), len(stops) - 2)
    part = place * (len(stops) - 1) - first
    channels = [[int(stop[at : at + 2], 16) for stop in stops[first : first + 2]] for at in (1, 3, 5)]
    return "#" + "".join(f"{round(low + part * (high - low)):02x}" for low, high in channels)


def _hues(bases: dict[str, bool]) -> dict[str, Hue]:
    """Gives every base a hue.

    Known families have their own. Points that belong to none (a start, a target) are grey. Others get the next hue that
    nobody has.

    Args:
        bases: whether they are drawn as points only, in the order of their appearance.
    """
    hues: dict[str, Hue] = {}
    for base, points_only in bases.items():
        known = next((hue for name, hue in FAMILIES.items() if name in base.lower()), None)
        if known is not None and known not in hues.values():
            hues[base] = known
        elif known is None and points_only:
            hues[base] = GREY
    free = cycle([hue for hue in HUES if hue not in hues.values()] or HUES)
    return {base: hues[base] if base in hues else next(free) for base in bases}
