# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
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
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from consequent.engines.gpu.kernels.launch import launch
from consequent.engines.gpu.kernels.moment import check_inputs, geometry_of, multiprocessors
from consequent.engines.gpu.kernels.table import device_guard

__all__ = ["lag_moments"]

LAGS = 13  # (0, 0), (0, 1), (0, 2), (1, −2), …, (2, 2)
MOST_JOBS = 64  # of a layer: they are added up by one program, at once
PART = 16  # pairs of channels that one program puts together: few, since all wait for the memory
INTERPRETED_PART = 4096  # on a CPU, where a program costs more than its size
PLACES = 64  # pixels of a channel that one program turns around, of all images
AT_ONCE = 8  # layers whose images one launch turns around: their addresses are arguments


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
    cut = _cut(first.shape, len(inputs), ones, first.device)
    if min(first.shape) == 0:
        return first.new_zeros((len(inputs), cut.features, cut.features), dtype=torch.float32)
    with device_guard(first.device):
        turned, sums = _turn(inputs, cut, ones)
        return _put_together(_multiply(turned, len(inputs), cut), sums, len(inputs), cut, ones)


def _checked(inputs: Sequence[Tensor]) -> list[Tensor]:
    if not inputs:
        raise ValueError("no inputs: give at least one layer's")
    first = inputs[0]
    check_inputs(first, 4, "tf32")
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


@dataclass(frozen=True)
class Tiling:
    """How the work is cut up; a simple rule instead of a search at run time."""

    group: int  # pixels side by side that are multiplied at a time
    channels: int  # of each of them in a tile
    slots: int  # pixels they are multiplied with, in a tile
    depth: int  # images at a time
    warps: int
    stages: int
    programs: int  # to a multiprocessor
    rows: bool = False  # three tiles at once, see _multiply_rows


def tiling(channels: int) -> Tiling:
    """The tiling for so many channels: as many pixels together as make a large tile."""
    if channels <= 16:
        return Tiling(group=4, channels=16, slots=8, depth=32, warps=4, stages=3, programs=1, rows=True)
    if channels <= 32:
        return Tiling(group=2, channels=32, slots=4, depth=32, warps=4, stages=3, programs=3)
    return Tiling(group=1, channels=64, slots=2, depth=32, warps=4, stages=4, programs=2)


class Cut(NamedTuple):
    """All that a launch needs to know but addresses; worked out once for every shape."""

    plan: Tiling
    shape: tuple[int, int, int, int]
    features: int
    depth: int  # images at a time
    images: int  # rounded up to that
    share: int  # groups in a job
    splits: tuple[int, int, int]  # jobs of the middle, of the first or last row, of the first or last group's column
    jobs: int
    tiles: int


