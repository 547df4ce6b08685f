"""How the paper's words are measured: straight, oscillating, steady, a sharp drop, at 100 % and staying there."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

Curve = Sequence[tuple[float, float]]  # where (iterations, seconds) and what was read there

SHARP_DROP, EPOCHS_OF_A_DROP = 0.1, 5  # to such a part of the loss so many epochs before
ABOUT = 0.25  # earlier or later, as a fraction


def detour(path: Sequence[Sequence[float]]) -> float:
    """Returns how far a path leaves the straight line between its ends, as a fraction of that line: 0 is straight.

    >>> detour([(0, 0), (1, 0), (2, 0)]), detour([(0, 0), (1, 1), (2, 0)])
    (0.0, 0.5)
    """
    start, end = path[0], path[-1]
    chord = [b - a for a, b in zip(start, end, strict=True)]
    length = math.hypot(*chord)
    if length == 0:
        return 0.0 if all(tuple(point) == tuple(start) for point in path) else math.inf
    farthest = 0.0
    for point in path:
        arm = [b - a for a, b in zip(start, point, strict=True)]
        along = sum(a * c for a, c in zip(arm, chord, strict=True)) / length
        along = min(max(along, 0.0), length)  # beyond an end, the distance is that to the end
        farthest = max(farthest, math.dist(arm, [along * c / length for c in chord]))
    return farthest / length


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
    limit = tolerance * distances[0]
    outside = [step for step, distance in enumerate(distances) if not distance <= limit]
    last = outside[-1] if outside else -1
    return last + 1 if last + 1 < len(distances) else None


def roughness(losses: Sequence[float]) -> float:
    """Returns the mean rise of the loss, in decades per reading; falls count as 0. A loss that never rises has 0.

    >>> roughness([1.0, 0.1, 1.0, 0.1]), roughness([3.0, 2.0, 1.0])
    (0.3333333333333333, 0.0)
    """
    logs = [_log(loss) for loss in losses]
    rises = [max(0.0, after - before) for before, after in pairwise(logs)]
    return sum(rises) / len(rises)


def first_above(curve: Curve, level: float) -> float | None:
    """Returns where a curve is first at or above a level, or None."""
    return next((place for place, value in curve if value >= level), None)


def sharp_drop(curve: Curve) -> float | None:
    """Returns where the loss is first a tenth, or less, of what it was five readings before, or None.

    The first reading, of a network that has learnt nothing, is not among them; nor is it a drop to come back from a
    rise: the loss has to be lower than ever before.

    >>> sharp_drop([(0, 99.0), (1, 9.0), (2, 8.0), (3, 7.0), (4, 6.0), (5, 5.0), (6, 0.95), (7, 0.8), (8, 0.7)])
    7
    """
    readings = curve[1:]
    lowest = math.inf
    for number, (place, value) in enumerate(readings):
        before = readings[number - EPOCHS_OF_A_DROP][1] if number >= EPOCHS_OF_A_DROP else 0.0
        if value < lowest and value <= SHARP_DROP * before:
            return place
        lowest = min(lowest, value)
    return None


def stays_above(curve: Curve, level: float) -> float | None:
    """Returns where a curve gets to a level for good, or None if it ends below.

    >>> stays_above([(0, 0.5), (10, 1.0), (20, 0.9), (30, 1.0), (40, 1.0)], 1.0)
    30
    """
    found = None
    for place, value in reversed(curve):
        if value < level:
            break
        found = place
    return found


def advantage(curve: Curve, other: Curve, until: float = math.inf) -> float | None:
    """Returns by how many decades a loss is below another one, on average over the stretch that both cover.

    Both are compared at the places of the first; between its own readings the other is interpolated, on a logarithmic
    scale. Positive is better; None: they have no stretch in common, before a place where it ends.

    >>> advantage([(0, 1.0), (10, 0.01)], [(0, 1.0), (20, 0.01)])
    0.5
    """
    places = [place for place, _ in other]
    logs = [_log(loss) for _, loss in other]
    end = min(places[-1], until)
    gains = [_between(place, places, logs) - _log(value) for place, value in curve if places[0] <= place <= end]
    return sum(gains) / len(gains) if gains else None


def _between(place: float, places: list[float], values: list[float]) -> float:
    after = bisect_right(places, place)
    if after == len(places):
        return values[-1]
    share = (place - places[after - 1]) / (places[after] - places[after - 1])
    return values[after - 1] + share * (values[after] - values[after - 1])


def apart(curve: Curve, other: Curve) -> float | None:
    """Returns by how many decades two losses differ, whichever is lower, on average over the places that both have.

    >>> apart([(0, 1.0), (1, 0.1), (2, 0.1)], [(0, 1.0), (1, 1.0), (2, 0.01)])
    0.6666666666666666
    """
    values = dict(other)
    gaps = [abs(_log(value) - _log(values[place])) for place, value in curve if place in values]
    return sum(gaps) / len(gaps) if gaps else None


def distance(curve: Curve, other: Curve, until: float = math.inf) -> float | None:
    """Returns the mean distance of two curves, over the places that both have, up to one."""
    values = dict(other)
    gaps = [abs(value - values[place]) for place, value in curve if place in values and place <= until]
    return sum(gaps) / len(gaps) if gaps else None


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
    found = None
    for place, value in reversed(curve):
        if place in values:
            if value >= values[place]:
                break
            found = place
    return found


def smoothed(curve: Curve, width: int) -> list[tuple[float, float]]:
    """Returns the geometric means over so many readings, each at the place of the last of them."""
    if width < 2:
        return list(curve)
    return [
        (curve[end - 1][0], 10 ** (sum(_log(value) for _, value in curve[end - width : end]) / width))
        for end in range(width, len(curve) + 1)
    ]


def _log(loss: float) -> float:
    return math.log10(max(loss, 1e-12))  # a loss of exactly 0 has no logarithm, and is no infinite progress
