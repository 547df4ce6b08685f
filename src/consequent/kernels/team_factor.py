# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The inverse Cholesky factor of a second moment, in one launch, each matrix by a team of programs.

``S + λI = L Lᵀ`` is factorised while the backward pass goes on for the layers before it: one launch, few
multiprocessors, nothing for the host to wait for. What is kept is ``W = L⁻¹``, since ``G (S + λI)⁻¹ = (G Wᵀ) W`` are
then two ordinary products.

``[S + λI | I]`` is eliminated block row by block row until it is ``[Lᵀ | W]``. At any time, a row needs the left half up
to the blocks that are eliminated and the right half from there on, so one square matrix, the state ``M``, holds both.
With ``j`` the block at hand, whatever lies before it belongs to ``W`` and whatever lies after it to ``S``. Step ``j``
reads one panel, the block row ``j`` of ``M`` (its part after ``j`` is, by symmetry, the block column ``j``)::

    V[k] = M[j, k]ᵀ W[j, j]ᵀ                with the identity for M[j, j]; then W[j, k] = V[k]ᵀ for k ≤ j
    M[i, k] ← M[i, k] − V[i] V[k]ᵀ          for i > j, k ≤ i; with zero for M[i, j]

Each program owns tiles of ``M`` that no other program touches. What passes between the programs is the panel of the
next step, so there is one barrier per block. Each program inverts the corner ``M[j, j] = L[j, j] L[j, j]ᵀ`` for itself,
which is cheaper than to wait for another one's; the tiles that hold the next panel come first, all others wait until
it has been handed over.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from consequent.kernels.table import device_guard

__all__ = ["LARGEST", "inverse_factor"]

LARGEST = 1024  # features

_BLOCK = 32  # features eliminated per step


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
    return _inverse_factor(moment, damping, rows, plan_team(moment))


@dataclass(frozen=True)
class Team:
    """How the work on a matrix is cut up."""

    tile: int  # rows and columns of a tile
    members: int  # programs per matrix; all of them have to run at the same time
    warps: int