@lru_cache(maxsize=1024)
def _cut(shape: tuple[int, int, int, int], layers: int, ones: bool, device: torch.device) -> Cut:
    images, channels, height, width = shape
    geometry_of(shape, (3, 3), (1, 1), (1, 1), (1, 1))  # not too large
    plan = tiling(channels)
    depth = min(plan.depth, max(16, triton.next_power_of_2(images)))
    blocks = -(-channels // plan.channels)
    tiles = blocks * blocks * -(-(3 * plan.group + 10) // plan.slots)
    groups = -(-width // plan.group)
    wanted = plan.programs * multiprocessors(device) // (layers * (blocks * blocks if plan.rows else tiles))
    share = max(1, -(-height * groups // max(9, wanted)))
    while (jobs := _splits(height, groups, share)[1]) > MOST_JOBS:
        share += 1
    splits = _splits(height, groups, share)[0]
    return Cut(plan, shape, 9 * channels + ones, depth, -(-images // depth) * depth, share, splits, jobs, tiles)


def _splits(height: int, groups: int, share: int) -> tuple[tuple[int, int, int], int]:
    rows, columns = max(0, height - 2), max(0, groups - 2)
    middle, along_row, along_column = -(-rows * columns // share), -(-columns // share), -(-rows // share)
    return (middle, along_row, along_column), middle + 2 * along_row + 2 * along_column + 4


def _turn(inputs: list[Tensor], cut: Cut, ones: bool) -> tuple[Tensor, Tensor]:
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


def _multiply(turned: Tensor, layers: int, cut: Cut) -> Tensor:
    """The products of groups and what they reach, ``[layers, jobs, tiles, group · channels, slots · channels]``."""
    _, channels, height, width = cut.shape
    plan = cut.plan
    tile = plan.group * plan.channels * plan.slots * plan.channels
    products = torch.empty(layers * cut.jobs * cut.tiles * tile, dtype=torch.float32, device=turned.device)
    kernel, tiles = (_multiply_rows, cut.tiles // 3) if plan.rows else (_multiply_groups, cut.tiles)
    launch(
        kernel,
        (cut.jobs * layers * tiles,),
        (turned, products, cut.images, height, width, channels, layers, cut.share, *cut.splits),
        (plan.group, plan.channels, plan.slots, cut.depth),
        num_warps=plan.warps,
        num_stages=plan.stages,
    )
    return products


@triton.jit
def slot_place(slot, GROUP: tl.constexpr, SLOTS: tl.constexpr):
    """Rows below and columns right of a group's first pixel, of the pixels that it reaches; a row below 2 is none.

    A lag within the row leads to the right alone. Where a tile has a slot for every pixel in reach of a row, all three
    rows are nevertheless alike, and a tile is a row.
    """
    BEFORE: tl.constexpr = 2 if SLOTS == GROUP + 4 else 0
    FIRST: tl.constexpr = BEFORE + GROUP + 2
    beyond = slot - FIRST
    below = tl.where(slot < FIRST, 0, 1 + beyond // (GROUP + 4))
    return below, tl.where(slot < FIRST, slot - BEFORE, beyond % (GROUP + 4) - 2)


@triton.jit
def slot_of(lag_y, lag_x, across, GROUP: tl.constexpr, SLOTS: tl.constexpr):
    """The slot of the pixel with this lag from the one that many columns across the group."""
    BEFORE: tl.constexpr = 2 if SLOTS == GROUP + 4 else 0
    return across + lag_x + tl.where(lag_y == 0, BEFORE, BEFORE + lag_y * (GROUP + 4))


@triton.jit
def region_of(job, middle, along_row, along_column):
    """Which rows and groups a job is of (0 the first, 1 those between, 2 the last), and how many jobs of it precede."""
    in_row = job - middle
    in_column = in_row - 2 * along_row
    corner = in_column - 2 * along_column
    last_row = in_row >= along_row
    last_column = in_column >= along_column
    rows = tl.where(in_row < 0, 1, tl.where(in_column < 0, last_row * 2, tl.where(corner < 0, 1, corner // 2 * 2)))
    groups = tl.where(in_column < 0, 1, tl.where(corner < 0, last_column * 2, corner % 2 * 2))
    row_split = in_row - tl.where(last_row, along_row, 0)
    column_split = in_column - tl.where(last_column, along_column, 0)
    split = tl.where(in_row < 0, job, tl.where(in_column < 0, row_split, tl.where(corner < 0, column_split, 0)))
    return rows, groups, split


@triton.jit
def extent(region, size):
    """The first of the rows or groups of this region, and how many there are."""
    start = tl.where(region == 0, 0, tl.where(region == 1, 1, size - 1))
    inner = tl.where(region == 1, tl.maximum(size - 2, 0), tl.minimum(size - 1, 1))
    return start, tl.where(region == 0, 1, inner)


@triton.jit
def _job_of(program, tiles, layers, share, middle, along_row, along_column, height, groups_across):
    """What a program is to do: its tile, layer and job, and of which rows and groups it takes which ones.

    Neighbouring programs read the same pixels; the longest jobs come first.
    """
    tile = program % tiles
    layer = (program // tiles) % layers
    job = program // tiles // layers
    rows_region, groups_region, split = region_of(job, middle, along_row, along_column)
    first_row, rows = extent(rows_region, height)
    first_group, groups = extent(groups_region, groups_across)
    start = split * share
    return tile, layer, job, first_row, first_group, groups, start, tl.minimum(start + share, rows * groups)


_ALIKE = ["height", "width", "channels", "layers", "share", "middle", "along_row", "along_column"]  # one kernel for all


@triton.jit(do_not_specialize=_ALIKE)
def _multiply_groups(
    turned,
    products,
    images,
    height,
    width,
    channels,
    layers,
    share,
    middle,
    along_row,
    along_column,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """One tile of one job of one layer."""
    STRIPS: tl.constexpr = (3 * GROUP + 9 + SLOTS) // SLOTS
    M: tl.constexpr = GROUP * BLOCK
    T: tl.constexpr = SLOTS * BLOCK
    blocks = tl.cdiv(channels, BLOCK)
    tiles = blocks * blocks * STRIPS
    tile, layer, job, first_row, first_group, groups, start, stop = _job_of(
        tl.program_id(0), tiles, layers, share, middle, along_row, along_column, height, tl.cdiv(width, GROUP)
    )

    row = tl.arange(0, M)
    across = row // BLOCK
    channel = (tile // (STRIPS * blocks)) * BLOCK + row % BLOCK
    row = tl.arange(0, T)
    other_below, other_across = slot_place((tile % STRIPS) * SLOTS + row // BLOCK, GROUP, SLOTS)
    other_channel = (tile // STRIPS % blocks) * BLOCK + row % BLOCK
    other_rows = (other_below * width + other_across) * channels + other_channel
    other_below = tl.where((other_channel < channels) & (other_below < 3), other_below, height)
    image = tl.arange(0, DEPTH)
    here_places = ((across * channels + channel) * images)[:, None] + image[None, :]
    other_places = (other_rows * images)[:, None] + image[None, :]

    layer_start = turned + layer.to(tl.int64) * (height * width * channels) * images
    depths = images // DEPTH
    product = tl.zeros((M, T), tl.float32)
    for step in range(start * depths, stop * depths):
        unit = step // depths
        y = first_row + unit // groups
        x = (first_group + unit % groups) * GROUP
        base = layer_start + ((y * width + x).to(tl.int64) * (channels * images) + (step % depths) * DEPTH)
        here_inside = (x + across < width) & (channel < channels)
        here = tl.load(base + here_places, mask=here_inside[:, None], other=0.0)
        other_inside = (x + other_across >= 0) & (x + other_across < width) & (y + other_below < height)
        other = tl.load(base + other_places, mask=other_inside[:, None], other=0.0)
        product = tl.dot(here, tl.trans(other), product, input_precision="tf32")

    number = (layer * (tl.num_programs(0) // (tiles * layers)) + job) * tiles + tile
    target = products + number.to(tl.int64) * (M * T)
    tl.store(target + tl.arange(0, M)[:, None] * T + tl.arange(0, T)[None, :], product)


@triton.jit(do_not_specialize=_ALIKE)
def _multiply_rows(
    turned,
    products,
    images,
    height,
    width,
    channels,
    layers,
    share,
    middle,
    along_row,
    along_column,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """The three tiles of :func:`_multiply_groups` at once: what is reached in one row, times groups of up to 2 above.

    The job says which row is reached, not where the groups are. That is the same where the first and last row matter.
    """
    M: tl.constexpr = GROUP * BLOCK
    T: tl.constexpr = SLOTS * BLOCK
    blocks = tl.cdiv(channels, BLOCK)
    tile, layer, job, first_row, first_group, groups, start, stop = _job_of(
        tl.program_id(0), blocks * blocks, layers, share, middle, along_row, along_column, height, tl.cdiv(width, GROUP)
    )

    row = tl.arange(0, M)
    across = row // BLOCK
    channel = (tile // blocks) * BLOCK + row % BLOCK
    row = tl.arange(0, T)
    other_across = row // BLOCK - 2
    other_channel = (tile % blocks) * BLOCK + row % BLOCK
    image = tl.arange(0, DEPTH)
    here_places = ((across * channels + channel) * images)[:, None] + image[None, :]
    other_places = ((other_across * channels + other_channel) * images)[:, None] + image[None, :]

    reach = tl.where(channel < channels, across, width)
    layer_start = turned + layer.to(tl.int64) * (height * width * channels) * images
    row_length = width * channels * images
    depths = images // DEPTH
    product_0 = tl.zeros((M, T), tl.float32)
    product_1 = tl.zeros((M, T), tl.float32)
    product_2 = tl.zeros((M, T), tl.float32)
    for step in range(start * depths, stop * depths):
        unit = step // depths
        y = first_row + unit // groups
        x = (first_group + unit % groups) * GROUP
        base = layer_start + ((y * width + x).to(tl.int64) * (channels * images) + (step % depths) * DEPTH)
        other_inside = (x + other_across >= 0) & (x + other_across < width) & (other_channel < channels)
        other = tl.trans(tl.load(base + other_places, mask=other_inside[:, None], other=0.0))
        inside = x + reach < width
        here = tl.load(base + here_places, mask=inside[:, None], other=0.0)
        product_0 = tl.dot(here, other, product_0, input_precision="tf32")
        inside = x + tl.where(y > 0, reach, width) < width
        here = tl.load(base - row_length + here_places, mask=inside[:, None], other=0.0)
        product_1 = tl.dot(here, other, product_1, input_precision="tf32")
        inside = x + tl.where(y > 1, reach, width) < width
        here = tl.load(base - 2 * row_length + here_places, mask=inside[:, None], other=0.0)
        product_2 = tl.dot(here, other, product_2, input_precision="tf32")

    jobs = tl.num_programs(0) // (blocks * blocks * layers)
    number = (layer * jobs + job) * (blocks * blocks * 3) + tile * 3
    target = products + number.to(tl.int64) * (M * T) + tl.arange(0, M)[:, None] * T + tl.arange(0, T)[None, :]
    tl.store(target, product_0)
    tl.store(target + M * T, product_1)
    tl.store(target + 2 * M * T, product_2)


def _put_together(products: Tensor, sums: Tensor, layers: int, cut: Cut, ones: bool) -> Tensor:
    images, channels, height, width = cut.shape
    plan = cut.plan
    moments = torch.empty((layers, cut.features, cut.features), dtype=torch.float32, device=products.device)
    part = PART if products.device.type == "cuda" else INTERPRETED_PART
    launch(
        _put_lags,
        (-(-channels * channels // part), LAGS + 9 * ones, layers),
        (products, sums, moments, images, height, width, channels, cut.jobs, *cut.splits),
        (
            *(ones, plan.group, plan.channels, plan.slots, LAGS),
            *(products.numel() // layers >= 2**31, part, MOST_JOBS, 16 if channels > 4 else 4),
        ),
        num_warps=1,
    )
    return moments


@triton.jit(do_not_specialize=["images", "height", "width", "jobs", "middle", "along_row", "along_column"])
def _put_lags(
    products,
    sums,
    moments,
    images,
    height,
    width,
    channels,
    jobs,
    middle,
    along_row,
    along_column,
    ONES: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    LAGS: tl.constexpr,
    WIDE: tl.constexpr,
    PART: tl.constexpr,
    JOBS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Some pairs of channels of one lag: the sums over jobs and groups, written to all pairs of taps, and mirrored."""
    features = 9 * channels + ONES
    lag = tl.program_id(1)
    layer = tl.program_id(2)
    moment = moments + layer.to(tl.int64) * (features * features)
    if lag < LAGS:
        lag_y = (lag + 2) // 5
        lag_x = (lag + 2) % 5 - 2
        element = tl.program_id(0) * PART + tl.arange(0, PART)
        channel = element // channels
        other_channel = element % channels
        real = element < channels * channels
        everything, first_row, last_row, first_column, last_column, first_first, first_last, last_first, last_last = (
            _sums_of_lag(
                products,
                layer,
                lag_y,
                lag_x,
                channel,
                other_channel,
                real,
                width,
                jobs,
                middle,
                along_row,
                along_column,
                height,
                channels,
                GROUP,
                BLOCK,
                SLOTS,
                WIDE,
                PART,
                JOBS,
            )
        )
        for row_tap in tl.static_range(3):
            for column_tap in tl.static_range(3):
                value = everything
                if row_tap == 0:  # does not see the last row
                    value -= last_row
                if row_tap == 2:
                    value -= first_row
                if column_tap == 0:
                    value -= last_column
                if column_tap == 2:
                    value -= first_column
                if row_tap == 0 and column_tap == 0:
                    value += last_last
                if row_tap == 0 and column_tap == 2:
                    value += last_first
                if row_tap == 2 and column_tap == 0:
                    value += first_last
                if row_tap == 2 and column_tap == 2:
                    value += first_first
                other_row = row_tap + lag_y
                other_column = column_tap + lag_x
                if (other_row < 3) & (other_column >= 0) & (other_column < 3):
                    feature = channel * 9 + (row_tap * 3 + column_tap)
                    other = other_channel * 9 + other_row * 3 + other_column
                    # Lag 0 has every value twice: one of them is taken, so that the moment is symmetric.
                    wanted = real & (channel <= other_channel + lag * channels)
                    tl.store(moment + feature.to(tl.int64) * features + other, value, mask=wanted)
                    tl.store(moment + other.to(tl.int64) * features + feature, value, mask=wanted)
    elif ONES:
        _put_ones(sums, moment, lag - LAGS, layer, images, height, width, channels, WIDTH)


@triton.jit
def _sums_of_lag(
    products,
    layer,
    lag_y,
    lag_x,
    channel,
    other_channel,
    real,
    width,
    jobs,
    middle,
    along_row,
    along_column,
    height,
    channels,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    WIDE: tl.constexpr,
    PART: tl.constexpr,
    JOBS: tl.constexpr,
):
    """The sum over all pixels, the first and last row, the first and last column, and the corners (row, column).

    Those of a row are 0 where the lag leads out of it, and so on: nothing is to be taken off.
    """
    STRIPS: tl.constexpr = (3 * GROUP + 9 + SLOTS) // SLOTS
    T: tl.constexpr = SLOTS * BLOCK
    TILE: tl.constexpr = GROUP * BLOCK * T
    blocks = tl.cdiv(channels, BLOCK)
    job_size = blocks * blocks * (STRIPS * TILE)
    tile = ((channel // BLOCK) * blocks + other_channel // BLOCK) * STRIPS
    within = tile * TILE + (channel % BLOCK) * T + other_channel % BLOCK
    job = tl.arange(0, JOBS)
    row_region, group_region, _ = region_of(job, middle, along_row, along_column)
    in_first_row = (row_region == 0)[:, None]
    in_last_row = (row_region == tl.where(height > 1, 2, 0))[:, None]
    wanted = (job < jobs)[:, None] & real[None, :]
    places = products + layer.to(tl.int64) * jobs * job_size
    if WIDE:
        places += (job.to(tl.int64) * job_size)[:, None] + within[None, :]
    else:
        places += (job * job_size)[:, None] + within[None, :]

    values = tl.zeros((JOBS, PART), tl.float32)
    for across in tl.static_range(GROUP):
        slot = slot_of(lag_y, lag_x, across, GROUP, SLOTS)
        offset = (slot // SLOTS) * TILE + across * (BLOCK * T) + (slot % SLOTS) * BLOCK
        values += tl.load(places + offset, mask=wanted, other=0.0)
    everything = tl.sum(values, 0)
    first_row = tl.zeros((PART,), tl.float32)
    last_row = tl.zeros((PART,), tl.float32)
    first_column = tl.zeros((PART,), tl.float32)
    last_column = tl.zeros((PART,), tl.float32)
    first_first = tl.zeros((PART,), tl.float32)
    first_last = tl.zeros((PART,), tl.float32)
    last_first = tl.zeros((PART,), tl.float32)
    last_last = tl.zeros((PART,), tl.float32)
    if lag_y == 0:
        first_row = tl.sum(tl.where(in_first_row, values, 0.0), 0)
        last_row = tl.sum(tl.where(in_last_row, values, 0.0), 0)
    if lag_x == 0:
        slot_0 = slot_of(lag_y, lag_x, 0, GROUP, SLOTS)
        offset_0 = (slot_0 // SLOTS) * TILE + (slot_0 % SLOTS) * BLOCK
        firsts = tl.load(places + offset_0, mask=wanted & (group_region == 0)[:, None], other=0.0)
        first_column = tl.sum(firsts, 0)
        if lag_y == 0:
            first_first = tl.sum(tl.where(in_first_row, firsts, 0.0), 0)
            last_first = tl.sum(tl.where(in_last_row, firsts, 0.0), 0)
        last = (width - 1) % GROUP  # place of the last pixel in its group
        slot_1 = slot_of(lag_y, lag_x, last, GROUP, SLOTS)
        offset_1 = (slot_1 // SLOTS) * TILE + last * (BLOCK * T) + (slot_1 % SLOTS) * BLOCK
        in_last_group = group_region == tl.where(width > GROUP, 2, 0)
        lasts = tl.load(places + offset_1, mask=wanted & in_last_group[:, None], other=0.0)
        last_column = tl.sum(lasts, 0)
        if lag_y == 0:
            first_last = tl.sum(tl.where(in_first_row, lasts, 0.0), 0)
            last_last = tl.sum(tl.where(in_last_row, lasts, 0.0), 0)
    return everything, first_row, last_row, first_column, last_column, first_first, first_last, last_first, last_last


@triton.jit
def _put_ones(sums, moment, tap, layer, images, height, width, channels, WIDTH: tl.constexpr):
    """One tap's part of the last row and column: all that it sees, from the sums over the images."""
    PIXELS: tl.constexpr = 256
    features = 9 * channels + 1
    area = height * width
    source = sums + layer.to(tl.int64) * (area * channels)
    if tl.program_id(0) + tap == 0:
        tl.store(moment + (features * features - 1), (images * area).to(tl.float32))
    for first in range(tl.program_id(0) * WIDTH, channels, tl.num_programs(0) * WIDTH):
        channel = first + tl.arange(0, WIDTH)
        real = channel < channels
        total = tl.zeros((WIDTH,), tl.float32)
        for start in range(0, area, PIXELS):
            pixel = start + tl.arange(0, PIXELS)
            y = pixel // width + 1 - tap // 3  # the output from which the tap sees this pixel
            x = pixel % width + 1 - tap % 3
            seen = (pixel < area) & (y >= 0) & (y < height) & (x >= 0) & (x < width)
            places = source + pixel[:, None] * channels + channel[None, :]
            total += tl.sum(tl.load(places, mask=seen[:, None] & real[None, :], other=0.0), 0)
        feature = channel * 9 + tap
        tl.store(moment + feature.to(tl.int64) * features + (features - 1), total, mask=real)
        tl.store(moment + (features - 1) * features + feature, total, mask=real)
