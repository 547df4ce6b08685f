"""How a layer's second moment is computed on a GPU: by which kernel, or by products of matrices."""

from contextlib import nullcontext
from math import prod
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from consequent.engines.gpu import kernels
from consequent.maths.precision import tf32_is_allowed, tf32_products

if TYPE_CHECKING:
    from consequent.layers.convolution import Convolution

__all__ = ["are_rounded", "patch_moment_by_kernel", "patch_moments_by_kernel", "row_moments_by_products"]

# Inputs may be rounded to TF32 where the errors of so many rows cancel out (docs/speed.md, precision).
ROWS_THAT_AVERAGE = 4096

FEW_ROWS = 512  # of several layers, which are multiplied at once

_BYTES_TOGETHER = 2**26  # of inputs that are copied at once

# The kernel for several layers sums over images, 32 at a time.
FEWEST_IMAGES = 16


def row_moments_by_products(rows: list[Tensor], *, ones: bool) -> Tensor | None:
    """The second moments of several layers' rows, ``[layers, 1, D, D]``, on a GPU.

    Where the user allows TF32 products, float32 inputs of many rows are rounded to TF32: what is summed is then the
    exact second moment of inputs that differ by one part in 2048 at most, so it stays positive semi-definite;
    half-precision inputs are taken as they are. Sums are in float32.
    """
    first = rows[0]
    if not _are_taken(first):
        return None
    if first.dtype != torch.float32:
        return torch.stack([_product_of_halves(matrix, ones=ones) for matrix in rows])
    together = max(1, _BYTES_TOGETHER // first.nbytes)
    parts = [_products_together(rows[at : at + together], ones=ones) for at in range(0, len(rows), together)]
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[:, None]


def _product_of_halves(rows: Tensor, *, ones: bool) -> Tensor:
    from consequent.layers.operation import with_ones

    moment = torch.mm(rows.mT, rows, out_dtype=torch.float32)[None]  # exact products, summed in float32
    return with_ones(moment, rows.sum(0, keepdim=True, dtype=torch.float32), len(rows)) if ones else moment


def are_rounded(rows: Tensor) -> bool:
    """Whether a dense layer's rows are rounded to TF32 before they are multiplied."""
    return len(rows) >= ROWS_THAT_AVERAGE and tf32_is_allowed()


def _products_together(rows: list[Tensor], *, ones: bool) -> Tensor:
    from consequent.engines.gpu.kernels.padded_rows import padded_rows

    size = rows[0].shape[1] + ones
    rounded = are_rounded(rows[0])
    padded = padded_rows(rows, ones=ones, rounded=rounded)
    with tf32_products() if rounded else nullcontext():
        moments = torch.empty(len(rows), padded.shape[-1], padded.shape[-1], device=padded.device)
        if padded.shape[1] <= FEW_ROWS:
            torch.bmm(padded.mT, padded, out=moments)
        else:
            for matrix, moment in zip(padded, moments, strict=True):  # one by one, cuBLAS splits long sums
                torch.mm(matrix.mT, matrix, out=moment)
    return moments if moments.shape[-1] == size else moments[:, :size, :size].contiguous()


def patch_moment_by_kernel(operation: "Convolution", inputs: Tensor, *, ones: bool) -> Tensor | None:
    """The second moment of one layer's patches, ``[1, D, D]``, where there is a kernel for it."""
    if operation.spatial_dims != 2 or operation.groups > 1 or not _are_taken(inputs):
        return None
    from consequent.engines.gpu.kernels import moment as kernel
    from consequent.layers.patches import positions

    (top, _), (left, _) = operation.padding
    space = [inputs.shape[2] + 2 * top, inputs.shape[3] + 2 * left]
    count = len(inputs) * prod(positions(space, operation.kernel_size, operation.stride, operation.dilation))
    kernel_size, stride, dilation = map(_pair, (operation.kernel_size, operation.stride, operation.dilation))
    geometry = (kernel_size, stride, (top, left), dilation)
    return kernel.patch_moment(inputs, *geometry, ones=ones, precision=_precision_for(count))[None]


def patch_moments_by_kernel(operation: "Convolution", inputs: list[Tensor], *, ones: bool) -> Tensor | None:
    """The second moments of several layers at once, ``[layers, 1, D, D]``, where there is a kernel for that."""
    if not kernels.run_on(inputs[0].device) or not _is_done_together(operation, inputs[0]):
        return None
    from consequent.engines.gpu.kernels.lags import lag_moments

    return lag_moments(inputs, ones=ones)[:, None]


def _are_taken(inputs: Tensor) -> bool:
    return kernels.run_on(inputs.device) and inputs.dtype != torch.float64 and inputs.numel() > 0


def _is_done_together(operation: "Convolution", inputs: Tensor) -> bool:
    """Whether a kernel takes several such layers: 3 × 3 convolutions that keep the image's size."""
    sizes = (*operation.kernel_size, *operation.stride, *operation.dilation)
    return (
        sizes == (3, 3, 1, 1, 1, 1)
        and operation.padding == ((1, 1), (1, 1))
        and operation.groups == 1
        and inputs.dtype != torch.float64
        and len(inputs) >= FEWEST_IMAGES
        and (inputs.dtype != torch.float32 or len(inputs) * prod(inputs.shape[2:]) >= ROWS_THAT_AVERAGE)
    )


def _precision_for(rows: int) -> Literal["tf32", "tf32x3"]:
    return "tf32" if rows >= ROWS_THAT_AVERAGE else "tf32x3"


def _pair(sizes: tuple[int, ...]) -> tuple[int, int]:
    height, width = sizes
    return height, width
