"""``(N S + λI)⁻¹`` of averaged moments, kept for several steps: a step's solve is then one product.

The inverse itself is ``Wᵀ W`` of the factor ``W`` (:mod:`consequent.engines.inverse_factor`), and a product with it is
as accurate as the two with W. Averages of one shape that are refreshed in the same step are inverted together.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from consequent.engines.inverse_factor import inverse_factor
from consequent.maths.damping import Damping, Level
from consequent.statistics.gradients import apart_from_rows, gradient_matrix
from consequent.statistics.moment import Solved, joined
from consequent.statistics.solution import Solution
from consequent.statistics.statistic import Statistic

if TYPE_CHECKING:
    from consequent.capture.records import Record
    from consequent.capture.use import Use


@dataclass(frozen=True, eq=False)
class Inverses:
    """Those of some averages of one shape.

    Attributes:
        matrices: ``[members, groups, n, n]``; ``I / (trace + λ)``, with which a gradient cannot overshoot, where there
            is no factor.
        status: ``[members, groups, 4]``, as a factor has it.
    """

    matrices: Tensor
    status: Tensor

    @cached_property
    def traces(self) -> Tensor:
        """``[members, groups]``, of ``N S``."""
        return self.status[..., 0]

    @cached_property
    def rescued(self) -> Tensor:
        """``[members]``: how many groups needed more damping."""
        return ((self.status[..., 2] > 0) & (self.status[..., 3] > 0)).sum(-1)

    @cached_property
    def failed(self) -> Tensor:
        """``[members]``: how many have no factor. NaN or inf is no failure: it is told otherwise."""
        return ((self.status[..., 2] == 0) & self.traces.isfinite()).sum(-1)

    @cached_property
    def counts(self) -> list[tuple[int, int]]:
        """How many of each member were rescued, and how many failed. Waits for the device, once."""
        return list(zip(self.rescued.tolist(), self.failed.tolist(), strict=True))

    @cached_property
    def counts_on_device(self) -> dict[str, Tensor]:
        """The same of all members together, by the names of counters; and a zero."""
        return {"rescued": self.rescued.sum(), "fallen_back": self.failed.sum(), "none": (0 * self.failed).sum()}

    def at(self, places: list[int]) -> "Inverses":
        """Those at these places, which mostly follow each other."""
        first, count = places[0], len(places)
        if places == list(range(first, first + count)):
            whole = count == len(self.matrices)
            return self if whole else Inverses(*[one[first : first + count] for one in (self.matrices, self.status)])
        return Inverses(*[torch.stack([one[place] for place in places]) for one in (self.matrices, self.status)])

    @cached_property
    def whole_traces(self) -> Tensor:
        """``[members]``: of all groups together."""
        return self.traces.sum(-1)


def invert(moments: Tensor, level: Level) -> Inverses:
    """The inverses of these matrices plus λI.

    Args:
        moments: ``[members, groups, n, n]``; may be overwritten.
        level: λ.
    """
    factors = inverse_factor(moments, level, overwrite=True, few_calls=True)
    traces, levels, is_good, _ = factors.status.unbind(-1)
    is_good = is_good > 0
    matrices = factors.inverse.mT @ factors.inverse
    matrices.masked_fill_(~is_good[..., None, None], 0)
    matrices.diagonal(dim1=-2, dim2=-1).add_(torch.where(is_good, 0, 1 / (traces + levels))[..., None])
    return Inverses(matrices, factors.status)


@dataclass(frozen=True, eq=False)
class Kept(Statistic):
    """What stands for the inputs of a weight: the inverse of their averaged moment.

    Attributes:
        inverses: among which it is,
        place: and where.
        growth: how many times as many rows there are in this step as the inverse is for, where all of ``N S + λI`` has
            grown with them.
    """

    inverses: Inverses
    place: int
    growth: float = 1.0

    def add(self, use: "Use") -> "Statistic":
        """Does not happen: it is put there at the step, when all uses have been added."""
        raise NotImplementedError

    def solve(self, record: "Record", damping: Damping, *, may_wait: bool) -> Solution:
        """``G (N S + λI)⁻¹``."""
        matrix, traces = self.inverses.matrices[self.place], self.inverses.traces[self.place] * self.growth
        gradient = gradient_matrix(record).to(matrix.dtype)
        apart = apart_from_rows(record, damping, traces, may_wait=may_wait) if record.beside else None
        solution = (gradient if apart is None else gradient - apart.all) @ matrix / self.growth
        rescued: int | Tensor
        failed: int | Tensor
        if may_wait:
            rescued, failed = self.inverses.counts[self.place]
        else:
            rescued, failed = self.inverses.rescued[self.place], self.inverses.failed[self.place]
        finite = (traces.sum() + gradient.sum() + solution.sum()).isfinite()
        return joined(record, gradient, Solved(solution, finite, rescued, failed), apart, traces.sum())
