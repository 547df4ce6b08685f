"""What an engine is: from weights' records and dampings to new gradients, which are not written yet."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from consequent.capture.records import Record
from consequent.maths.damping import Damping
from consequent.statistics.solution import Solution


class Work(NamedTuple):
    """A weight whose gradient is to be replaced.

    Attributes:
        record: what is known of the gradient in ``.grad``.
        damping: λ.
        may_wait: whether the host may wait for the device to look at a result.
    """

    record: Record
    damping: Damping
    may_wait: bool


class Engine(Protocol):
    """A way to compute consequentialist gradients."""

    def solve(self, works: Sequence[Work]) -> list[Solution]:
        """Solutions for those of the works that this engine takes; the others are left to the next engine."""
