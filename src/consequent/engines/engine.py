"""What an engine is: from weights' records and dampings to new gradients, which are written when all are known."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from consequent.capture.records import Record
from consequent.maths.damping import Damping
from consequent.statistics.solution import Solution


class Work(NamedTuple):
    """A weight whose gradient is to be replaced.

    Attributes:
        record: what is known of the gradient in ``.grad``.
        damping: λ.
        may_wait: whether the host may wait for the device to look at a result.
        scale: what the new gradient is multiplied by: the loss's divisor.
        limit: of the change that it may make (:mod:`consequent.maths.bound`), the scale left out; None: there is none.
    """

    record: Record
    damping: Damping
    may_wait: bool
    scale: float
    limit: float | None = None


class Outcome(NamedTuple):
    """What was decided for the whole step, and who counts it.

    Attributes:
        finite: whether neither NaN nor inf was met: True, or a tensor on a device that is not waited for.
        counts: of a device, int64, an element for each of :data:`consequent.reports.counters.NAMES`.
        counts_step: whether the device counts this step (a CUDA graph does, each time it is replayed),
        counts_skip: and, if NaN or inf was met, a skipped one.
    """

    finite: bool | Tensor
    counts: Callable[[torch.device], Tensor]
    counts_step: bool
    counts_skip: bool


class Engine(Protocol):
    """A way to compute consequentialist gradients."""

    def solve(self, works: Sequence[Work]) -> list[Solution]:
        """Solutions for those of the works that this engine takes; the others are left to the next engine."""

    def write(self, solutions: Sequence[Solution], outcome: Outcome) -> None:
        """Put the solutions, all of this engine's, in the place of the gradients; zeros unless finite."""


class WritesOneByOne:
    """What engines have in common whose solutions write themselves."""

    def write(self, solutions: Sequence[Solution], outcome: Outcome) -> None:
        """Put the solutions in the place of the gradients; zeros unless finite."""
        for solution in solutions:
            solution.write(outcome.finite)
