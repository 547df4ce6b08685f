"""Weights of which each rank has some rows (``fully_shard``): a rank corrects its own rows, and gathers no gradient.

``G (XᵀX + λI)⁻¹`` is one row at a time: row o of the corrected gradient needs row o of the gradient, and all ranks'
inputs. On the sample side it needs column o of all ranks' output gradients.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from consequent.capture.records import Record
from consequent.capture.use import Use
from consequent.ranks.sharded_tensors import local, own_rows


def own_part(record: Record) -> Record | None:
    """The record of this rank's rows, with stand-ins for the parameters: what is written to their ``.grad`` is in both.

    None where this rank has no rows.

    Args:
        record: of a sharded weight, with the inputs of all ranks.
    """
    rows = own_rows(record.weight)
    if rows.start == rows.stop:
        return None
    in_groups = record.operation.groups > 1
    stand_ins = {p: _stand_in(p, rows, whole=in_groups) for p in (record.weight, *record.biases)}
    uses = tuple(_use_of_rows(use, rows, stand_ins, whole=in_groups) for use in record.uses)
    biases = tuple(stand_ins[bias] for bias in record.biases)
    others = {stand_ins[p]: other if in_groups else other[rows] for p, other in record.beside.others.items()}
    from_transposed = _rows_of(record.beside.from_transposed, rows, whole=in_groups)
    return replace(
        record,
        weight=stand_ins[record.weight],
        statistic=replace(record.captured, uses=uses, biases=biases),
        beside=replace(record.beside, others=others, from_transposed=from_transposed),
        stands_for=record,
    )


def hand_over(part: Record) -> None:
    """After the part's gradients were rewritten: bring them to the parameters of the whole record.

    They are the same memory, except for those of a convolution in groups, which are copies.

    Args:
        part: a record that :func:`own_part` made.
    """
    whole = part.stands_for
    if whole is None:
        return
    in_groups = whole.operation.groups > 1
    if not in_groups:
        return
    rows = own_rows(whole.weight)
    pairs = [(whole.weight, part.weight), *zip(whole.biases, part.biases, strict=True)]
    for parameter, stand_in in pairs:
        if parameter.grad is not None and stand_in.grad is not None:
            local(parameter.grad).copy_(stand_in.grad[rows])


def _rows_of(gradient: Tensor | None, rows: slice, *, whole: bool) -> Tensor | None:
    return gradient if gradient is None or whole else gradient[rows]


def _stand_in(parameter: Tensor, rows: slice, *, whole: bool) -> Tensor:
    """A parameter with this rank's rows; where they may be parts of several groups, the whole with zeros elsewhere."""
    mine = local(parameter.detach())
    grad = None if parameter.grad is None else local(parameter.grad)
    if whole:
        mine = mine.new_empty(parameter.shape)
        if grad is not None:
            filled = grad.new_zeros(parameter.shape)
            filled[rows] = grad
            grad = filled
    stand_in = nn.Parameter(mine, requires_grad=parameter.requires_grad)
    stand_in.grad = grad
    return stand_in


def _use_of_rows(use: Use, rows: slice, stand_ins: dict[Tensor, Tensor], *, whole: bool) -> Use:
    weight, bias = stand_ins[use.weight], None if use.bias is None else stand_ins[use.bias]
    if use.output_grad is None:  # not needed any more
        return replace(use, weight=weight, bias=bias)
    channels = -1 - use.operation.spatial_dims
    mine = use.output_grad.movedim(channels, 0)[rows]
    if whole:
        zeros = torch.zeros_like(use.output_grad)
        zeros.movedim(channels, 0)[rows] = mine
        mine = zeros.movedim(channels, 0)
    return replace(use, weight=weight, bias=bias, output_grad=mine.movedim(0, channels))
