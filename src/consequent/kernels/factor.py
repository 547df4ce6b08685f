# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The inverse Cholesky factor of a second moment, in one launch that needs one multiprocessor only.

A layer's ``S + λI = L Lᵀ`` is factorised while the backward pass goes on for the layers before it, so what counts is
not to be in the way: one launch, one program per matrix, nothing for the host to wait for. What is kept is ``W = L⁻¹``,
since ``G (S + λI)⁻¹ = (G Wᵀ) W`` are then two ordinary products.

Both matrices grow block by block. With ``j`` the block at hand and ``k < j < i`` those before and after it::

    L[i, j] = (S[i, j] − Σₖ L[i, k] L[j, k]ᵀ) W[j, j]ᵀ
    W[j, k] = −W[j, j] Σₘ L[j, m] W[m, k]               k ≤ m < j

Only the diagonal blocks are eliminated column by column; everything else is products of tiles.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from consequent.kernels.table import device_guard

__all__ = ["LARGEST", "inverse_factor"]

LARGEST = 1024  # features; one multiprocessor takes too long beyond

_BLOCK = 32  # a diagonal block: each of its columns is a step that waits for the one before


def inverse_factor(moment: Tensor, damping: float, *, rows: int | None = None) -> tuple[Tensor, Tensor]:
    """``W = L⁻¹`` of ``moment + level·I = L Lᵀ``, as accurate as float32 allows.

    Never waits for the device, and may be captured in a CUDA graph.

    Args:
        moment: ``[D, D]`` or ``[groups, D, D]``, float32, symmetric positive semi-definite. D is at most
            :data:`LARGEST`.
        damping: λ, absolute. With ``rows`` it is relative: a fraction of the mean diagonal of the rows' Gram matrix.
        rows: how many rows the moment was summed over.

    Returns:
        ``W``, shaped like the moment, lower triangular with zeros above; and the status ``[4]`` (``[groups, 4]``):

        0. the trace of the moment,
        1. the level that was added to its diagonal,
        2. 1 if every pivot was positive and finite; otherwise 0, and ``W`` may hold anything,
        3. the smallest pivot (the square of L's diagonal) as a fraction of the largest damped diagonal entry: if it is
           near float32's rounding, hardly a digit of ``W`` is right.

    Raises:
        ValueError: for a moment that is not square, empty, or too large.
        TypeError: for a moment that is not float32.
    """
    size = _check_moment(moment)
    moment = moment.contiguous()
    count = moment.numel() // size**2
    padded = -(-size // _BLOCK) * _BLOCK
    plan = tiling(size)
    inverse = torch.empty_like(moment)
    status = moment.new_empty((*moment.shape[:-2], 4))
    scratch = moment.new_empty(2 * count * padded**2)  # L and W in rows whose length suits the loads
    with device_guard(moment.device):
        _factorise[(count,)](
            moment,
            inverse,
            status,
            scratch,
            size,
            padded,
            damping if rows is None else damping / max(rows, 1),
            RELATIVE=rows is not None,
            HALF=_BLOCK // 2,
            TILE=plan.tile,
            LARGEST=LARGEST,
            num_warps=plan.warps,
            num_stages=plan.stages,
        )
    return inverse, status


@dataclass(frozen=True)
class Tiling:
    """How the work is cut up."""

    tile: int  # rows or columns of a product at a time
    warps: int
    stages: int


def tiling(size: int) -> Tiling:
    """The tiling for so many features: no more rows at a time than there are."""
    return Tiling(tile=32, warps=4, stages=3) if size <= 2 * _BLOCK else Tiling(tile=128, warps=8, stages=3)


def _check_moment(moment: Tensor) -> int:
    if moment.dtype != torch.float32:
        raise TypeError(f"the moment must be float32, got {moment.dtype}; convert it with .float()")
    if moment.ndim not in (2, 3) or moment.shape[-1] != moment.shape[-2] or moment.numel() == 0:
        raise ValueError(f"the moment must be [D, D] or [groups, D, D] and not empty, got shape {list(moment.shape)}")
    size = moment.shape[-1]
    if size > LARGEST:
        raise ValueError(f"a moment of {size} features is too large for one multiprocessor, the limit is {LARGEST}")
    return size


@triton.jit(do_not_specialize=["size"])
def _factorise(
    moments,
    inverses,
    statuses,
    scratch,
    size,
    padded,
    damping,
    RELATIVE: tl.constexpr,
    HALF: tl.constexpr,
    TILE: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """One program factorises one matrix; ``padded`` is ``size`` rounded up to whole blocks.

    What lies in the padding is the identity: it neither disturbs the rest nor needs to be masked.
    """
    matrix = tl.program_id(0).to(tl.int64)
    moment = moments + matrix * size * size
    inverse = inverses + matrix * size * size
    status = statuses + matrix * 4
    factor = scratch + matrix * 2 * padded * padded
    grown = factor + padded * padded  # W so far
    BLOCK: tl.constexpr = 2 * HALF
    within = tl.arange(0, BLOCK)

    every = tl.arange(0, LARGEST)
    diagonal = tl.load(moment + every * (size + 1), mask=every < size, other=0.0)
    trace = tl.sum(diagonal, 0)
    level = trace * 0.0 + damping
    if RELATIVE:
        level = tl.where(trace > 0, damping * trace, 1.0)
    largest = tl.max(diagonal, 0) + level
    smallest = largest
    failures = 0

    for start in range(0, padded, BLOCK):
        here = start + within
        pivots_1, pivots_2 = _grow_corner(moment, factor, grown, start, size, padded, level, HALF)
        for half in tl.static_range(2):
            pivots = pivots_1 if half == 0 else pivots_2
            good = (pivots > 0) & (pivots < float("inf"))
            failures += tl.sum(tl.where(good, 0, 1), 0)
            real_pivot = good & (start + half * HALF + tl.arange(0, HALF) < size)
            smallest = tl.minimum(smallest, tl.min(tl.where(real_pivot, pivots, largest), 0))
        tl.debug_barrier()  # the corner was written in four parts, which other threads now read as a whole
        corner = tl.load(grown + here[:, None] * padded + here[None, :])
        real = (here < size)[:, None] & (here < size)[None, :]
        tl.store(inverse + here[:, None] * size + here[None, :], corner, mask=real)

        for top in range(start + BLOCK, padded, TILE):
            _grow_factor(moment, factor, corner, top, here, start, size, padded, BLOCK, TILE)
        for left in range(0, padded, TILE):
            _grow_inverse(inverse, factor, grown, corner, left, here, start, size, padded, BLOCK, TILE)
        # The next block reads what was written for this one by other threads, and nothing of this one's own step.
        tl.debug_barrier()

    tl.store(status, trace)
    tl.store(status + 1, level)
    tl.store(status + 2, tl.where(failures == 0, 1.0, 0.0))
    tl.store(status + 3, smallest / largest)


@triton.jit
def _grow_corner(moment, factor, grown, start, size, padded, level, HALF: tl.constexpr):
    """``W[j, j]``, stored in ``grown``; returns its pivots, each half's of its own.

    In halves, since a tile of 16 × 16 fits the registers of every warp: its elimination, of which each column has to
    wait for the one before, then needs no barriers.
    """
    within = tl.arange(0, 2 * HALF)
    first = start + tl.arange(0, HALF)
    second = first + HALF
    block_11 = _damped_block(moment, first, first, size, level)
    block_21 = _damped_block(moment, second, first, size, level)
    block_22 = _damped_block(moment, second, second, size, level)
    explained_11 = tl.zeros((HALF, HALF), tl.float32)
    explained_21 = tl.zeros((HALF, HALF), tl.float32)
    explained_22 = tl.zeros((HALF, HALF), tl.float32)
    for k in range(0, start - 2 * HALF, 2 * HALF):
        rows_1 = tl.load(factor + first[:, None] * padded + (k + within)[None, :])
        rows_2 = tl.load(factor + second[:, None] * padded + (k + within)[None, :])
        explained_11 = tl.dot(rows_1, tl.trans(rows_1), explained_11, input_precision="tf32x3")
        explained_21 = tl.dot(rows_2, tl.trans(rows_1), explained_21, input_precision="tf32x3")
        explained_22 = tl.dot(rows_2, tl.trans(rows_2), explained_22, input_precision="tf32x3")
    # The last of the products stands outside the loop: there Triton gives each warp a whole tile, as is wanted below.
    last = tl.broadcast_to((start - 2 * HALF + within)[None, :], (HALF, 2 * HALF))
    rows_1 = tl.load(factor + first[:, None] * padded + last, mask=last >= 0, other=0.0)
    rows_2 = tl.load(factor + second[:, None] * padded + last, mask=last >= 0, other=0.0)
    block_11 -= tl.dot(rows_1, tl.trans(rows_1), explained_11, input_precision="tf32x3")
    block_21 -= tl.dot(rows_2, tl.trans(rows_1), explained_21, input_precision="tf32x3")
    block_22 -= tl.dot(rows_2, tl.trans(rows_2), explained_22, input_precision="tf32x3")

    corner_11, pivots_1 = _invert_block(block_11, HALF)
    factor_21 = tl.dot(block_21, tl.trans(corner_11), input_precision="tf32x3")
    block_22 -= tl.dot(factor_21, tl.trans(factor_21), input_precision="tf32x3")
    corner_22, pivots_2 = _invert_block(block_22, HALF)
    passed_on = tl.dot(factor_21, corner_11, input_precision="tf32x3")
    corner_21 = -tl.dot(corner_22, passed_on, input_precision="tf32x3")

    tl.store(grown + first[:, None] * padded + first[None, :], corner_11)
    tl.store(grown + first[:, None] * padded + second[None, :], tl.zeros((HALF, HALF), tl.float32))
    tl.store(grown + second[:, None] * padded + first[None, :], corner_21)
    tl.store(grown + second[:, None] * padded + second[None, :], corner_22)
    return pivots_1, pivots_2


@triton.jit
def _damped_block(moment, rows, columns, size, level):
    """A block of ``S + λI``; of the identity beyond the matrix."""
    rows, columns = rows[:, None], columns[None, :]
    inside = (rows < size) & (columns < size)
    block = tl.load(moment + rows * size + columns, mask=inside, other=0.0)
    return block + tl.where(rows == columns, tl.where(rows < size, level, 1.0), 0.0)


@triton.jit
def _invert_block(block, SIZE: tl.constexpr):
    """``W`` of a small block, and its pivots, by eliminating ``[block | I]`` column by column."""
    within = tl.arange(0, SIZE)
    rows, columns = within[:, None], within[None, :]
    inverse = tl.where(rows == columns, 1.0, 0.0)
    pivots = tl.zeros((SIZE,), tl.float32)
    for j in range(SIZE):
        column = tl.sum(tl.where(columns == j, block, 0.0), 1)
        row = tl.sum(tl.where(rows == j, block, 0.0), 0)
        inverse_row = tl.sum(tl.where(rows == j, inverse, 0.0), 0)
        pivot = tl.sum(tl.where(within == j, row, 0.0), 0)
        pivots = tl.where(within == j, pivot, pivots)
        multiples = tl.where(within > j, column / tl.where(pivot > 0, pivot, 1.0), 0.0)
        block -= multiples[:, None] * row[None, :]
        inverse -= multiples[:, None] * inverse_row[None, :]
    scale = 1.0 / tl.sqrt(tl.where(pivots > 0, pivots, 1.0))
    return inverse * scale[:, None], pivots


@triton.jit
def _grow_factor(moment, factor, corner, top, here, start, size, padded, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """``L[i, j] = (S[i, j] − Σₖ L[i, k] L[j, k]ᵀ) W[j, j]ᵀ`` for a tile of rows ``i``."""
    within = tl.arange(0, BLOCK)
    rows = top + tl.arange(0, TILE)
    explained = tl.zeros((TILE, BLOCK), tl.float32)
    for k in range(0, start, BLOCK):
        below = tl.load(
            factor + rows[:, None] * padded + (k + within)[None, :], mask=(rows < padded)[:, None], other=0.0
        )
        beside = tl.load(factor + here[None, :] * padded + (k + within)[:, None])
        explained = tl.dot(below, beside, explained, input_precision="tf32x3")
    inside = (rows < size)[:, None] & (here < size)[None, :]
    remaining = tl.load(moment + rows[:, None] * size + here[None, :], mask=inside, other=0.0) - explained
    grown = tl.dot(remaining, tl.trans(corner), input_precision="tf32x3")
    tl.store(factor + rows[:, None] * padded + here[None, :], grown, mask=(rows < padded)[:, None])


@triton.jit
def _grow_inverse(
    inverse, factor, grown, corner, left, here, start, size, padded, BLOCK: tl.constexpr, TILE: tl.constexpr
):
    """``W[j, k] = −W[j, j] Σₘ L[j, m] W[m, k]`` for a tile of columns ``k``, and the zeros to the right of ``j``."""
    within = tl.arange(0, BLOCK)
    columns = left + tl.arange(0, TILE)
    passed_on = tl.zeros((BLOCK, TILE), tl.float32)
    for m in range(left, start, BLOCK):
        beside = tl.load(factor + here[:, None] * padded + (m + within)[None, :])
        above = tl.load(
            grown + (m + within)[:, None] * padded + columns[None, :], mask=(columns < padded)[None, :], other=0.0
        )
        passed_on = tl.dot(beside, above, passed_on, input_precision="tf32x3")
    row = tl.where((columns < start)[None, :], -tl.dot(corner, passed_on, input_precision="tf32x3"), 0.0)
    beyond_corner = (columns < start) | (columns >= start + BLOCK)
    tl.store(grown + here[:, None] * padded + columns[None, :], row, mask=(beyond_corner & (columns < padded))[None, :])
    real = (here < size)[:, None] & (beyond_corner & (columns < size))[None, :]
    tl.store(inverse + here[:, None] * size + columns[None, :], row, mask=real)
