# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Images turned around, so that the sum over them runs along the memory, and rounded to TF32 on the way."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from consequent.engines.gpu.kernels.lag_jobs import Cut
from consequent.engines.gpu.kernels.launch import launch

PLACES = 64  # pixels of a channel that one program turns around, of all images
AT_ONCE = 8  # layers whose images one launch turns around: their addresses are arguments


def turn_around(inputs: list[Tensor], cut: Cut, ones: bool) -> tuple[Tensor, Tensor]:
    """The inputs as ``[layers, height, width, channels, images]``, and their sums over the images."""
    first = inputs[0]
    images, channels, height, width = cut.shape
    strides = first.stride()
    area = height * width * channels
    turned = torch.empty(len(inputs) * area * cut.images, dtype=first.dtype, device=first.device)
    sums = torch.empty(len(inputs) * area if ones else 1, dtype=torch.float32, device=first.device)
    channels_first = strides[1] > strides[3]
    images_at_once = min(128, triton.next_power_of_2(cut.images))
    for start in range(0, len(inputs), AT_ONCE):
        some = inputs[start : start + AT_ONCE]
        missing = [first] * (AT_ONCE - len(some))
        launch(
            _turn_around,
            (-(-area // PLACES), len(some)),
            (*some, *missing, turned, sums, *strides, images, cut.images, height, width, channels, start),
            (channels_first, channels_first and height % 16 == width % 16 == 0, ones, PLACES, images_at_once),
            num_warps=4,
        )
    return turned, sums


@triton.jit(do_not_specialize=["images", "height", "width", "start"])
def _turn_around(
    x0,
    x1,
    x2,
    x3,
    x4,
    x5,
    x6,
    x7,
    turned,
    sums,
    image_stride,
    channel_stride,
    row_stride,
    column_stride,
    images,
    padded_images,
    height,
    width,
    channels,
    start,
    CHANNELS_FIRST: tl.constexpr,
    ALIGNED: tl.constexpr,
    ONES: tl.constexpr,
    PLACES: tl.constexpr,
    IMAGES: tl.constexpr,
):
    """Some places (pixel and channel, in the order of the memory) of all images of one layer."""
    number = tl.program_id(1)
    inputs = _one_of(x0, x1, x2, x3, x4, x5, x6, x7, number)
    layer = (start + number).to(tl.int64)
    if ALIGNED:  # the compiler then knows that neighbours are in one row
        height = height // 16 * 16
        width = width // 16 * 16
    area = height * width
    place = tl.program_id(0) * PLACES + tl.arange(0, PLACES)
    if CHANNELS_FIRST:
        channel = place // area
        pixel = place % area
    else:
        pixel = place // channels
        channel = place % channels
    real = place < area * channels
    # An image may be far from the first one, but is not itself too large for 32 bits.
    within = (pixel // width) * row_stride + (pixel % width) * column_stride + channel * channel_stride
    row = layer * (area * channels) + pixel * channels + channel
    total = tl.zeros((PLACES,), tl.float32)
    for first in range(0, padded_images, IMAGES):
        image = first + tl.arange(0, IMAGES)
        source = inputs + (image.to(tl.int64) * image_stride)[:, None] + within[None, :]
        values = tl.load(source, mask=(image < images)[:, None] & real[None, :], other=0.0)
        values = _to_nearest(values)
        if ONES:
            total += tl.sum(values.to(tl.float32), 0)
        target = turned + (row * padded_images)[:, None] + image[None, :]
        tl.store(target, tl.trans(values), mask=real[:, None] & (image < padded_images)[None, :])
    if ONES:
        tl.store(sums + row, total, mask=real)


@triton.jit
def _one_of(x0, x1, x2, x3, x4, x5, x6, x7, number):
    """The pointer with this number; Triton has no lists of them."""
    low = tl.where(number == 0, x0, tl.where(number == 1, x1, tl.where(number == 2, x2, x3)))
    high = tl.where(number == 4, x4, tl.where(number == 5, x5, tl.where(number == 6, x6, x7)))
    return tl.where(number < 4, low, high)


@triton.jit
def _to_nearest(values):
    """Float32 with the 13 last digits rounded away, as TF32 has none; infinities, NaN and other types as they are."""
    if values.dtype == tl.float32:
        bits = values.to(tl.uint32, bitcast=True)
        rounded = ((bits + 0x1000) & 0xFFFFE000).to(tl.float32, bitcast=True)
        values = tl.where((bits & 0x7F800000) == 0x7F800000, values, rounded)
    return values
