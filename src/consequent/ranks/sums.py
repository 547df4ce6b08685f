"""Sums over all ranks: of second moments, and of parts of gradients that do not come from the rows."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from consequent.capture.records import Record
from consequent.maths.packed_triangle import packed, unpacked
from consequent.ranks.plans import Plan
from consequent.ranks.process_group import Ranks
from consequent.ranks.traffic import in_buckets
from consequent.statistics.moment import Moment


class _Part(NamedTuple):
    """A tensor that is added up, and who takes the sum."""

    tensor: Tensor
    take: Callable[[Tensor], None]


def prepare_moment(plan: Plan) -> None:
    """Reduce this rank's rows, for the sum of all ranks'."""
    record = plan.record
    if record.rows:
        record.reduce(keep_rows=False)
        return
    first, known = record.first_use, record.captured
    dtype, size = torch.promote_types(first.dtype, torch.float32), (record.columns, record.columns)
    matrix = torch.zeros(first.operation.groups, *size, dtype=dtype, device=record.weight.device)
    record.statistic = Moment(known.uses, known.features, known.biases, 0, matrix)


def start_sums(plans: list[Plan], ranks: Ranks) -> list[Callable[[], None]]:
    """Start to add up moments (their triangles), and parts of gradients that do not come from the rows."""
    parts: list[_Part] = []
    for plan in plans:
        record = plan.record
        if plan.choice == "moment" and plan.owner is None:
            assert isinstance(record.statistic, Moment)
            parts.append(_Part(packed(record.statistic.matrix), _moment_taker(record)))
        if plan.has_others:
            parts += _parts_of_others(record, ranks.size)
    buckets = in_buckets(parts, lambda part: part.tensor.nbytes, lambda part: (part.tensor.dtype, part.tensor.device))
    return [_start_sum(bucket, ranks) for bucket in buckets]


def _parts_of_others(record: Record, size: int) -> list[_Part]:
    """What came to the gradients otherwise, averaged over ranks as the gradients were, and as it is scaled now."""
    beside = record.beside
    scaled = beside.scaled_by(record.grads) if beside else None
    ratio = 1.0 if scaled is None else scaled[0]

    def taker(parameter: Tensor) -> Callable[[Tensor], None]:
        def take(summed: Tensor) -> None:
            beside.others[parameter] = summed / size
            beside.note(record.grads)

        return take

    def take_transposed(summed: Tensor) -> None:
        beside.transposed = summed[0]

    def take_from_transposed(summed: Tensor) -> None:
        beside.from_transposed = summed / size

    parts = []
    for parameter in record.members:
        other = beside.others.get(parameter)
        parts.append(_Part(_numbers_of(parameter, other, ratio), taker(parameter)))
    parts.append(_Part(_numbers_of(record.weight, beside.from_transposed, ratio), take_from_transposed))
    transposed = torch.zeros((), device=record.weight.device) if beside.transposed is None else beside.transposed
    return [*parts, _Part(transposed.float().view(1), take_transposed)]


def _start_sum(bucket: list[_Part], ranks: Ranks) -> Callable[[], None]:
    flat = torch.cat([part.tensor.reshape(-1) for part in bucket])
    work = ranks.start_sum(flat)

    def finish() -> None:
        work.wait()
        for part, summed in zip(bucket, flat.split([part.tensor.numel() for part in bucket]), strict=True):
            part.take(summed.view(part.tensor.shape))

    return finish


def _numbers_of(parameter: Tensor, part: Tensor | None, ratio: Tensor | float) -> Tensor:
    """A part of a parameter's gradient, in float32 or better, as it is scaled now; zeros where there is none."""
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    if part is None:
        return torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
    return part.to(dtype) * ratio


def _moment_taker(record: Record) -> Callable[[Tensor], None]:
    size = record.columns

    def take(summed: Tensor) -> None:
        known = record.captured
        record.statistic = Moment(known.uses, known.features, known.biases, known.rows, unpacked(summed, size))

    return take
