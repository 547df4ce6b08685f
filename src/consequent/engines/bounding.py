"""Shortening the solutions of a step that would change a layer's outputs too much (:mod:`consequent.maths.bound`)."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from consequent.maths.bound import Change, shortening, shortenings_on_device
from consequent.statistics.solution import Solution


class Bounded(NamedTuple):
    """A solution that the bound is for.

    Attributes:
        solution: whose scale is made smaller.
        change: that it makes.
        limit: of that.
        may_wait: whether the host may wait for the device to look.
    """

    solution: Solution
    change: Change
    limit: float
    may_wait: bool


def shorten(cases: Sequence[Bounded]) -> list[int | Tensor]:
    """Shorten those that need it; how many did, a tensor for each device that is not waited for."""
    seen = [case for case in cases if case.may_wait]
    counts: list[int | Tensor] = [0]
    for solution, change, limit, _ in seen:
        factor = shortening(change, limit)
        if factor < 1:
            solution.scale *= factor
            counts[0] += 1
    by_device: dict[torch.device, list[Bounded]] = {}
    for case in cases:
        if not case.may_wait:
            by_device.setdefault(case.solution.record.weight.device, []).append(case)
    for unseen in by_device.values():
        factors = shortenings_on_device([case.change for case in unseen], [case.limit for case in unseen])
        for case, shorter in zip(unseen, factors.unbind(), strict=True):
            case.solution.scale = case.solution.scale * shorter
        counts.append((factors < 1).sum())
    return counts
