"""From a layer's input to its second moment ``Σ x xᵀ``: all that the feature side needs to know of the inputs."""

from math import prod

import torch
from torch import Tensor

from consequent import layers
from consequent.autocorrelation import Window, operations, patch_moment_by_autocorrelation
from consequent.kernels.choice import moment_by_kernel, moments_by_kernel
from consequent.layers import Layer
from consequent.patches import Sides, pad_sides, patch_moment, patch_rows, with_ones

__all__ = ["second_moment", "second_moments"]

# Forming a patch costs about as much as this many multiplications per entry.
COST_OF_COPYING = 64


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
    moment = moment_by_kernel(layer, inputs, ones=ones)
    if moment is not None:
        return moment
    inputs = inputs.to(torch.promote_types(inputs.dtype, torch.float32))
    if layers.is_dense(layer):
        rows = inputs.reshape(1, -1, inputs.shape[-1])
        return with_ones(rows.mT @ rows, rows.sum(-2), rows.shape[-2]) if ones else rows.mT @ rows
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
    return with_ones(moment, sums.sum(-2), images.shape[0] * sums.shape[-2])


def second_moments(layer: Layer, inputs: list[Tensor], *, ones: bool) -> Tensor:
    """:func:`second_moment` of several inputs of one shape, each its own layer's: ``[layers, groups, D, D]``.

    Args:
        layer: any of the layers; they have the same geometry.
        inputs: an input for each layer.
        ones: whether every row gets a last entry 1.
    """
    together = moments_by_kernel(layer, inputs, ones=ones)
    if together is not None:
        return together
    moments = [second_moment(layer, tensor, ones=ones) for tensor in inputs]
    return moments[0][None] if len(moments) == 1 else torch.stack(moments)


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
