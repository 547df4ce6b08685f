"""Who factorises which matrix: one rank for all of them, or every rank for itself, whichever is estimated to be faster.

Every rank can add up all second moments and factorise all of them: the same work everywhere. Or the sum is made at one
rank, the matrix's owner, which factorises it and sends the factor to all. A sum over ranks is a sum at one place and a
copy to all others anyway, so this takes hardly more bytes, and each rank factorises only its share. It takes more
messages, so that small matrices are repeated.

Everything here follows from numbers that all ranks know, so that all of them come to the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from consequent.ranks.traffic import bytes_to_sum, in_buckets


class Rates(NamedTuple):
    """How fast things go. All of these are assumptions, in round numbers; no run is timed."""

    factorising: float  # n³ per second
    sending: float  # bytes per second
    message: float  # seconds that each message takes besides


ON_GPUS = Rates(factorising=25e12, sending=45e9, message=30e-6)  # with a network card of 400 Gbit/s
ON_CPUS = Rates(factorising=80e9, sending=1e9, message=300e-6)  # a core, and a network card of 10 Gbit/s


def rates_on(device: torch.device) -> Rates:
    """What is assumed of a device."""
    return ON_CPUS if device.type == "cpu" else ON_GPUS


class Matrix(NamedTuple):
    """What is to be factorised: so many matrices of n × n, and the bytes of their triangles."""

    groups: int
    size: int
    bytes: int

    @property
    def operations(self) -> int:
        """What factorising it takes, in units of about one multiplication."""
        return self.groups * self.size**3


@dataclass(frozen=True)
class Division:
    """Who factorises what, and why.

    Attributes:
        owners: of each matrix; None where every rank factorises it.
        repeated: seconds for summing and factorising, if every rank did all of it.
        shared: seconds if matrices are shared out, as many as is best, but at least one.
    """

    owners: tuple[int | None, ...]
    repeated: float
    shared: float


def balanced(costs: Sequence[float], ranks: int) -> list[int]:
    """An owner for each cost: the largest first, each to the rank that has least so far.

    No rank gets more than 4/3 of the best possible division (Graham's bound for this rule).

    Example:
        >>> balanced([1, 5, 3, 3], ranks=2)
        [0, 0, 1, 1]
    """
    loads = [0.0] * ranks
    owners = [0] * len(costs)
    for place in _largest_first(costs):
        owners[place] = loads.index(min(loads))
        loads[owners[place]] += costs[place]
    return owners


@lru_cache(maxsize=64)
def divided(matrices: tuple[Matrix, ...], ranks: int, rates: Rates) -> Division:
    """Share out as many of the largest matrices as is estimated to be best; the others are repeated.

    Example:
        >>> large, small = Matrix(1, 4096, 33_562_624), Matrix(1, 64, 8_320)
        >>> divided((small, large, large, small), 2, ON_GPUS).owners
        (None, 0, 1, None)
    """
    costs = [matrix.operations for matrix in matrices]
    best = balanced(costs, ranks)
    owners: list[int | None] = [None] * len(matrices)
    repeated = _seconds(matrices, owners, ranks, rates)
    found: list[tuple[float, tuple[int | None, ...]]] = []
    for place in _largest_first(costs):  # the order of the balancing: what is not in there yet does not change it
        owners[place] = best[place]
        found.append((_seconds(matrices, owners, ranks, rates), tuple(owners)))
    shared, chosen = min(found, key=lambda pair: pair[0], default=(repeated, ()))
    return Division(chosen if shared < repeated else (None,) * len(matrices), repeated, shared)


def _seconds(matrices: Sequence[Matrix], owners: Sequence[int | None], ranks: int, rates: Rates) -> float:
    """Estimated time for sums, factorisations and factors, one after the other."""
    pairs = list(zip(matrices, owners, strict=True))
    operations: dict[int | None, int] = {None: 0}
    sizes: dict[int | None, int] = {None: 0}
    for matrix, owner in pairs:
        operations[owner] = operations.get(owner, 0) + matrix.operations
        sizes[owner] = sizes.get(owner, 0) + matrix.bytes
    factorising = operations.pop(None) + max(operations.values(), default=0)
    # To one rank, or from one, the bytes go through all ranks in turn: every link carries all of them.
    sent = bytes_to_sum(sizes.pop(None), ranks) + 2 * sum(sizes.values())
    buckets = in_buckets(pairs, size=lambda pair: pair[0].bytes, kind=lambda pair: pair[1])
    messages = sum(1 if owner is None else 2 for (_, owner), *_ in buckets)
    return factorising / rates.factorising + sent / rates.sending + messages * rates.message


def _largest_first(costs: Sequence[float]) -> list[int]:
    return sorted(range(len(costs)), key=lambda place: (-costs[place], place))
