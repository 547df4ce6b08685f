# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The inputs of several dense layers side by side, as products of matrices want them.

Every row gets a last entry 1, whose weight is the bias; long ones zeros up to a multiple of four numbers, so that rows
are aligned. They may be rounded to TF32, to nearest: tensor cores would cut the digits off, which makes every sum of
squares too small.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from consequent.engines.gpu.kernels.launch import launch
from consequent.engines.gpu.kernels.moment_programs import nearest_tf32
from consequent.engines.gpu.kernels.table import device_guard, device_table, floats_at

__all__ = ["padded_rows"]

_FIELDS = tl.constexpr(2)  # entries of the table per matrix
_TILE = (16, 256)  # rows, columns
_ALIGNED_FROM = 128  # features: products of smaller matrices are no faster for it


def padded_rows(matrices: Sequence[Tensor], *, ones: bool, rounded: bool = False) -> Tensor:
    """All matrices in one tensor.

    Never waits for the device, and may be captured in a CUDA graph.

    Args:
        matrices: ``[rows, D]`` each, float32, all of one shape.
        ones: whether every row gets an entry 1 behind its last.
        rounded: to TF32.

    Returns:
        ``[layers, rows, columns]``: D, one more with ones, and if these are many, zeros up to a multiple of four.
    """
    first = matrices[0]
    for matrix in matrices:
        if matrix.dtype != torch.float32:
            raise TypeError(f"the matrices must be float32, got {matrix.dtype}")
        if matrix.shape != first.shape or matrix.ndim != 2:
            raise ValueError(f"all must be matrices of one shape, got {list(first.shape)} and {list(matrix.shape)}")
    rows, features = first.shape
    width = features + ones if features < _ALIGNED_FROM else -(-(features + ones) // 4) * 4
    result = torch.empty(len(matrices), rows, width, dtype=torch.float32, device=first.device)
    if result.numel() == 0:
        return result
    held = [matrix if matrix.stride(1) == 1 or features == 1 else matrix.contiguous() for matrix in matrices]
    values = [number for matrix in held for number in (matrix.data_ptr(), matrix.stride(0))]
    with device_guard(first.device):
        table = device_table(values, first.device, key=f"padded rows {width} {rows}")
        grid = (-(-rows // _TILE[0]), -(-width // _TILE[1]), len(held))
        launch(_pad, grid, (table, result, rows, features, width, int(ones)), (rounded, *_TILE))
    return result


@triton.jit(do_not_specialize=["table", "result", "rows", "features", "width", "ones"])
def _pad(
    table,
    result,
    rows: tl.int32,
    features: tl.int32,
    width: tl.int32,
    ones: tl.int32,
    ROUNDED: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
):
    layer = tl.program_id(2)
    r = tl.program_id(0) * TILE_R + tl.arange(0, TILE_R)
    c = tl.program_id(1) * TILE_C + tl.arange(0, TILE_C)
    matrix = floats_at(tl.load(table + layer * _FIELDS))
    stride = tl.load(table + layer * _FIELDS + 1)
    there = (r < rows)[:, None] & (c < features)[None, :]
    values = tl.load(matrix + r[:, None] * stride + c[None, :], there, other=0.0)
    values = tl.where((c == features)[None, :] & (ones != 0), 1.0, values)
    if ROUNDED:
        values = nearest_tf32(values)
    place = (layer.to(tl.int64) * rows + r[:, None]) * width + c[None, :]
    tl.store(result + place, values, (r < rows)[:, None] & (c < width)[None, :])
