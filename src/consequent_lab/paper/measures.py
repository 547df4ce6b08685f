"""How the paper's words are measured: straight, oscillating, steady, a sharp drop, at 100 % and staying there."""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TypeVar

import numpy as np

Place = TypeVar("Place", int, float)
Curve = Sequence[tuple[float, float]]  # where (iterations, seconds) and the value there

SHARP_DROP, EPOCHS_OF_A_DROP = 0.1, 5  # to such a part of the loss so many epochs before
ABOUT = 0.25  # earlier or later, as a fraction


def detour(path: Sequence[Sequence[float]]) -> float:
    """Returns how far a path leaves the straight line between its ends, as a fraction of that line: 0 is straight.

    >>> detour([(0, 0), (1, 0), (2, 0)]), detour([(0, 0), (1, 1), (2, 0)])
    (0.0, 0.5)
    """
    points = np.array(path, dtype=float) - np.array(path[0], dtype=float)
    chord, length = points[-1], np.linalg.norm(points[-1])
    if length == 0:
        return math.inf if points.any() else 0.0
    along = np.clip(points @ chord / length**2, 0, 1)  # beyond an end, the distance is that to the end
    return float(np.linalg.norm(points - np.outer(along, chord), axis=1).max() / length)


def swings(values: Sequence[float], optimum: float, tolerance: float = 0.01) -> int:
    """Returns how often a value passes its optimum while it is farther off than a fraction of its first distance.

    >>> swings([1.0, -0.5, 0.25, -0.001], 0.0), swings([1.0, 0.5, 0.25], 0.0)
    (2, 0)
    """
    limit = tolerance * abs(values[0] - optimum)
    far = [value - optimum for value in values if abs(value - optimum) > limit]
    return sum(1 for before, after in pairwise(far) if before * after < 0)


def overshoot(values: Sequence[float], optimum: float) -> float:
    """Returns how far a value gets beyond its optimum, as a fraction of its first distance from it.

    >>> overshoot([1.0, 0.2, -0.3, 0.1], 0.0), overshoot([1.0, 0.5], 0.0)
    (0.3, 0.0)
    """
    first = values[0] - optimum
    return max(0.0, *(-(value - optimum) / first for value in values))


def steps_until(distances: Sequence[float], tolerance: float = 0.01) -> int | None:
    """Returns after how many steps a distance stays within a fraction of the first one, or None.

    >>> steps_until([1.0, 0.005, 0.2, 0.003]), steps_until([1.0, 0.5])
    (3, None)
    """
    return _for_good(enumerate(distance <= tolerance * distances[0] for distance in distances))


def roughness(losses: Sequence[float]) -> float:
    """Returns the mean rise of the loss from value to value, in decades; falls count as 0.

    >>> roughness([1.0, 0.1, 1.0, 0.1]), roughness([3.0, 2.0, 1.0])
    (0.3333333333333333, 0.0)
    """
    return float(np.diff(_logs(losses)).clip(min=0).mean())


def first_above(curve: Curve, level: float) -> float | None:
    """Returns where a curve is first at or above a level, or None."""
    return next((place for place, value in curve if value >= level), None)


def sharp_drop(curve: Curve) -> float | None:
    """Returns where the loss is first a tenth, or less, of what it was five epochs before, or None.

    The first value, of a network that has learnt nothing, is not among them; nor is it a drop to come back from a rise:
    the loss has to be lower than ever before.

    >>> sharp_drop([(0, 99.0), (1, 9.0), (2, 8.0), (3, 7.0), (4, 6.0), (5, 5.0), (6, 0.95), (7, 0.8), (8, 0.7)])
    7
    """
    lowest = math.inf
    for number, (place, value) in enumerate(curve[1:]):
        before = curve[1 + number - EPOCHS_OF_A_DROP][1] if number >= EPOCHS_OF_A_DROP else 0.0
        if value < lowest and value <= SHARP_DROP * before:
            return place
        lowest = min(lowest, value)
    return None


def stays_above(curve: Curve, level: float) -> float | None:
    """Returns where a curve gets to a level for good, or None if it ends below.

    >>> stays_above([(0, 0.5), (10, 1.0), (20, 0.9), (30, 1.0), (40, 1.0)], 1.0)
    30
    """
    return _for_good((place, value >= level) for place, value in curve)


def _for_good(states: Iterable[tuple[Place, bool]]) -> Place | None:
    """Returns where the last stretch begins in which something is so; None if it is not so at the end."""
    found = None
    for place, is_so in reversed(list(states)):
        if not is_so:
            break
        found = place
    return found


def advantage(curve: Curve, other: Curve, until: float = math.inf) -> float | None:
    """Returns by how many decades a loss is below another one, on average over the stretch that both cover.

    Both are compared at the places of the first; between its own places the other is interpolated, on a logarithmic
    scale. Positive is better; None: they have no stretch in common, before a place where it ends.

    >>> advantage([(0, 1.0), (10, 0.01)], [(0, 1.0), (20, 0.01)])
    0.5
    """
    places, losses = zip(*other, strict=True)
    shared = [(place, loss) for place, loss in curve if places[0] <= place <= min(places[-1], until)]
    if not shared:
        return None
    here, mine = zip(*shared, strict=True)
    return float((np.interp(here, places, _logs(losses)) - _logs(mine)).mean())


def distance(curve: Curve, other: Curve, until: float = math.inf, *, in_decades: bool = False) -> float | None:
    """Returns the mean distance of two curves, whichever is lower, over the places that both have, up to one.

    >>> distance([(0, 1.0), (1, 0.1), (2, 0.1)], [(0, 1.0), (1, 1.0), (2, 0.01)], in_decades=True)
    0.6666666666666666
    """
    values = dict(other)
    pairs = [(value, values[place]) for place, value in up_to(curve, until) if place in values]
    return float(np.abs(np.diff(_logs(pairs) if in_decades else pairs)).mean()) if pairs else None


def up_to(curve: Curve, place: float) -> Curve:
    """Returns a curve as far as a place."""
    return [point for point in curve if point[0] <= place]


def about(place: float | None, said: float) -> bool:
    """Returns whether a place is the one that was said, up to a quarter earlier or later.

    >>> about(6_000, 8_000), about(5_900, 8_000), about(10_100, 8_000), about(None, 8_000)
    (True, False, False, False)
    """
    return place is not None and abs(place - said) <= ABOUT * said


def crossing(curve: Curve, other: Curve) -> float | None:
    """Returns where a loss gets below another one for good, over the places that both have; None if it ends above.

    >>> crossing([(0, 2.0), (1, 0.4), (2, 0.6), (3, 0.1)], [(0, 1.0), (1, 0.5), (2, 0.5), (3, 0.5)])
    3
    """
    values = dict(other)
    return _for_good((place, value < values[place]) for place, value in curve if place in values)


def smoothed(curve: Curve, width: int) -> Curve:
    """Returns the geometric means over so many values, each at the last one's place; none of a shorter curve."""
    if len(curve) < width:
        return []
    places, losses = zip(*curve, strict=True)
    means = 10 ** np.convolve(_logs(losses), np.full(width, 1 / width), "valid")
    return list(zip(places[width - 1 :], means.tolist(), strict=True))


def _logs(losses: Sequence[float] | Sequence[tuple[float, float]]) -> np.ndarray:
    return np.log10(np.maximum(losses, 1e-12))  # a loss of exactly 0 has no logarithm, and is no infinite progress
