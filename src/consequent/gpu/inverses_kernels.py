# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The launches of :mod:`consequent.gpu.inverses`: rows and columns of tiles are eliminated, one after the other."""

import triton
import triton.language as tl

from consequent.gpu.elimination import inverse, least

_SIZES = ["size", "tiles", "step"]


@triton.jit
def _tile(tiles):
    """Which matrix, which row and which column of tiles this program has."""
    program = tl.program_id(0)
    return (program // (tiles * tiles)).to(tl.int64), program // tiles % tiles, program % tiles


@triton.jit
def _place(matrix, x, y, tiles, TILE: tl.constexpr):
    """Where a tile of the padded matrix begins, with the offsets in it."""
    within = tl.arange(0, TILE)
    width = tiles * TILE
    return (matrix * width + x * TILE) * width + y * TILE + within[:, None] * width + within[None, :]


@triton.jit
def _scale(matrices, level, matrix, rows, size):
    """What gives the matrix a diagonal of ones."""
    diagonal = tl.load(matrices + (matrix * size + rows) * size + rows, mask=rows < size, other=1.0)
    return tl.rsqrt(tl.where(rows < size, diagonal + level, 1.0))


@triton.jit(do_not_specialize=_SIZES)
def start(matrices, damping, out, size, tiles, step, TILE: tl.constexpr):
    """``matrix + λI``, with ones on the diagonal; beyond it the identity."""
    matrix, x, y = _tile(tiles)
    level = tl.load(damping + matrix)
    rows, columns = x * TILE + tl.arange(0, TILE), y * TILE + tl.arange(0, TILE)
    inside = (rows < size)[:, None] & (columns < size)[None, :]
    place = (matrix * size + rows[:, None]) * size + columns[None, :]
    tile = tl.load(matrices + place, mask=inside, other=0.0)
    tile += tl.where(rows[:, None] == columns[None, :], tl.where(inside, level, 1.0), 0.0)
    tile *= (
        _scale(matrices, level, matrix, rows, size)[:, None] * _scale(matrices, level, matrix, columns, size)[None, :]
    )
    tl.store(out + _place(matrix, x, y, tiles, TILE), tile)


@triton.jit(do_not_specialize=_SIZES)
def invert_pivot(source, inverses, pivots, size, tiles, step, TILE: tl.constexpr):
    """The inverse of a tile on the diagonal."""
    matrix, within = tl.program_id(0).to(tl.int64), tl.arange(0, TILE)
    tile, smallest = inverse(tl.load(source + _place(matrix, step, step, tiles, TILE)), TILE)
    tl.store(inverses + (matrix * TILE + within[:, None]) * TILE + within[None, :], tile)
    tl.store(pivots + matrix * tiles + step, smallest)


@triton.jit(do_not_specialize=_SIZES)
def eliminate(source, target, inverses, size, tiles, step, TILE: tl.constexpr):
    """One row and one column of tiles (:mod:`consequent.gpu.elimination`)."""
    matrix, x, y = _tile(tiles)
    within = tl.arange(0, TILE)
    pivot = tl.load(inverses + (matrix * TILE + within[:, None]) * TILE + within[None, :])
    eye = tl.where(within[:, None] == within[None, :], 1.0, 0.0)
    columns = tl.load(source + _place(matrix, x, step, tiles, TILE)) - tl.where(x == step, eye, 0.0)
    rows = tl.load(source + _place(matrix, step, y, tiles, TILE)) + tl.where(y == step, eye, 0.0)
    tile = tl.load(source + _place(matrix, x, y, tiles, TILE))
    columns = tl.dot(columns, pivot, input_precision="tf32x3")
    tl.store(target + _place(matrix, x, y, tiles, TILE), tile - tl.dot(columns, rows, input_precision="tf32x3"))


@triton.jit(do_not_specialize=_SIZES)
def finish(source, matrices, damping, pivots, out, failed, size, tiles, step, LEAST: tl.constexpr, TILE: tl.constexpr):
    """The inverse without the padding; of a matrix that failed, that of its trace."""
    matrix, x, y = _tile(tiles)
    level = tl.load(damping + matrix)
    rows, columns = x * TILE + tl.arange(0, TILE), y * TILE + tl.arange(0, TILE)
    tile = tl.load(source + _place(matrix, x, y, tiles, TILE))
    tile *= (
        _scale(matrices, level, matrix, rows, size)[:, None] * _scale(matrices, level, matrix, columns, size)[None, :]
    )
    smallest = 1.0
    for one in range(tiles):
        smallest = least(smallest, tl.load(pivots + matrix * tiles + one))
    if not (smallest >= LEAST):
        trace = level * 0.0
        for first in range(0, size, TILE):
            place = first + tl.arange(0, TILE)
            trace += tl.sum(tl.load(matrices + (matrix * size + place) * size + place, mask=place < size, other=0.0), 0)
        tile = tl.where(rows[:, None] == columns[None, :], 1.0 / (trace + level), 0.0)
        if (x == 0) & (y == 0):
            tl.store(failed + matrix, tl.where(tl.abs(trace) < float("inf"), 1.0, 0.0))
    inside = (rows < size)[:, None] & (columns < size)[None, :]
    tl.store(out + (matrix * size + rows[:, None]) * size + columns[None, :], tile, mask=inside)
