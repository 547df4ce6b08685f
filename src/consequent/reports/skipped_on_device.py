"""Steps that a device has skipped by itself: its count is sent to the host now and then, and read when it is there."""

from collections.abc import Iterable

from torch import Tensor

from consequent.capture.arriving import Arriving
from consequent.capture.torch_internals import graph_is_being_captured


class SkippedOnDevice:
    """How many of the last steps were skipped, without waiting for the device at any of them.

    Steps of a CUDA graph that is replayed pass this by: the host has no part in them.

    Args:
        every: after so many steps it is looked.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self.start_again()

    def start_again(self) -> None:
        """From counts that were set to something else."""
        self._steps = 0
        self._before: float | None = None  # how many were skipped when it was looked for the last time
        self._on_their_way: list[Arriving] = []

    def after_step(self, skipped: Iterable[Tensor]) -> int | None:
        """A step was launched: how many of as many as it looks at were skipped, where that has just become known.

        Args:
            skipped: on each device, how many steps were skipped so far.
        """
        if graph_is_being_captured():
            return None
        if self._steps % self._every == 0:
            self._on_their_way = [Arriving(count) for count in skipped]
        self._steps += 1
        if not self._on_their_way or not all(count.is_there for count in self._on_their_way):
            return None
        before, now = self._before, sum(map(float, self._on_their_way))
        self._before, self._on_their_way = now, []
        return None if before is None else int(now - before)
