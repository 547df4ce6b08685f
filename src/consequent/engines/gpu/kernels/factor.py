# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The inverse Cholesky factor of a second moment, in one launch, each matrix by a team of programs.

``S + λI = L Lᵀ`` is factorised while the backward pass goes on for the layers before it: one launch, few
multiprocessors, nothing for the host to wait for. What is kept is ``W = L⁻¹``, since ``G (S + λI)⁻¹ = (G Wᵀ) W`` are
then two ordinary products.

``[S + λI | I]`` is eliminated until it is ``[Lᵀ | W]``, a block of rows per step. Step ``j`` reads one block of columns
of a square of tiles, the state ``Q``: above the diagonal it holds what has become of the identity (transposed), below
it what is left of ``S + λI``. With ``W[j, j]`` the inverse Cholesky factor of what is left of the diagonal tile ``j``::

    V[x] = Q[x, j] W[j, j]ᵀ                 with the identity for Q[j, j]; then W[j, x] = V[x]ᵀ for x ≤ j
    Q[x, y] ← Q[x, y] − V[x] V[y]ᵀ          for y > j, and x ≤ j or x ≥ y; with zero for Q[j, y]

The elimination of the diagonal tiles is what everything has to wait for. One program of a team, the leader, does
nothing else: it brings the next diagonal tile up to date and eliminates it, while the others, the workers, each update
rows of tiles. The tiles that the next step reads come first.

A pivot is what is left of a feature's diagonal entry once the features before it are accounted for. Where that is
nothing but rounding errors, the feature is a linear combination of those before it as far as float32 can tell, and its
pivot is replaced by the whole diagonal entry: more damping, for this feature alone. The result is the factor of
``S + λI + E`` with a diagonal ``E ≥ 0``, and a shorter step: dynamic regularisation, as interior-point solvers have it.
What the feature would have contributed, those that determine it contribute.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from consequent.engines.gpu.kernels.launch import launch
from consequent.engines.gpu.kernels.sharing import is_shared
from consequent.engines.gpu.kernels.table import device_guard
from consequent.maths.rounding import LOST_PIVOT, PIVOT_FLOOR

__all__ = ["LARGEST", "inverse_factor"]

LARGEST = 1024  # features

_TILE = 32  # features eliminated per step

# Raised to less than all of the entry, pivots would let errors, which are divided by them, multiply from one dependent
# feature to the next.
FLOOR, LOST = PIVOT_FLOOR, LOST_PIVOT


def inverse_factor(moment: Tensor, damping: float, *, of_trace: bool = False) -> tuple[Tensor, Tensor]:
    """``W = L⁻¹`` of ``moment + level·I = L Lᵀ``, as accurate as float32 allows.

    Never waits for the device, and may be captured in a CUDA graph.

    Args:
        moment: ``[D, D]`` or ``[groups, D, D]``, float32, symmetric positive semi-definite. D is at most
            :data:`LARGEST`.
        damping: λ, or a fraction of the moment's trace.
        of_trace: whether it is the latter; then a moment of zeros gets 1.

    Returns:
        ``W``, shaped like the moment, lower triangular with zeros above; and the status ``[4]`` (``[groups, 4]``):

        0. the trace of the moment,
        1. the level that was added to its diagonal,
        2. 1 if every pivot (the square of L's diagonal) is positive and finite; otherwise 0, and ``W`` may hold
           anything,
        3. how many pivots were rounding errors and were raised.

    Raises:
        ValueError: for a moment that is not square, empty, or too large.
        TypeError: for a moment that is not float32.
    """
    _check_moment(moment)
    return factor_by(plan_team(moment), moment, damping, of_trace=of_trace)


@dataclass(frozen=True)
class Team:
    """How the work on a matrix is cut up."""

    members: int  # programs per matrix, all of which have to run at the same time; one does without waiting
    chunk: int = 128  # columns updated at a time
    warps: int = 4


