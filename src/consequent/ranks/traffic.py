"""What crosses the wire, in bytes: the cost model that the choices are made by, and what they came to.

A ring of r ranks is assumed, which is what gloo and NCCL use for anything large. Each rank then sends

    to add up n bytes                   ``2 (r − 1) / r · n``
    to gather n bytes in all            ``(r − 1) / r · n``

and on average over all ranks

    to add up n bytes at one of them    ``(r² − 1) / r² · n``
    to send n bytes from one to all     ``(r − 1) / r · n``

The third is gloo's way: a ring adds up r parts, each of which then goes to the one rank. NCCL hands the sum on from
rank to rank, which is ``(r − 1) / r · n``.
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

Item = TypeVar("Item")

BUCKET = 25 * 2**20  # bytes that are sent together, as in DistributedDataParallel


def bytes_to_sum(size: int, ranks: int) -> int:
    """What each rank sends to add up so many bytes.

    Example:
        >>> bytes_to_sum(100, ranks=2), bytes_to_sum(100, ranks=4)
        (100, 150)
    """
    return 2 * (ranks - 1) * size // ranks


def bytes_to_gather(size: int, ranks: int) -> int:
    """What each rank sends to give so many bytes, all ranks' together, to all of them.

    Example:
        >>> bytes_to_gather(100, ranks=2), bytes_to_gather(100, ranks=4)
        (50, 75)
    """
    return (ranks - 1) * size // ranks


def bytes_to_sum_at_one(size: int, ranks: int) -> int:
    """What each rank sends, on average, to add up so many bytes at one rank.

    Example:
        >>> bytes_to_sum_at_one(100, ranks=2), bytes_to_sum_at_one(100, ranks=10)
        (75, 99)
    """
    return (ranks**2 - 1) * size // ranks**2


def bytes_from_one(size: int, ranks: int) -> int:
    """What each rank sends, on average, to give so many bytes from one rank to all others.

    Example:
        >>> bytes_from_one(100, ranks=2), bytes_from_one(100, ranks=4)
        (50, 75)
    """
    return (ranks - 1) * size // ranks


def in_buckets(
    items: Iterable[Item], size: Callable[[Item], int], kind: Callable[[Item], Hashable]
) -> list[list[Item]]:
    """What is sent together: items of one kind, in the given order, as many as fit a bucket.

    What is larger than a bucket has one for itself. The first buckets of all kinds come before all second ones: so
    where kinds are owners, no rank's first answers wait for another rank's last ones.

    Args:
        items: what is to be sent.
        size: bytes of an item.
        kind: what items must have in common.

    Example:
        >>> in_buckets([-20, 2, -5, -1], size=lambda item: abs(item) * 2**20, kind=lambda item: item > 0)
        [[-20, -5], [2], [-1]]
    """
    turns: list[dict[Hashable, list[Item]]] = []
    last: dict[Hashable, tuple[int, int]] = {}  # of each kind: the number of its last bucket, and how full that is
    for item in items:
        its_kind, its_size = kind(item), size(item)
        number, filled = last.get(its_kind, (0, 0))
        if filled and filled + its_size > BUCKET:
            number, filled = number + 1, 0
        last[its_kind] = number, filled + its_size
        if number == len(turns):
            turns.append({})
        turns[number].setdefault(its_kind, []).append(item)
    return [bucket for turn in turns for bucket in turn.values()]


def packed_length(size: int) -> int:
    """Numbers in the packed triangle of a symmetric matrix: n (n + 1) / 2, with n made even.

    Example:
        >>> packed_length(4), packed_length(3)
        (10, 10)
    """
    even = size + size % 2
    return even // 2 * (even + 1)


@dataclass
class LayerTraffic:
    """What one weight's correction sends at each step.

    Attributes:
        side: on which it is solved.
        rows: of all ranks' inputs together.
        choice: what is sent: "moment" (summed), "inputs" (gathered) or "rows" (inputs and output gradients, gathered).
        bytes: that each rank sends, for each of the choices that would be exact.
        owner: the rank that factorises for all; None where each does it for itself.
    """

    name: str
    side: str
    rows: int
    choice: str
    bytes: dict[str, int]
    owner: int | None = None


@dataclass
class Traffic:
    """The traffic of a correction. Printing it shows a table.

    Attributes:
        ranks: how many there are.
        layers: each weight of the last step.
        sent: bytes that this rank (or, to and from one rank, an average one) sent so far, by the model of a ring;
            ``before`` the last step.
        seconds: estimated for the sums and factorisations of the moments of the last step, ``shared`` out over ranks or
            ``repeated`` by all; none where there are none to share out.
    """

    ranks: int
    layers: list[LayerTraffic] = field(default_factory=list)
    sent: int = 0
    before: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def add_summed(self, size: int) -> None:
        """So many bytes are added up over ranks."""
        self.sent += bytes_to_sum(size, self.ranks)

    def add_gathered(self, size: int) -> None:
        """So many bytes, of all ranks together, are gathered."""
        self.sent += bytes_to_gather(size, self.ranks)

    def add_summed_at_one(self, size: int) -> None:
        """So many bytes are added up at one rank."""
        self.sent += bytes_to_sum_at_one(size, self.ranks)

    def add_from_one(self, size: int) -> None:
        """So many bytes go from one rank to all others."""
        self.sent += bytes_from_one(size, self.ranks)

    def begin_step(self) -> None:
        """A step begins."""
        self.before, self.layers, self.seconds = self.sent, [], {}

    @property
    def last_step(self) -> int:
        """Bytes that this rank sent for the last step."""
        return self.sent - self.before

    def __str__(self) -> str:
        width = max(len("layer"), *(len(layer.name) for layer in self.layers), 0)
        lines = [
            f"{self.ranks} ranks; each sent {_readable(self.last_step)} for the last step{self._estimates()}",
            f"{'layer':{width}}  side      {'rows':>9}  {'sends':8}  {'bytes':>10}  factorised by  instead of",
        ]
        for layer in self.layers:
            others = [f"{name} {_readable(size)}" for name, size in layer.bytes.items() if name != layer.choice]
            lines.append(
                f"{layer.name:{width}}  {layer.side:8}  {layer.rows:9,}  {layer.choice:8}  "
                f"{_readable(layer.bytes[layer.choice]):>10}  "
                f"{'every rank' if layer.owner is None else f'rank {layer.owner}':13}  {', '.join(others)}".rstrip()
            )
        return "\n".join(lines)

    def _estimates(self) -> str:
        if not self.seconds:
            return ""
        shared, repeated = (f"{1e3 * self.seconds[way]:.3g} ms" for way in ("shared", "repeated"))
        return f"; moments by estimate: {shared} with factorisations shared out, {repeated} with all repeated"


def _readable(size: float) -> str:
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"
