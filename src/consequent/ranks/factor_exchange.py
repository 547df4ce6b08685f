"""Each second moment goes to the rank that owns it, which factorises the sum; the factor comes back to all.

What comes back is a triangle and four numbers. From a GPU that is not waited for it is ``W = L⁻¹`` and how it went
(:class:`consequent.engines.inverse_factor.InverseFactor`). From one that may be waited for, and from a CPU, it is
``L``, with which each rank solves as it would with its own. A matrix that gives any trouble there comes back as the sum
that it is: each rank then treats it as one process would, in float64 where that helps.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from consequent.capture.records import Record
from consequent.engines.inverse_factor import InverseFactor, inverse_factor
from consequent.maths.damping import Damping
from consequent.maths.packed_triangle import packed, unpacked, unpacked_triangle
from consequent.maths.ridge import quick_cholesky
from consequent.ranks.process_group import Ranks
from consequent.ranks.traffic import in_buckets
from consequent.statistics.moment import Factor, Moment

if TYPE_CHECKING:
    from torch.distributed import Work

_STATUS = 4  # numbers for each matrix
_IS_CHOLESKY, _IS_MOMENT = 1.0, -1.0  # all four numbers, where one may look


@dataclass
class Job:
    """One weight's moment, and who factorises it."""

    record: Record
    owner: int
    damping: Damping
    rows: int  # of all ranks
    triangle: Tensor = field(init=False)  # of this rank's moment; once all ranks' have come to the owner, of the sum

    def __post_init__(self) -> None:
        assert isinstance(self.record.statistic, Moment)
        self.triangle = packed(self.record.statistic.matrix)

    @property
    def groups(self) -> int:
        """How many matrices there are."""
        return len(self.triangle)


@dataclass
class _Parcel:
    """Jobs of one owner that travel together."""

    owner: int
    jobs: list[Job]
    coming: "list[Work]"
    factors: Tensor = field(init=False)
    going: "Work" = field(init=False)

    @property
    def lengths(self) -> list[int]:
        """Of what goes back, in numbers: a triangle and the status for each job."""
        return [length for job in self.jobs for length in (job.triangle.numel(), job.groups * _STATUS)]


class FactorExchange:
    """The moments of a step that are factorised by one rank each.

    Args:
        ranks: all ranks.
        jobs: in an order that is the same on all of them.
        may_wait: whether the host may wait for a tensor's device to look at a result.
    """

    def __init__(self, ranks: Ranks, jobs: Iterable[Job], may_wait: Callable[[Tensor], bool]) -> None:
        self._ranks = ranks
        self._may_wait = may_wait
        parcels = in_buckets(
            jobs, lambda job: job.triangle.nbytes, lambda job: (job.owner, job.triangle.dtype, job.triangle.device)
        )
        self._parcels = [self._start(parcel) for parcel in parcels]

    def _start(self, jobs: list[Job]) -> _Parcel:
        moments = torch.cat([job.triangle.flatten() for job in jobs])
        for job, part in zip(jobs, moments.split([job.triangle.numel() for job in jobs]), strict=True):
            job.triangle = part.view(job.triangle.shape)  # in memory once
        return _Parcel(jobs[0].owner, jobs, self._ranks.start_sum_at(jobs[0].owner, moments))

    def factorise(self) -> None:
        """Factorise what this rank owns, and start to send it; start to receive the other factors."""
        for parcel in self._parcels:
            if parcel.owner == self._ranks.rank:
                _wait(parcel.coming)
                answers = [self._answer(job) for job in parcel.jobs]
                parcel.factors = torch.cat([part.flatten() for answer in answers for part in answer])
            else:
                parcel.factors = parcel.jobs[0].triangle.new_empty(sum(parcel.lengths))
            parcel.going = self._ranks.start_send(parcel.owner, parcel.factors)

    def _answer(self, job: Job) -> tuple[Tensor, Tensor]:
        """What goes back: a triangle and the status."""
        moment = unpacked(job.triangle, job.record.columns)
        level = job.damping.level(job.rows, moment.shape[-1])
        if not self._may_wait(moment):
            factor = inverse_factor(moment, level)
            return packed(factor.inverse), factor.status
        cholesky = quick_cholesky(moment, level(moment), with_digits=False)
        if cholesky is None:
            return job.triangle, moment.new_full((job.groups, _STATUS), _IS_MOMENT)
        return packed(cholesky), moment.new_full((job.groups, _STATUS), _IS_CHOLESKY)

    def finish(self) -> None:
        """Give every record its factor; the owner's own, too, takes what was sent, and so the same bits."""
        for parcel in self._parcels:
            _wait(parcel.coming)
            _wait([parcel.going])
            parts = iter(parcel.factors.split(parcel.lengths))
            for job, triangle, status in zip(parcel.jobs, parts, parts, strict=True):
                self._take(job, triangle.view(job.triangle.shape), status.view(job.groups, _STATUS))

    def _take(self, job: Job, triangle: Tensor, status: Tensor) -> None:
        known, size = job.record.captured, job.record.columns
        of = (known.uses, known.features, known.biases, job.rows)
        if not self._may_wait(status):
            factor = job.damping, InverseFactor(unpacked_triangle(triangle, size), status)
            job.record.statistic = Factor(*of, inverse=factor)
        elif status[0, 0].item() == _IS_CHOLESKY:
            job.record.statistic = Factor(*of, cholesky=unpacked_triangle(triangle, size))
        else:
            job.record.statistic = Moment(*of, unpacked(triangle, size))


def _wait(works: "Iterable[Work]") -> None:
    for work in works:
        work.wait()