def plan_team(moment: Tensor) -> Team:
    """As many programs per matrix as tiles hold the next panel, if the device can run that many at once."""
    size = moment.shape[-1]
    tile = 32 if size <= _BLOCK else 64
    members = -(-size // tile)
    if moment.device.type != "cuda":  # Triton's interpreter, where programs run one after the other
        members = 1
    else:
        members = min(members, torch.cuda.get_device_properties(moment.device).multi_processor_count)
    return Team(tile, members, warps=4)


def _inverse_factor(moment: Tensor, damping: float, rows: int | None, team: Team) -> tuple[Tensor, Tensor]:
    size = _check_moment(moment)
    moment = moment.contiguous()
    count = moment.numel() // size**2
    padded = -(-size // team.tile) * team.tile
    inverse = torch.empty_like(moment)
    status = moment.new_empty((*moment.shape[:-2], 4))
    scratch = moment.new_empty(2 * count * padded**2)  # each matrix' state and panels
    arrivals = torch.zeros(count, dtype=torch.int32, device=moment.device) if team.members > 1 else status
    with device_guard(moment.device):
        # The members of a team are neighbours: if not all teams fit on the device at once, the first ones still do.
        _factorise[(count * team.members,)](
            moment,
            inverse,
            status,
            scratch,
            arrivals,
            size,
            padded,
            damping if rows is None else damping / max(rows, 1),
            RELATIVE=rows is not None,
            HALF=_BLOCK // 2,
            TILE=team.tile,
            TEAM=team.members,
            LARGEST=LARGEST,
            num_warps=team.warps,
            num_stages=1,
        )
    return inverse, status


def _check_moment(moment: Tensor) -> int:
    if moment.dtype != torch.float32:
        raise TypeError(f"the moment must be float32, got {moment.dtype}; convert it with .float()")
    if moment.ndim not in (2, 3) or moment.shape[-1] != moment.shape[-2] or moment.numel() == 0:
        raise ValueError(f"the moment must be [D, D] or [groups, D, D] and not empty, got shape {list(moment.shape)}")
    size = moment.shape[-1]
    if size > LARGEST:
        raise ValueError(f"a moment of {size} features is too large, the limit is {LARGEST}")
    return size


@triton.jit(do_not_specialize=["size"])
def _factorise(
    moments,
    inverses,
    statuses,
    scratch,
    arrivals,
    size,
    padded,
    damping,
    RELATIVE: tl.constexpr,
    HALF: tl.constexpr,
    TILE: tl.constexpr,
    TEAM: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """A team of programs factorises one matrix; ``padded`` is ``size`` rounded up to whole tiles.

    What lies in the padding is the identity: it neither disturbs the rest nor needs to be masked.
    """
    BLOCK: tl.constexpr = 2 * HALF
    matrix = (tl.program_id(0) // TEAM).to(tl.int64)
    member = tl.program_id(0) % TEAM
    moment = moments + matrix * size * size
    inverse = inverses + matrix * size * size
    status = statuses + matrix * 4
    state = scratch + matrix * 2 * padded * padded
    panels = state + padded * padded  # of every step, each [padded, BLOCK]; none is ever overwritten
    arrived = arrivals + matrix
    tiles = padded // TILE

    every = tl.arange(0, LARGEST)
    diagonal = tl.load(moment + every * (size + 1), mask=every < size, other=0.0)
    trace = tl.sum(diagonal, 0)
    level = trace * 0.0 + damping
    if RELATIVE:
        level = tl.where(trace > 0, damping * trace, 1.0)
    largest = tl.max(diagonal, 0) + level
    smallest = largest
    failures = 0

    for i in range(tiles):
        for k in range(_first_tile(member, i, TEAM), i + 1, TEAM):
            _start_tile(moment, state, panels, i, k, size, padded, level, BLOCK, TILE)
    _arrive(arrived, TEAM)

    for start in range(0, size, BLOCK):
        _wait(arrived, (start // BLOCK + 1) * TEAM, TEAM)
        panel = panels + start * padded
        following = start + BLOCK
        corner, pivots_1, pivots_2 = _invert_corner(panel, start, size, HALF)
        for half in tl.static_range(2):
            pivots = pivots_1 if half == 0 else pivots_2
            good = (pivots > 0) & (pivots < float("inf"))
            failures += tl.sum(tl.where(good, 0, 1), 0)
            real_pivot = good & (start + half * HALF + tl.arange(0, HALF) < size)
            smallest = tl.minimum(smallest, tl.min(tl.where(real_pivot, pivots, largest), 0))

        lead = following // TILE  # the tile row and column that hold the next panel
        for urgent in tl.static_range(1, -1, -1):
            for i in range(lead, tiles):
                for k in range(_first_tile(member, i, TEAM), i + 1, TEAM):
                    if ((i == lead) | (k == lead)) == (urgent == 1):
                        _update_tile(state, panel, corner, start, i, k, padded, urgent, BLOCK, TILE)
            if urgent:
                _arrive(arrived, TEAM)
        for k in range(member, tiles, TEAM):
            _store_row(inverse, panel, corner, start, k, size, BLOCK, TILE)

    if member == 0:
        tl.store(status, trace)
        tl.store(status + 1, level)
        tl.store(status + 2, tl.where(failures == 0, 1.0, 0.0))
        tl.store(status + 3, smallest / largest)


@triton.jit
def _first_tile(member, i, TEAM: tl.constexpr):
    """The first of the tiles ``k`` in tile row ``i`` that belong to the member: those with ``i + k ≡ member``.

    The tiles of a panel, ``[lead, :lead]`` and ``[lead:, lead]``, are then spread evenly over the team.
    """
    return (member + i * (TEAM - 1)) % TEAM


@triton.jit
def _arrive(arrived, TEAM: tl.constexpr):
    """What this program has written so far may be read by whoever waits for it."""
    tl.debug_barrier()
    if TEAM > 1:
        tl.atomic_add(arrived, 1, sem="release", scope="gpu")


@triton.jit
def _wait(arrived, count, TEAM: tl.constexpr):
    """Waits until so many arrivals have been counted."""
    if TEAM > 1:
        seen = tl.atomic_add(arrived, 0, sem="acquire", scope="gpu")
        while seen < count:
            seen = tl.atomic_add(arrived, 0, sem="acquire", scope="gpu")
        tl.debug_barrier()


@triton.jit
def _start_tile(moment, state, panel, i, k, size, padded, level, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """A tile of ``S + λI``, and its part of the first panel."""
    rows = i * TILE + tl.arange(0, TILE)
    columns = k * TILE + tl.arange(0, TILE)
    tile = _damped_block(moment, rows, columns, size, level)
    tl.store(state + rows[:, None] * padded + columns[None, :], tile)
    _store_panel(panel, tile, 0, i, k, BLOCK, TILE)


@triton.jit
def _damped_block(moment, rows, columns, size, level):
    """A block of ``S + λI``; of the identity beyond the matrix."""
    rows, columns = rows[:, None], columns[None, :]
    inside = (rows < size) & (columns < size)
    block = tl.load(moment + rows * size + columns, mask=inside, other=0.0)
    return block + tl.where(rows == columns, tl.where(rows < size, level, 1.0), 0.0)


@triton.jit
def _update_tile(
    state, panel, corner, start, i, k, padded, urgent: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr
):
    """``M[i, k] ← M[i, k] − V[i] V[k]ᵀ`` in the rows that are still to be eliminated; hands the next panel over."""
    rows = i * TILE + tl.arange(0, TILE)
    columns = k * TILE + tl.arange(0, TILE)
    place = state + rows[:, None] * padded + columns[None, :]
    tile = tl.load(place)
    tile = tl.where(((columns >= start) & (columns < start + BLOCK))[None, :], 0.0, tile)
    left = _load_panel(panel, corner, start, rows, BLOCK)
    right = _load_panel(panel, corner, start, columns, BLOCK)
    tile -= tl.dot(left, tl.trans(right), input_precision="tf32x3")
    tl.store(place, tile, mask=(rows >= start + BLOCK)[:, None])
    if urgent:
        _store_panel(panel + BLOCK * padded, tile, start + BLOCK, i, k, BLOCK, TILE)


@triton.jit
def _load_panel(panel, corner, start, features, BLOCK: tl.constexpr):
    """``V[k] = M[j, k]ᵀ W[j, j]ᵀ`` for the features ``k``."""
    within = tl.arange(0, BLOCK)[None, :]
    features = features[:, None]
    rows = tl.load(panel + features * BLOCK + within)
    in_corner = (features >= start) & (features < start + BLOCK)
    rows = tl.where(in_corner, tl.where(features == start + within, 1.0, 0.0), rows)
    return tl.dot(rows, tl.trans(corner), input_precision="tf32x3")


@triton.jit
def _store_panel(panel, tile, start, i, k, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """The part of a tile that belongs to the panel of the block at ``start``."""
    rows = i * TILE + tl.arange(0, TILE)
    columns = k * TILE + tl.arange(0, TILE)
    lead = start // TILE
    in_row = (rows >= start) & (rows < start + BLOCK)
    in_column = (columns >= start) & (columns < start + BLOCK)
    if i == lead:
        tl.store(panel + columns[None, :] * BLOCK + (rows - start)[:, None], tile, mask=in_row[:, None])
    else:
        tl.store(panel + rows[:, None] * BLOCK + (columns - start)[None, :], tile, mask=in_column[None, :])


@triton.jit
def _store_row(inverse, panel, corner, start, k, size, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """``W[j, k]`` for a tile of columns ``k``, and the zeros to the right of the diagonal."""
    within = tl.arange(0, BLOCK)
    columns = k * TILE + tl.arange(0, TILE)
    real = (columns < size)[:, None] & (start + within < size)[None, :]
    place = inverse + (start + within)[None, :] * size + columns[:, None]
    if k * TILE < start:
        row = _load_panel(panel, corner, start, columns, BLOCK)
        tl.store(place, tl.where((columns < start)[:, None], row, 0.0), mask=real & ~in_corner(columns, start, BLOCK))
    else:
        zeros = tl.zeros((TILE, BLOCK), tl.float32)
        tl.store(place, zeros, mask=real & ~in_corner(columns, start, BLOCK))
    if k == start // TILE:
        here = start + within
        inside = (here < size)[:, None] & (here < size)[None, :]
        tl.store(inverse + here[:, None] * size + here[None, :], corner, mask=inside)


@triton.jit
def in_corner(columns, start, BLOCK: tl.constexpr):
    return ((columns >= start) & (columns < start + BLOCK))[:, None]


@triton.jit
def _invert_corner(panel, start, size, HALF: tl.constexpr):
    """``W[j, j]``, and its pivots, each half's of its own.

    In halves, since a tile of 16 × 16 fits the registers of every warp: its elimination, of which each column has to
    wait for the one before, then needs no barriers.
    """
    first = tl.arange(0, HALF)
    second = first + HALF
    place = panel + start * 2 * HALF
    # Adds nothing; but as a sum of products, Triton gives each warp the whole tile.
    nothing = tl.load(place + first[:, None] * 2 * HALF + first[None, :], mask=first[:, None] + size < 0, other=0.0)
    block_11 = tl.load(place + first[:, None] * 2 * HALF + first[None, :])
    block_21 = tl.load(place + first[None, :] * 2 * HALF + second[:, None])
    block_22 = tl.load(place + second[:, None] * 2 * HALF + second[None, :])
    block_11 = tl.dot(nothing, tl.trans(nothing), block_11, input_precision="tf32x3")
    corner_11, pivots_1 = _invert_block(block_11, HALF)
    factor_21 = tl.dot(block_21, tl.trans(corner_11), input_precision="tf32x3")
    block_22 -= tl.dot(factor_21, tl.trans(factor_21), input_precision="tf32x3")
    corner_22, pivots_2 = _invert_block(block_22, HALF)
    passed_on = tl.dot(factor_21, corner_11, input_precision="tf32x3")
    corner_21 = -tl.dot(corner_22, passed_on, input_precision="tf32x3")
    left = _stack(corner_11, corner_21, HALF)
    right = _stack(tl.zeros((HALF, HALF), tl.float32), corner_22, HALF)
    corner = tl.join(left, right).permute(0, 2, 1).reshape(2 * HALF, 2 * HALF)
    return corner, pivots_1, pivots_2


@triton.jit
def _stack(upper, lower, HALF: tl.constexpr):
    """One tile above the other."""
    return tl.join(upper, lower).permute(2, 0, 1).reshape(2 * HALF, HALF)


@triton.jit
def _invert_block(block, SIZE: tl.constexpr):
    """``W`` of a small block, and its pivots, by eliminating ``[block | I]``, both in one tile as in the state.

    Two columns at a time, since what takes time is to tell every thread of a warp about a row: for two rows it takes
    hardly longer than for one.
    """
    within = tl.arange(0, SIZE)
    rows, columns = within[:, None], within[None, :]
    pivots = tl.zeros((SIZE,), tl.float32)
    for j in range(0, SIZE, 2):
        column_1 = tl.sum(tl.where(columns == j, block, 0.0), 1)
        column_2 = tl.sum(tl.where(columns == j + 1, block, 0.0), 1)
        row_1 = tl.sum(tl.where(rows == j, block, 0.0), 0)
        row_2 = tl.sum(tl.where(rows == j + 1, block, 0.0), 0)
        pivot_1 = tl.sum(tl.where(within == j, row_1, 0.0), 0)
        beside = tl.sum(tl.where(within == j + 1, row_1, 0.0), 0)
        pivot_2 = tl.sum(tl.where(within == j + 1, row_2, 0.0), 0)

        reciprocal_1 = 1.0 / tl.where(pivot_1 > 0, pivot_1, 1.0)
        multiple = beside * reciprocal_1
        pivot_2 -= multiple * beside
        reciprocal_2 = 1.0 / tl.where(pivot_2 > 0, pivot_2, 1.0)
        row_1 = tl.where(within == j, 1.0, row_1)
        row_2 = tl.where(within == j, 0.0, row_2) - multiple * row_1
        column_2 -= multiple * column_1
        multiples_1 = column_1 * reciprocal_1
        multiples_2 = column_2 * reciprocal_2

        remaining = tl.where((columns == j) | (columns == j + 1), 0.0, block)
        remaining -= multiples_1[:, None] * tl.where(within == j + 1, 0.0, row_1)[None, :]
        remaining -= multiples_2[:, None] * tl.where(within == j + 1, 1.0, row_2)[None, :]
        block = tl.where(rows > j + 1, remaining, tl.where(rows == j + 1, row_2[None, :], block))
        pivots = tl.where(within == j, pivot_1, tl.where(within == j + 1, pivot_2, pivots))
    scale = 1.0 / tl.sqrt(tl.where(pivots > 0, pivots, 1.0))
    inverse = tl.where(rows > columns, block, tl.where(rows == columns, 1.0, 0.0))
    return inverse * scale[:, None], pivots
