"""Sums of ``x xᵀ`` over rows: second moments."""

import torch
from torch import Tensor

from consequent.maths.precision import at_least_float32, may_sync

BY_PARTS = 128  # columns, from which on half of a symmetric product is worth leaving out on a CPU


def moment_of_rows(rows: Tensor) -> Tensor:
    """``rowsᵀ rows``, of which on a CPU only what is on and below the diagonal is multiplied out, or little more.

    Args:
        rows: ``[groups, rows, columns]``.

    Returns:
        ``[groups, columns, columns]``, in float32 or better.
    """
    size = rows.shape[-1]
    if rows.is_cuda and rows.dtype.itemsize < 4 and not torch.compiler.is_compiling():
        return _moment_of_halves(rows)
    rows = at_least_float32(rows)
    if size < BY_PARTS or not may_sync(rows):
        return rows.mT @ rows
    product = rows.new_empty(len(rows), size, size)
    width = -(-size // (16 * (4 if size >= 2 * BY_PARTS else 3))) * 16
    for start in range(0, size, width):
        stop = min(start + width, size)
        torch.bmm(rows[:, :, start:].mT, rows[:, :, start:stop], out=product[:, start:, start:stop])
        product[:, start:stop, stop:] = product[:, stop:, start:stop].mT
    return product


def sum_of_rows(rows: Tensor) -> Tensor:
    """The sum of ``[groups, rows, columns]`` over rows, in float32 or better."""
    return rows.sum(1, dtype=torch.promote_types(rows.dtype, torch.float32))


def _moment_of_halves(rows: Tensor) -> Tensor:
    """Of bfloat16 or float16, whose products a GPU sums up in float32: four times as fast as products of float32."""
    try:
        return torch.bmm(rows.mT, rows, out_dtype=torch.float32)
    except TypeError:  # before torch 2.8
        return rows.mT.float() @ rows.float()


def with_ones(moment: Tensor, sums: Tensor, rows: int) -> Tensor:
    """A second moment with a last row and column for a constant 1.

    Args:
        moment: ``[groups, D, D]``.
        sums: of all rows, ``[groups, D]``.
        rows: how many there are.
    """
    corner = moment.new_full((len(sums), 1), rows)
    beside = torch.cat([moment, sums[:, None]], dim=1)
    return torch.cat([beside, torch.cat([sums, corner], dim=1)[:, :, None]], dim=2)
