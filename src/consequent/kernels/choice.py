"""Which kernel computes a layer's second moment on a GPU, if one does."""

from math import prod
from typing import Literal

import torch
from torch import Tensor, nn

from consequent import kernels, layers
from consequent.layers import Layer
from consequent.patches import positions, with_ones

__all__ = ["moment_by_kernel", "moments_by_kernel"]

# Inputs may be rounded to TF32 where the errors of so many rows cancel out (docs/speed.md, precision).
ROWS_THAT_AVERAGE = 4096

# Features from which on a product of half-precision matrices is fastest as a whole, although half of it is not needed.
WIDE = 256

# The kernel for several layers sums over images, 32 at a time.
FEWEST_IMAGES = 16


def moments_by_kernel(layer: Layer, inputs: list[Tensor], *, ones: bool) -> Tensor | None:
    """The second moments of several layers at once, ``[layers, 1, D, D]``, where there is a kernel for that."""
    if not kernels.run_on(inputs[0].device) or not _is_done_together(layer, inputs[0]):
        return None
    from consequent.kernels.lags import lag_moments

    return lag_moments(inputs, ones=ones)[:, None]


def _is_done_together(layer: Layer, inputs: Tensor) -> bool:
    """Whether a kernel takes several such layers: 3 × 3 convolutions that keep the image's size."""
    return (
        isinstance(layer, nn.Conv2d)
        and inputs.ndim == 4
        and (*layer.kernel_size, *layer.stride, *layer.dilation) == (3, 3, 1, 1, 1, 1)
        and layers.padding_sides(layer) == [(1, 1), (1, 1)]
        and layer.padding_mode == "zeros"
        and layer.groups == 1
        and inputs.dtype != torch.float64
        and len(inputs) >= FEWEST_IMAGES
        and (inputs.dtype != torch.float32 or len(inputs) * prod(inputs.shape[2:]) >= ROWS_THAT_AVERAGE)
    )


def moment_by_kernel(layer: Layer, inputs: Tensor, *, ones: bool) -> Tensor | None:
    """The second moment of one layer, ``[1, D, D]``, where there is a kernel for it.

    float32 inputs of many rows are rounded to TF32: what is summed is then the exact second moment of inputs that
    differ by one part in 2048 at most, so it stays positive semi-definite; half-precision inputs are taken as they are.
    Sums are in float32.
    """
    if not kernels.run_on(inputs.device) or inputs.dtype == torch.float64 or inputs.numel() == 0:
        return None
    from consequent.kernels import moment as kernel

    if layers.is_dense(layer):
        rows = inputs.reshape(-1, inputs.shape[-1])
        if inputs.dtype != torch.float32 and inputs.shape[-1] >= WIDE:
            moment = torch.mm(rows.mT, rows, out_dtype=torch.float32)[None]  # exact products, summed in float32
            return with_ones(moment, rows.sum(0, keepdim=True, dtype=torch.float32), len(rows)) if ones else moment
        return kernel.row_moment(rows, ones=ones, precision=_precision_for(len(rows)))[None]
    if not isinstance(layer, nn.Conv2d) or layer.groups > 1 or layer.padding_mode != "zeros":
        return None
    (top, bottom), (left, right) = layers.padding_sides(layer)
    if top != bottom or left != right:
        return None
    space = [inputs.shape[2] + 2 * top, inputs.shape[3] + 2 * left]
    count = len(inputs) * prod(positions(space, layer.kernel_size, layer.stride, layer.dilation))
    kernel_size, stride, dilation = (_pair(sizes) for sizes in (layer.kernel_size, layer.stride, layer.dilation))
    geometry = (kernel_size, stride, (top, left), dilation)
    return kernel.patch_moment(inputs, *geometry, ones=ones, precision=_precision_for(count))[None]


def _precision_for(rows: int) -> Literal["tf32", "tf32x3"]:
    return "tf32" if rows >= ROWS_THAT_AVERAGE else "tf32x3"


def _pair(sizes: tuple[int, ...]) -> tuple[int, int]:
    height, width = sizes
    return height, width