def plan_team(moment: Tensor) -> Team:
    """A leader, and workers enough not to keep it waiting, if the device can run that many at once.

    One program alone in Triton's interpreter, which runs one after the other; and on a GPU that other processes share,
    where nothing keeps a team together: five of them that trained under MPS hung, and did not with one program each.
    """
    tiles = -(-moment.shape[-1] // _TILE)
    if moment.device.type != "cuda" or is_shared(moment.get_device()):
        return Team(1)
    workers = -(-tiles // 2)  # with as many as tiles it is a fifth faster, and more in the way of everything else
    return Team(min(1 + workers, torch.cuda.get_device_properties(moment.device).multi_processor_count))


def factor_by(
    team: Team,
    moment: Tensor,
    damping: float,
    *,
    of_trace: bool = False,
    diagonal: Tensor | None = None,
    floor: float = FLOOR,
) -> tuple[Tensor, Tensor]:
    """:func:`inverse_factor` by teams of a size of one's own choice.

    Args:
        team: how the work is cut up.
        moment: as there.
        damping: as there.
        of_trace: as there.
        diagonal: ``[D]`` or ``[groups, D]``, float32: that of the whole damped matrix, where the moment is what is left
            of a part of it; pivots are judged by it. By default the moment's own, damped.
        floor: fraction of the diagonal below which pivots are raised.
    """
    size = moment.shape[-1]
    moment = moment.contiguous()
    count = moment.numel() // size**2
    if diagonal is None:
        diagonal, steps = moment, (size * size, size + 1)
    else:
        steps = (diagonal.stride(0) if diagonal.ndim > 1 else 0, diagonal.stride(-1))
    tiles = -(-size // _TILE)
    inverse = torch.empty_like(moment)
    status = moment.new_empty((*moment.shape[:-2], 4))
    scratch = moment.new_empty(count * (2 * tiles**2 + tiles) * _TILE**2)
    arrivals = torch.zeros(2 * count, dtype=torch.int32, device=moment.device) if team.members > 1 else status
    with device_guard(moment.device):
        # Members wait for each other, so a team has to run at the same time. Programs start in their order and members
        # are neighbours: if not all teams fit on the device at once, the first ones do, and make place for the others.
        launch(
            _factorise,
            (count * team.members,),
            (
                *(moment, diagonal, inverse, status, scratch, arrivals, *steps, size, tiles, team.members),
                *(damping, int(of_trace)),
            ),
            (_TILE, team.chunk, team.members == 1, LARGEST, floor, LOST),
            num_warps=team.warps,
            num_stages=1,
        )
    return inverse, status


def _check_moment(moment: Tensor) -> None:
    if moment.dtype != torch.float32:
        raise TypeError(f"the moment must be float32, got {moment.dtype}; convert it with .float()")
    if moment.ndim not in (2, 3) or moment.shape[-1] != moment.shape[-2] or moment.numel() == 0:
        raise ValueError(f"the moment must be [D, D] or [groups, D, D] and not empty, got shape {list(moment.shape)}")
    if moment.shape[-1] > LARGEST:
        raise ValueError(f"a moment of {moment.shape[-1]} features is too large, the limit is {LARGEST}")


@triton.jit(do_not_specialize=["diagonals", "diagonal_step", "feature_step", "size", "tiles", "team", "is_relative"])
def _factorise(
    moments,
    diagonals,
    inverses,
    statuses,
    scratch,
    arrivals,
    diagonal_step,
    feature_step,
    size,
    tiles,
    team,
    damping,
    is_relative,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    ALONE: tl.constexpr,
    LARGEST: tl.constexpr,
    FLOOR: tl.constexpr,
    LOST: tl.constexpr,
):
    """A team of programs factorises one matrix of ``tiles × tiles`` tiles.

    What lies in them beyond the matrix is the identity: it neither disturbs the rest nor needs to be masked.
    """
    matrix = (tl.program_id(0) // team).to(tl.int64)
    member = tl.program_id(0) % team
    leads = member == 0
    worker = member if ALONE else member - 1
    works = worker >= 0
    workers = 1 if ALONE else team - 1
    moment = moments + matrix * size * size
    entries = diagonals + matrix * diagonal_step
    inverse = inverses + matrix * size * size
    status = statuses + matrix * 4
    width = tiles * TILE
    state = scratch + matrix * (2 * width + TILE) * width  # Q, row after row
    products = state + width * width  # V, one step's [width, TILE] after the other
    corners = products + width * width  # the diagonal tiles of W
    eliminated = arrivals + 2 * matrix  # how many steps the leader has done
    updated = eliminated + 1  # how many steps the workers have done, all together

    every = tl.arange(0, LARGEST)
    diagonal = tl.load(moment + every * (size + 1), mask=every < size, other=0.0)
    trace = tl.sum(diagonal, 0)
    level = trace * 0.0 + damping
    if is_relative != 0:
        level = tl.where(trace > 0, damping * trace, 1.0)
    failures = 0
    raised = 0

    if works:
        for x in range(worker, tiles, workers):
            _start_row(moment, state, x, size, width, level, TILE, CHUNK)
        _arrive(updated, ALONE)

    for j in range(tiles):
        if leads:
            _wait(updated, tl.maximum(j, 1) * workers, ALONE)
            first = tl.arange(0, TILE // 2) + j * TILE
            second = first + TILE // 2
            wholes_1 = tl.load(entries + first * feature_step, mask=first < size, other=-level) + level
            wholes_2 = tl.load(entries + second * feature_step, mask=second < size, other=-level) + level
            pivots_1, pivots_2, raised_here = _eliminate(
                state, corners, j, width, wholes_1, wholes_2, TILE, FLOOR, LOST
            )
            _arrive(eliminated, ALONE)
            failures += _failures(pivots_1) + _failures(pivots_2)
            raised += raised_here
        if works:
            _wait(eliminated, j + 1, ALONE)
            for x in range(worker, tiles, workers):
                _update_first(inverse, state, products, corners, x, j, size, width, TILE)
            if j + 1 < tiles:
                _arrive(updated, ALONE)
                _wait(updated, (j + 2) * workers, ALONE)
                for x in range(worker, tiles, workers):
                    _update_rest(state, products, x, j, width, TILE, CHUNK)

    if leads:
        tl.store(status, trace)
        tl.store(status + 1, level)
        tl.store(status + 2, tl.where(failures == 0, 1.0, 0.0))
        tl.store(status + 3, raised)


@triton.jit
def _arrive(counter, ALONE: tl.constexpr):
    """What this program has written so far may be read by whoever waits for it."""
    tl.debug_barrier()
    if not ALONE:
        tl.atomic_add(counter, 1, sem="release", scope="gpu")


@triton.jit
def _wait(counter, count, ALONE: tl.constexpr):
    """Waits until so many arrivals have been counted."""
    if not ALONE:
        seen = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
        while seen < count:
            seen = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
    tl.debug_barrier()


@triton.jit
def _offsets(ROWS: tl.constexpr, COLUMNS: tl.constexpr, stride):
    return tl.arange(0, ROWS)[:, None] * stride + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def _start_row(moment, state, x, size, width, level, TILE: tl.constexpr, CHUNK: tl.constexpr):
    """A row of tiles of ``S + λI`` up to its diagonal; of the identity beyond the matrix."""
    rows = (x * TILE + tl.arange(0, TILE))[:, None]
    for left in range(0, (x + 1) * TILE, CHUNK):
        columns = (left + tl.arange(0, CHUNK))[None, :]
        inside = (rows < size) & (columns < size)
        tile = tl.load(moment + rows * size + columns, mask=inside, other=0.0)
        tile += tl.where(rows == columns, tl.where(rows < size, level, 1.0), 0.0)
        tl.store(state + rows * width + columns, tile, mask=columns < (x + 1) * TILE)


@triton.jit
def _update_first(inverse, state, products, corners, x, j, size, width, TILE: tl.constexpr):
    """A row's ``V`` and its tiles that are needed first: the next step's, and the diagonal tile after the next."""
    square = _offsets(TILE, TILE, TILE)
    tile_square = _offsets(TILE, TILE, width)
    following = j + 1
    more = square * 0 + following * TILE < width
    corner = tl.load(corners + j * TILE * TILE + square)
    rows = tl.load(state + x * TILE * width + j * TILE + tile_square, mask=square * 0 + x != j, other=0.0)
    following_rows = tl.load(state + following * TILE * width + j * TILE + tile_square, mask=more, other=0.0)
    place = state + x * TILE * width + following * TILE + tile_square
    tile = tl.load(place, mask=more & (x != j), other=0.0)

    product = tl.dot(rows, tl.trans(corner), input_precision="tf32x3")
    product = tl.where(x == j, tl.trans(corner), product)
    tl.store(products + (j * width + x * TILE) * TILE + square, product)
    if (x != following) & (following * TILE < width):
        following_product = tl.dot(following_rows, tl.trans(corner), input_precision="tf32x3")
        tile -= tl.dot(product, tl.trans(following_product), input_precision="tf32x3")
        tl.store(place, tile)
    if x == j + 2:
        place = state + x * TILE * (width + 1) + tile_square
        tl.store(place, tl.load(place) - tl.dot(product, tl.trans(product), input_precision="tf32x3"))

    features = x * TILE + tl.arange(0, TILE)
    here = j * TILE + tl.arange(0, TILE)
    real = (features < size)[:, None] & (here < size)[None, :]
    tl.store(inverse + here[None, :] * size + features[:, None], tl.where(x <= j, product, 0.0), mask=real)


@triton.jit
def _update_rest(state, products, x, j, width, TILE: tl.constexpr, CHUNK: tl.constexpr):
    """The other tiles of a row: ``Q[x, y] ← Q[x, y] − V[x] V[y]ᵀ``."""
    product = tl.load(products + (j * width + x * TILE) * TILE + _offsets(TILE, TILE, TILE))
    first = j + 2 + tl.where(x == j + 2, 1, 0)
    end = tl.where(x <= j, width, (x + 1) * TILE)
    for left in range(first * TILE, end, CHUNK):
        inside = left + tl.arange(0, CHUNK) < end
        place = state + x * TILE * width + left + _offsets(TILE, CHUNK, width)
        others = products + (j * width + left) * TILE + _offsets(CHUNK, TILE, TILE)
        other = tl.load(others, mask=inside[:, None], other=0.0)
        tile = tl.load(place, mask=inside[None, :] & (x != j), other=0.0)
        tile -= tl.dot(product, tl.trans(other), input_precision="tf32x3")
        tl.store(place, tile, mask=inside[None, :])


@triton.jit
def _eliminate(
    state,
    corners,
    j,
    width,
    wholes_1,
    wholes_2,
    TILE: tl.constexpr,
    FLOOR: tl.constexpr,
    LOST: tl.constexpr,
):
    """``W[j, j]``; returns its pivots, each half's of its own, and how many were raised.

    In halves, since a tile of 16 × 16 fits the registers of every warp: its elimination, of which each column has to
    wait for the one before, then needs no barriers. Triton gives each warp the whole tile because it is a product of
    products.
    """
    HALF: tl.constexpr = TILE // 2
    corner = corners + j * TILE * TILE
    diagonal = state + j * TILE * (width + 1)
    before = tl.arange(0, TILE)[None, :] * 0 + j > 0
    corner_before = tl.load(corner - TILE * TILE + _offsets(TILE, TILE, TILE), mask=before, other=0.0)
    beside = diagonal - TILE + _offsets(HALF, TILE, width)
    rows_1 = tl.load(beside, mask=before, other=0.0)
    rows_2 = tl.load(beside + HALF * width, mask=before, other=0.0)
    square = _offsets(HALF, HALF, width)
    block_11 = tl.load(diagonal + square)
    block_21 = tl.load(diagonal + HALF * width + square)
    block_22 = tl.load(diagonal + HALF * width + HALF + square)

    product_1 = tl.dot(rows_1, tl.trans(corner_before), input_precision="tf32x3")
    block_11 -= tl.dot(product_1, tl.trans(product_1), input_precision="tf32x3")
    product_2 = tl.dot(rows_2, tl.trans(corner_before), input_precision="tf32x3")
    block_21 -= tl.dot(product_2, tl.trans(product_1), input_precision="tf32x3")
    block_22 -= tl.dot(product_2, tl.trans(product_2), input_precision="tf32x3")

    inverse_11, pivots_1, raised_1 = _invert_16(block_11, wholes_1, FLOOR, LOST)
    factor_21 = tl.dot(block_21, tl.trans(inverse_11), input_precision="tf32x3")
    block_22 -= tl.dot(factor_21, tl.trans(factor_21), input_precision="tf32x3")
    inverse_22, pivots_2, raised_2 = _invert_16(block_22, wholes_2, FLOOR, LOST)
    passed_on = tl.dot(factor_21, inverse_11, input_precision="tf32x3")
    inverse_21 = -tl.dot(inverse_22, passed_on, input_precision="tf32x3")
    square = _offsets(HALF, HALF, TILE)
    tl.store(corner + square, inverse_11)
    tl.store(corner + HALF + square, tl.zeros((HALF, HALF), tl.float32))
    tl.store(corner + HALF * TILE + square, inverse_21)
    tl.store(corner + HALF * TILE + HALF + square, inverse_22)
    return pivots_1, pivots_2, raised_1 + raised_2


@triton.jit
def _failures(pivots):
    """How many are not positive and finite."""
    return tl.sum(tl.where((pivots > 0) & (pivots < float("inf")), 0, 1), 0)


@triton.jit
def _invert_16(block, wholes, FLOOR: tl.constexpr, LOST: tl.constexpr):
    """``W`` of a small block, its pivots, and how many of them were raised.

    By eliminating ``[block | I]``, both in one tile as in the state. ``wholes`` are the diagonal entries that the
    block's are what is left of; zeros beyond the matrix, so that nothing is raised there.

    Two columns at a time, since what takes time is to tell every thread of a warp about a row: for two rows it takes
    hardly longer than for one.
    """
    within = tl.arange(0, 16)
    rows, columns = within[:, None], within[None, :]
    pivots = tl.zeros((16,), tl.float32)
    raised = 0
    for j in range(0, 16, 2):
        column_1 = tl.sum(tl.where(columns == j, block, 0.0), 1)
        column_2 = tl.sum(tl.where(columns == j + 1, block, 0.0), 1)
        row_1 = tl.sum(tl.where(rows == j, block, 0.0), 0)
        row_2 = tl.sum(tl.where(rows == j + 1, block, 0.0), 0)
        pivot_1 = tl.sum(tl.where(within == j, row_1, 0.0), 0)
        beside = tl.sum(tl.where(within == j + 1, row_1, 0.0), 0)
        pivot_2 = tl.sum(tl.where(within == j + 1, row_2, 0.0), 0)
        whole_1 = tl.sum(tl.where(within == j, wholes, 0.0), 0)
        whole_2 = tl.sum(tl.where(within == j + 1, wholes, 0.0), 0)

        is_rounding_1 = (pivot_1 < FLOOR * whole_1) & (pivot_1 > -LOST * whole_1)
        pivot_1 = tl.where(is_rounding_1, whole_1, pivot_1)
        reciprocal_1 = 1.0 / tl.where(pivot_1 > 0, pivot_1, 1.0)
        multiple = beside * reciprocal_1
        pivot_2 -= multiple * beside
        is_rounding_2 = (pivot_2 < FLOOR * whole_2) & (pivot_2 > -LOST * whole_2)
        pivot_2 = tl.where(is_rounding_2, whole_2, pivot_2)
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
        raised += is_rounding_1.to(tl.int32) + is_rounding_2.to(tl.int32)
    scale = 1.0 / tl.sqrt(tl.where(pivots > 0, pivots, 1.0))
    inverse = tl.where(rows > columns, block, tl.where(rows == columns, 1.0, 0.0))
    return inverse * scale[:, None], pivots, raised
