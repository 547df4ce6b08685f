# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Products of a matrix with itself, for the inputs of several dense layers in one launch and a table.

``XᵀX``, the second moment of the rows, and ``X Xᵀ``, their Gram matrix, differ in which index is summed over. Half of
the tiles is computed, and written twice. Where there are few tiles the sum is split, and the parts are added in a fixed
order: the results are bitwise reproducible.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from consequent.engines.gpu.kernels.launch import launch
from consequent.engines.gpu.kernels.moment import (
    Precision,
    accumulate,
    check_inputs,
    multiprocessors,
    suited,
    triangle_place,
)
from consequent.engines.gpu.kernels.table import device_guard, device_table

__all__ = ["gram_matrices", "row_moments"]

_FIELDS = tl.constexpr(2)  # entries of the table per matrix
_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def row_moments(matrices: Sequence[Tensor], *, ones: bool, precision: Precision = "tf32") -> Tensor:
    """``Σ x xᵀ`` over the rows of each matrix.

    Never waits for the device, and may be captured in a CUDA graph.

    Args:
        matrices: X of each layer: ``[rows, D]``, all of one shape and dtype (float32, bfloat16 or float16).
        ones: whether every row gets a last entry 1, whose weight is the bias.
        precision: of the products of float32 numbers, see :func:`consequent.engines.gpu.kernels.moment.patch_moment`.

    Returns:
        ``[layers, D + ones, D + ones]`` in float32, symmetric.
    """
    return _products(matrices, ones, precision, over_rows=True)


def gram_matrices(matrices: Sequence[Tensor], *, ones: bool, precision: Precision = "tf32x3") -> Tensor:
    """``X Xᵀ`` of each matrix; the arguments are those of :func:`row_moments`.

    Returns:
        ``[layers, rows, rows]`` in float32, symmetric.
    """
    return _products(matrices, ones, precision, over_rows=False)


class _Cut(NamedTuple):
    """How a product is cut up."""

    block: int
    depth: int  # summed over at once
    tiles: int
    splits: int
    share: int  # of the sum in a split
    warps: int
    stages: int


@lru_cache(maxsize=1024)
def _cut(layers: int, size: int, length: int, device: torch.device) -> _Cut:
    block, depth, warps, stages = (128, 32, 8, 3) if size > 512 else (64, 32, 4, 4)
    blocks = -(-size // block)
    tiles = blocks * (blocks + 1) // 2
    wanted = 4 * multiprocessors(device) // (tiles * layers)
    splits = max(1, min(wanted, length // (8 * depth)))  # with less to do, adding up would cost more
    share = -(-length // (splits * depth)) * depth
    return _Cut(block, depth, tiles, -(-length // share), share, warps, stages)


def _products(matrices: Sequence[Tensor], ones: bool, precision: Precision, *, over_rows: bool) -> Tensor:
    first = matrices[0]
    for matrix in matrices:
        check_inputs(matrix, 2, precision)
        if matrix.shape != first.shape or matrix.dtype != first.dtype or matrix.device != first.device:
            raise ValueError(
                f"all matrices must be alike, got {list(first.shape)} {first.dtype} and {list(matrix.shape)} "
                f"{matrix.dtype}"
            )
    rows, features = first.shape
    size, length = (features + ones, rows) if over_rows else (rows, features)
    if first.numel() == 0:
        return first.new_full((len(matrices), size, size), 0.0, dtype=torch.float32)
    suiting = [suited(_side_by_side(matrix), precision) for matrix in matrices]
    held, precision = [matrix for matrix, _ in suiting], suiting[0][1]
    cut = _cut(len(held), size, length, first.device)
    values: list[int] = []
    divisible = 0
    for matrix in held:
        values += (matrix.data_ptr(), matrix.stride(0))
        divisible |= matrix.data_ptr() // matrix.element_size() | matrix.stride(0)
    results = torch.empty(len(held), cut.splits, size, size, dtype=torch.float32, device=first.device)
    with device_guard(first.device):
        table = device_table(values, first.device, key=f"row products {size} {length}")
        launch(
            _multiply,
            (cut.tiles * cut.splits, len(held), 1),
            (table, results, size, features, length, cut.share, cut.tiles, cut.splits, int(ones)),
            (_DTYPES[held[0].dtype], over_rows, divisible & 3 == 0, precision, cut.block, cut.depth),
            num_warps=cut.warps,
            num_stages=cut.stages,
        )
    return results[:, 0] if cut.splits == 1 else results.sum(1)


def _side_by_side(matrix: Tensor) -> Tensor:
    """With the columns side by side in memory."""
    return matrix if matrix.stride(1) == 1 or matrix.shape[1] == 1 else matrix.contiguous()


@triton.jit(
    do_not_specialize=["table", "results", "size", "features", "length", "share", "tiles", "splits", "ones"],
)
def _multiply(
    table,
    results,
    size: tl.int32,
    features: tl.int32,
    length: tl.int32,
    share: tl.int32,
    tiles: tl.int32,
    splits: tl.int32,
    ones: tl.int32,
    DTYPE: tl.constexpr,
    OVER_ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """One tile of one layer's product, over one share of the sum."""
    program, layer = tl.program_id(0), tl.program_id(1)
    split = program // tiles
    i, j = triangle_place(program % tiles)
    matrix = tl.load(table + layer * _FIELDS).to(tl.pointer_type(DTYPE))
    stride = tl.load(table + layer * _FIELDS + 1)
    if ALIGNED:
        matrix = tl.multiple_of(matrix, 16)
        stride = stride // 4 * 4
    down, across = i * BLOCK + tl.arange(0, BLOCK), j * BLOCK + tl.arange(0, BLOCK)
    stop = tl.minimum(split * share + share, length)
    product = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(split * share, stop, DEPTH):
        k = start + tl.arange(0, DEPTH)
        if OVER_ROWS:
            left = tl.trans(_rows(matrix, stride, k, stop, down, features, ones))
            right = _rows(matrix, stride, k, stop, across, features, ones)
        else:
            left = _rows(matrix, stride, down, size, k, stop, 0)
            right = tl.trans(_rows(matrix, stride, across, size, k, stop, 0))
        product = accumulate(left, right, product, PRECISION)
    if OVER_ROWS == 0:
        product += tl.where(split == 0, ones, 0).to(tl.float32)
    result = results + (layer * splits + split).to(tl.int64) * size * size
    wanted = (down < size)[:, None] & (across < size)[None, :] & (down[:, None] >= across[None, :])
    places = down[:, None].to(tl.int64) * size + across[None, :]
    mirrored = across[None, :].to(tl.int64) * size + down[:, None]
    tl.store(result + places, product, wanted)
    tl.store(result + mirrored, product, wanted)


@triton.jit
def _rows(matrix, stride, row, rows, column, columns, ones):
    """Some entries of the matrix: zero beyond its end, and one in the column behind the last if there are ones."""
    there = (row < rows)[:, None] & (column < columns)[None, :]
    values = tl.load(matrix + row[:, None] * stride + column[None, :], there, other=0.0)
    constant = (row < rows)[:, None] & (column == columns)[None, :] & (ones != 0)
    return tl.where(constant, 1.0, values).to(values.dtype)
