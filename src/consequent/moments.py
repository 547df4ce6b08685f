"""From a layer's input to its second moment ``Σ x xᵀ``: all that the feature side needs to know of the inputs."""

from math import prod
from typing import Literal

import torch
from torch import Tensor, nn

from consequent import kernels, layers
from consequent.autocorrelation import Window, operations, patch_moment_by_autocorrelation
from consequent.layers import Layer
from consequent.patches import Sides, pad_sides, patch_moment, patch_rows, positions

__all__ = ["second_moment", "second_moments"]

# Forming a patch costs about as much as this many multiplications per entry.
COST_OF_COPYING = 64

# On a GPU, inputs may be rounded to TF32 where the errors of so many rows cancel out (docs/speed.md, precision).
ROWS_THAT_AVERAGE = 4096

# Features from which on a product of half-precision matrices is fastest as a whole, although half of it is not needed.
WIDE = 256

# The kernel for several layers sums over images, 32 at a time.
FEWEST_IMAGES = 16


def second_moment(layer: Layer, inputs: Tensor, *, ones: bool) -> Tensor:
    r"""``Σ x xᵀ`` over the rows of the layer's input matrix (``X Xᵀ`` in the paper's orientation).

    Args:
        layer: a Linear or convolutional layer.
        inputs: its inputs, of any leading shape.
        ones: whether every row gets a last entry 1, whose weight is the bias.

    Returns:
        ``[groups, D, D]``, or ``[groups, D + 1, D + 1]`` with ``ones``, in float32 or better.

    Example:
        >>> import torch
        >>> second_moment(torch.nn.Linear(2, 1), torch.tensor([[1.0, 2.0], [0.0, 3.0]]), ones=True)
        tensor([[[ 1.,  2.,  1.],
                 [ 2., 13.,  5.],
                 [ 1.,  5.,  2.]]])
    """
    inputs = layers.as_batch(layer, inputs)
    moment = _moment_by_kernel(layer, inputs, ones=ones)
    if moment is not None:
        return moment
    inputs = inputs.to(torch.promote_types(inputs.dtype, torch.float32))
    if layers.is_dense(layer):
        rows = inputs.reshape(1, -1, inputs.shape[-1])
        return _with_ones(rows.mT @ rows, rows.sum(-2), rows.shape[-2]) if ones else rows.mT @ rows
    images, padding = _without_strides_of_points(layer, inputs)
    stride = [s if k > 1 else 1 for s, k in zip(layer.stride, layer.kernel_size, strict=True)]
    window = Window(layer.kernel_size, layer.dilation, padding, layer.groups)
    if _autocorrelation_pays(window, stride, images):
        moment = patch_moment_by_autocorrelation(images, window)
    else:
        moment = patch_moment(pad_sides(images, padding), layer.kernel_size, stride, layer.dilation, layer.groups)
    if not ones:
        return moment
    padded = pad_sides(_sum_of(images), padding)
    sums = patch_rows(padded, layer.kernel_size, stride, layer.dilation, layer.groups)
    return _with_ones(moment, sums.sum(-2), images.shape[0] * sums.shape[-2])


def second_moments(layer: Layer, inputs: list[Tensor], *, ones: bool) -> Tensor:
    """:func:`second_moment` of several inputs of one shape, each its own layer's: ``[layers, groups, D, D]``.

    Args:
        layer: any of the layers; they have the same geometry.
        inputs: an input for each layer.
        ones: whether every row gets a last entry 1.
    """
    if _is_done_together(layer, inputs[0]):
        from consequent.kernels.lags import lag_moments

        return lag_moments(inputs, ones=ones)[:, None]
    moments = [second_moment(layer, tensor, ones=ones) for tensor in inputs]
    return moments[0][None] if len(moments) == 1 else torch.stack(moments)


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


def _moment_by_kernel(layer: Layer, inputs: Tensor, *, ones: bool) -> Tensor | None:
    """The same on a GPU, where there is a kernel for it.

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
            return _with_ones(moment, rows.sum(0, keepdim=True, dtype=torch.float32), len(rows)) if ones else moment
        return kernel.row_moment(rows, ones=ones, precision=_precision_for(len(rows)))[None]
    if not isinstance(layer, nn.Conv2d) or layer.groups > 1 or layer.padding_mode != "zeros":
        return None
    (top, bottom), (left, right) = layers.padding_sides(layer)
    if top != bottom or left != right:
        return None
    space = [
        size + top + bottom for size, (top, bottom) in zip(inputs.shape[2:], layers.padding_sides(layer), strict=True)
    ]
    count = len(inputs) * prod(positions(space, layer.kernel_size, layer.stride, layer.dilation))
    kernel_size, stride, dilation = (_pair(sizes) for sizes in (layer.kernel_size, layer.stride, layer.dilation))
    geometry = (kernel_size, stride, (top, left), dilation)
    return kernel.patch_moment(inputs, *geometry, ones=ones, precision=_precision_for(count))[None]


def _precision_for(rows: int) -> Literal["tf32", "tf32x3"]:
    return "tf32" if rows >= ROWS_THAT_AVERAGE else "tf32x3"


def _pair(sizes: tuple[int, ...]) -> tuple[int, int]:
    height, width = sizes
    return height, width


def _without_strides_of_points(layer: Layer, inputs: Tensor) -> tuple[Tensor, Sides]:
    """The images and the zeros around them; where the kernel is a point, only the pixels that it meets."""
    assert not layers.is_dense(layer)
    images, padding = inputs, layers.padding_sides(layer)
    skips = [s if k == 1 else 1 for s, k in zip(layer.stride, layer.kernel_size, strict=True)]
    skipping = any(skip > 1 for skip in skips)
    if layer.padding_mode != "zeros" or skipping:
        images, padding = layers.pad(layer, inputs), [(0, 0)] * len(skips)
    if skipping:
        images = images[(slice(None), slice(None), *(slice(None, None, skip) for skip in skips))]
    return images, padding


def _autocorrelation_pays(window: Window, stride: list[int], images: Tensor) -> bool:
    if any(s > 1 for s in stride) or prod(window.kernel_size) == 1 or 0 in images.shape:
        return False
    if images.is_cuda:  # by default cuDNN rounds to TF32, and the difference of two rounded sums may be indefinite
        return False
    channels, space = images.shape[1], images.shape[2:]
    features = channels // window.groups * prod(window.kernel_size)
    patch_elements = features * window.groups * prod(window.positions(space))
    return operations(window, space, channels) < patch_elements * (features + COST_OF_COPYING)


def _sum_of(images: Tensor) -> Tensor:
    """``images.sum(0, keepdim=True)``, through memory in its own order, which torch's sum does not always find."""
    if images.stride(1) == 1:
        return images.movedim(1, -1).flatten(1).sum(0).view(1, *images.shape[2:], images.shape[1]).movedim(-1, 1)
    return images.sum(0, keepdim=True)


def _with_ones(moment: Tensor, sums: Tensor, rows: int) -> Tensor:
    """``[groups, D, D]`` with a last row and column for a constant 1."""
    groups, size = sums.shape
    whole = moment.new_empty(groups, size + 1, size + 1)
    whole[:, :size, :size] = moment
    whole[:, :size, size] = sums
    whole[:, size, :size] = sums
    whole[:, size, size] = rows
    return whole
