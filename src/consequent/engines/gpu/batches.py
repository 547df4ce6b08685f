"""Things that wait for others of their kind, to be done together."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass
class _Waiting(Generic[T]):
    items: list[T] = field(default_factory=list)
    bytes: int = 0


class Batches(Generic[T]):
    """Batches of one kind each, done as soon as nothing is gained by waiting longer.

    That is when a batch is large enough, when those that wait hold on to too much memory (then the oldest goes), and
    when all have come that came in the last round.

    Args:
        most: how many a batch has at most.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: dict[Hashable, _Waiting[T]] = {}  # by kind, the oldest first
        self._came: dict[Hashable, int] = {}  # in this round,
        self._expected: dict[Hashable, int] = {}  # and in the one before

    def add(self, kind: Hashable, item: T, size: int, room: int) -> list[list[T]]:
        """Let one more wait.

        Args:
            kind: with whom it can be done.
            item: what is to be done.
            size: bytes that it holds on to while it waits.
            room: bytes that all together may hold on to.

        Returns:
            the batches that are to be done now.
        """
        waiting = self._waiting.setdefault(kind, _Waiting())
        waiting.items.append(item)
        waiting.bytes += size
        came = self._came[kind] = self._came.get(kind, 0) + 1
        ready = []
        if len(waiting.items) == self._most or waiting.bytes >= room or came == self._expected.get(kind):
            ready.append(self._waiting.pop(kind).items)
        while sum([each.bytes for each in self._waiting.values()]) >= room:
            ready.append(self._waiting.pop(next(iter(self._waiting))).items)
        return ready

    def flush(self) -> list[list[T]]:
        """The batches that are left, although more may come in this round."""
        left, self._waiting = [waiting.items for waiting in self._waiting.values()], {}
        return left

    def end_round(self) -> list[list[T]]:
        """No more will come in this round: the batches that are left."""
        self._expected, self._came = self._came, {}
        return self.flush()

    def forget(self) -> None:
        """Drop what waits, and begin the round anew."""
        self._waiting, self._came = {}, {}
