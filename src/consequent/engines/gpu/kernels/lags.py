# mypy: disable-error-code="no-untyped-call"
"""The second moments of 3 × 3 convolutions that keep the image's size, several layers of one shape in one go.

With stride 1, ``S[(c, a), (c', b)] = Σ x[c, p + a] x[c', p + b]`` depends on the taps ``a`` and ``b`` through their
difference ``b − a`` alone, the lag, up to what happens at the border. Up to a sign there are 13 lags, where the moment
has 45 blocks. At the border: the first tap of a row or column never looks at the last pixel, nor the last tap at the
first one. If the lag has a component in that direction, the other factor lies outside of the image then, and nothing is
missing. If it has none, the sum over that border, a row, a column or (both) a corner, is to be taken off again::

    S[(c, a), (c', b)] = all(lag) − row(a_y, lag) − column(a_x, lag) + corner(a_y, a_x, lag)

A first launch turns the images around, to ``[height, width, channels, images]``, and rounds float32 to TF32 on the way,
to nearest: tensor cores would cut the digits off, which makes every sum of squares too small. Now the sum over the
images runs along the memory, a lag is a constant distance between rows, and the border is a mask of whole rows: all
that the tensor cores read is wide and aligned.

A *group* of neighbouring pixels is multiplied at a time, with all pixels in reach of one of them. A block of the
product belongs to a pair of pixels; those of equal lag are added up in the end. Pixels at the border are summed apart,
hence the nine regions: first, middle and last rows times first, middle and last groups.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from consequent.engines.gpu.kernels.lag_jobs import cut_up
from consequent.engines.gpu.kernels.lag_products import multiply
from consequent.engines.gpu.kernels.lag_sums import put_together
from consequent.engines.gpu.kernels.lag_turn import turn_around
from consequent.engines.gpu.kernels.moment import check_inputs
from consequent.engines.gpu.kernels.table import device_guard

__all__ = ["lag_moments"]


def lag_moments(inputs: Sequence[Tensor], *, ones: bool) -> Tensor:
    """``Σ x xᵀ`` over the patches ``x`` of 3 × 3 convolutions with stride, padding and dilation 1, for each layer.

    Float32 is rounded to TF32 (to nearest), sums are float32; the same bit for bit every time. Never waits for the
    device, and may be captured in a CUDA graph. Images are summed along the memory: best for 32 images and more.

    Args:
        inputs: every layer's ``[N, C, H, W]``, all of one shape, strides, device, and dtype (float32, bfloat16 or
            float16).
        ones: whether every patch gets a last entry 1, whose weight is the bias.

    Returns:
        ``[layers, 9 C + ones, 9 C + ones]`` in float32, in the order of ``weight.flatten(1)``.

    Raises:
        ValueError: if there are no inputs, or they differ in shape, strides, dtype or device.
        TypeError: for another dtype.
    """
    inputs = _checked(inputs)
    first = inputs[0]
    cut = cut_up(first.shape, len(inputs), ones, first.device)
    if min(first.shape) == 0:
        return first.new_zeros((len(inputs), cut.features, cut.features), dtype=torch.float32)
    with device_guard(first.device):
        turned, sums = turn_around(inputs, cut, ones)
        return put_together(multiply(turned, len(inputs), cut), sums, len(inputs), cut, ones)


def _checked(inputs: Sequence[Tensor]) -> list[Tensor]:
    if not inputs:
        raise ValueError("no inputs: give at least one layer's")
    first = inputs[0]
    check_inputs(first)
    kind = first.shape, first.stride(), first.dtype, first.device
    for place, other in enumerate(inputs):
        if (other.shape, other.stride(), other.dtype, other.device) != kind:
            raise ValueError(
                "the inputs must be alike in shape, strides, dtype and device, but number 0 is "
                f"{_described(first)} and number {place} {_described(other)}"
            )
    if first.device.type != "cuda" and first.dtype == torch.bfloat16:
        return [layer.float() for layer in inputs]  # the interpreter is made of NumPy, which has no bfloat16
    return list(inputs)


def _described(inputs: Tensor) -> str:
    return f"{list(inputs.shape)} with strides {inputs.stride()}, {inputs.dtype} on {inputs.device}"
