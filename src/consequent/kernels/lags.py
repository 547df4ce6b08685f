# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The second moment of a 3 × 3 convolution that keeps the image's size, from the image's auto-correlation.

With stride 1, ``S[(c, a), (c', b)] = Σ x[c, p + a] x[c', p + b]`` depends on the taps ``a`` and ``b`` through their
difference ``b − a`` alone, the lag, up to what happens at the border. Up to a sign there are 13 lags, where the moment
has 45 blocks: less than a third of the work.

At the border: with ``q = p + a`` the sum is over all pixels ``q`` for the middle tap. The first tap of a row or column
never looks at the last pixel, nor the last tap at the first one. If the lag has a component in that direction, the
other factor lies outside of the image then, and nothing is missing. If it has none, the sum over that border, a row, a
column or (both) a corner of the image, is to be taken off again::

    S[(c, a), (c', b)] = all(lag) − row(a_y, lag) − column(a_x, lag) + corner(a_y, a_x, lag)

where ``row`` is left out if ``lag_y ≠ 0`` or ``a_y`` is the middle, and so on. All these sums are the same product over
other pixels. They are computed by one launch, split among programs, and put together by a second one.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from consequent.kernels.moment import (
    Precision,
    accumulate,
    carry_over,
    check_inputs,
    gather,
    geometry_of,
    image_place,
    multiprocessors,
    needs_wide_offsets,
    nowhere,
    part_of,
    pixel_offsets,
    suited,
    sum_splits,
)
from consequent.kernels.table import device_guard

__all__ = ["lag_moment", "suits_lags"]

LAGS = 13  # (0, 0), (0, 1), (0, 2), (1, −2), …, (2, 2)
BORDERS = 8  # two rows, two columns, four corners


def suits_lags(
    kernel_size: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int], dilation: tuple[int, int]
) -> bool:
    """Whether :func:`lag_moment` knows this convolution: 3 × 3, and an output for every pixel."""
    return kernel_size == (3, 3) and stride == (1, 1) and padding == dilation


def lag_moment(
    inputs: Tensor, dilation: tuple[int, int] = (1, 1), *, ones: bool, precision: Precision = "tf32"
) -> Tensor:
    """:func:`consequent.kernels.moment.patch_moment` of a 3 × 3 convolution, stride 1, padding as wide as the dilation.

    Exact at the border too, up to float32's rounding of sums over the whole image; the same bit for bit every time.
    Never waits for the device, and may be captured in a CUDA graph.

    Args:
        inputs: ``[N, C, H, W]`` with any strides, float32, bfloat16 or float16.
        dilation: pixels from one tap of the kernel to the next, and rows and columns of zeros on each side.
        ones: whether every patch gets a last entry 1, whose weight is the bias.
        precision: of the products.

    Returns:
        ``[9 C + ones, 9 C + ones]`` in float32, in the order of ``weight.flatten(1)``.
    """
    check_inputs(inputs, 4, precision)
    inputs, precision = suited(inputs, precision)
    strides = inputs.stride()
    cut = _cut(inputs.shape, strides, dilation, ones, inputs.device)
    if cut.rows == 0 or cut.features == 0:
        return inputs.new_zeros((cut.features, cut.features), dtype=torch.float32)
    return _lag_moment(inputs, strides, cut, dilation, ones, precision)


@dataclass(frozen=True)
class Tiling:
    """How the work is cut up; a simple rule instead of a search at run time."""

    lagged: int  # pairs of lag and channel in a tile
    channels: int  # channels in a tile
    depth: int  # pixels at a time
    warps: int
    stages: int
    programs: int = 3  # to a multiprocessor, so that they hide each other's waiting


def tiling(channels: int, channels_last: bool) -> Tiling:
    """The tiling for so many channels; where pixels have to be read one by one, their addresses need more registers."""
    width = min(64, max(16, triton.next_power_of_2(channels)))
    return Tiling(lagged=128, channels=width, depth=32, warps=4 if channels_last else 8, stages=3)


class Cut(NamedTuple):
    """All that a launch needs to know but the inputs' address; worked out once for every shape."""

    plan: Tiling
    features: int
    rows: int
    tiles: int
    share: int  # pixels in a split
    splits: int
    border_splits: int
    part: int
    wide: bool


@lru_cache(maxsize=1024)
def _cut(
    shape: tuple[int, ...], strides: tuple[int, ...], dilation: tuple[int, int], ones: bool, device: torch.device
) -> Cut:
    images, channels, height, width = shape
    rows = geometry_of(shape, (3, 3), (1, 1), dilation, dilation).rows
    plan = tiling(channels, strides[1] == 1)
    tiles = max(1, -(-(LAGS * channels + ones) // plan.lagged) * -(-channels // plan.channels))
    border = images * max(min(dilation[0], height) * width, min(dilation[1], width) * height)  # the longest one
    most_jobs = -(-rows // (4 * plan.depth))  # with less to do, adding up would cost more
    jobs = max(1, min(most_jobs, plan.programs * multiprocessors(device) // tiles))
    share = max(1, -(-(rows + 4 * border) // (jobs * plan.depth))) * plan.depth
    splits, border_splits = -(-rows // share), -(-border // share)
    part = part_of(plan.lagged * plan.channels, device)
    wide = needs_wide_offsets(shape, strides)
    return Cut(plan, 9 * channels + ones, rows, tiles, share, splits, border_splits, part, wide)


def _lag_moment(
    inputs: Tensor, strides: tuple[int, ...], cut: Cut, dilation: tuple[int, int], ones: bool, precision: Precision
) -> Tensor:
    images, channels, height, width = inputs.shape
    plan = cut.plan
    tile = plan.lagged * plan.channels
    programs = cut.tiles * (cut.splits + BORDERS * cut.border_splits)
    partial = torch.empty(programs * tile, dtype=torch.float32, device=inputs.device)
    moment = torch.empty((cut.features, cut.features), dtype=torch.float32, device=inputs.device)
    with device_guard(inputs.device):
        _multiply_lags[(programs,)](
            inputs,
            partial,
            *strides,
            images,
            height,
            width,
            cut.share,
            cut.splits,
            cut.border_splits,
            CHANNELS=channels,
            DILATION=dilation,
            ONES=ones,
            WIDE=cut.wide,
            PRECISION=precision,
            LAGS=LAGS,
            LAGGED=plan.lagged,
            WIDTH=plan.channels,
            DEPTH=plan.depth,
            num_warps=plan.warps,
            num_stages=plan.stages,
        )
        _put_together[(cut.tiles, tile // cut.part)](
            partial,
            moment,
            cut.rows,
            cut.splits,
            cut.border_splits,
            CHANNELS=channels,
            ONES=ones,
            LAGS=LAGS,
            BORDERS=BORDERS,
            LAGGED=plan.lagged,
            WIDTH=plan.channels,
            PART=cut.part,
            SPLITS=64,
            num_warps=4,
        )
    return moment


@triton.jit(do_not_specialize=["images", "share", "splits", "border_splits"])
def _multiply_lags(
    inputs,
    partial,
    image_stride,
    channel_stride,
    row_stride,
    column_stride,
    images,
    height,
    width,
    share,
    splits,
    border_splits,
    CHANNELS: tl.constexpr,
    DILATION: tl.constexpr,
    ONES: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    LAGS: tl.constexpr,
    LAGGED: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """``Σ x[c', q + lag] x[c, q]`` of a tile of ``(lag, c')`` and ``c``, over one share of the pixels or of a border.

    Neighbouring programs read the same pixels.
    """
    ACROSS: tl.constexpr = (CHANNELS + WIDTH - 1) // WIDTH
    TILES: tl.constexpr = ((LAGS * CHANNELS + ONES + LAGGED - 1) // LAGGED) * ACROSS
    program = tl.program_id(0)
    tile = program % TILES
    job = program // TILES
    border_job = tl.maximum(job - splits, 0)
    region = tl.where(job < splits, 0, 1 + border_job // border_splits)
    split = tl.where(job < splits, job, border_job % border_splits)
    row_region = region // 3  # 0: all rows, 1: the last ones, which tap 0 does not see, 2: the first, unseen by tap 2
    column_region = region % 3

    lagged = (tile // ACROSS) * LAGGED + tl.arange(0, LAGGED)
    channel = (tile % ACROSS) * WIDTH + tl.arange(0, WIDTH)
    lag = lagged // CHANNELS
    lag_y, lag_x = lag_of(lag, LAGS)
    wanted = (
        ((row_region == 0) | (lag_y == 0)) & ((column_region == 0) | (lag_x == 0)) & (lagged < LAGS * CHANNELS + ONES)
    )
    if tl.sum(wanted.to(tl.int32), 0) > 0:
        rows = tl.where(row_region == 0, height, tl.minimum(height, DILATION[0]))
        columns = tl.where(column_region == 0, width, tl.minimum(width, DILATION[1]))
        first_row = tl.where(row_region == 1, height - rows, 0)
        first_column = tl.where(column_region == 1, width - columns, 0)

        constant = lagged == LAGS * CHANNELS
        above = tl.where(lag < LAGS, lag_y * DILATION[0], nowhere())
        across = lag_x * DILATION[1]
        offsets = (lagged % CHANNELS) * channel_stride + lag_y * DILATION[0] * row_stride + across * column_stride
        here = channel * channel_stride
        here_above = tl.where(channel < CHANNELS, 0, nowhere())

        start = split * share
        stop = tl.minimum(start + share, images * rows * columns)
        place = start + tl.arange(0, DEPTH)
        image, y, x = image_place(place, rows, columns)
        images_on, y_on, x_on = image_place(DEPTH, rows, columns)
        product = tl.zeros((LAGGED, WIDTH), tl.float32)
        for _ in range(start, stop, DEPTH):
            valid = place < stop
            top = tl.where(valid, first_row + y, nowhere())
            left = first_column + x
            pixels = pixel_offsets(image, top, left, image_stride, row_stride, column_stride, WIDE)
            strip = gather(
                inputs,
                pixels[None, :],
                top[None, :],
                left[None, :],
                offsets[:, None],
                above[:, None],
                across[:, None],
                height,
                width,
            )
            if ONES:
                strip = tl.where(constant[:, None] & valid[None, :], 1.0, strip)
            other = tl.load(
                inputs + (pixels[:, None] + here[None, :]), mask=(top[:, None] + here_above[None, :]) >= 0, other=0.0
            )
            product = accumulate(strip, other, product, PRECISION)
            place += DEPTH
            image, y, x = carry_over(image + images_on, y + y_on, x + x_on, rows, columns)

        target = partial + program.to(tl.int64) * (LAGGED * WIDTH)
        tl.store(target + tl.arange(0, LAGGED)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :], product)


@triton.jit
def lag_of(lag, LAGS: tl.constexpr):
    """Rows and columns of the given lag; of the constant 1, which is counted after the lags, none."""
    shifted = tl.where(lag < LAGS, lag + 2, 2)
    return shifted // 5, shifted % 5 - 2


@triton.jit(do_not_specialize=["rows", "splits", "border_splits"])
def _put_together(
    partial,
    moment,
    rows,
    splits,
    border_splits,
    CHANNELS: tl.constexpr,
    ONES: tl.constexpr,
    LAGS: tl.constexpr,
    BORDERS: tl.constexpr,
    LAGGED: tl.constexpr,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """A part of one tile: the sums over its splits, written to all pairs of taps that have this lag, and mirrored."""
    ACROSS: tl.constexpr = (CHANNELS + WIDTH - 1) // WIDTH
    TILES: tl.constexpr = ((LAGS * CHANNELS + ONES + LAGGED - 1) // LAGGED) * ACROSS
    FEATURES: tl.constexpr = 9 * CHANNELS + ONES
    tile = tl.program_id(0)
    elements = tl.program_id(1) * PART + tl.arange(0, PART)
    lagged = (tile // ACROSS) * LAGGED + elements // WIDTH
    channel = (tile % ACROSS) * WIDTH + elements % WIDTH
    lag = lagged // CHANNELS
    lag_y, lag_x = lag_of(lag, LAGS)
    real = (lagged < LAGS * CHANNELS + ONES) & (channel < CHANNELS)
    constant = lagged == LAGS * CHANNELS

    step = TILES * LAGGED * WIDTH
    first = partial + tile.to(tl.int64) * (LAGGED * WIDTH) + elements
    everything = sum_splits(first, real, splits, step, PART, SPLITS)
    borders = first + splits.to(tl.int64) * step
    last_column = tl.zeros((PART,), tl.float32)
    first_column = tl.zeros((PART,), tl.float32)
    last_row = tl.zeros((PART,), tl.float32)
    first_row = tl.zeros((PART,), tl.float32)
    last_last = tl.zeros((PART,), tl.float32)  # row and column
    last_first = tl.zeros((PART,), tl.float32)
    first_last = tl.zeros((PART,), tl.float32)
    first_first = tl.zeros((PART,), tl.float32)
    for start in range(0, border_splits * BORDERS, SPLITS):
        job = start + tl.arange(0, SPLITS)
        region = (1 + job // border_splits)[:, None]
        computed = ((region < 3) | (lag_y == 0)[None, :]) & ((region % 3 == 0) | (lag_x == 0)[None, :]) & real[None, :]
        places = borders[None, :] + job.to(tl.int64)[:, None] * step
        values = tl.load(places, mask=computed & (region <= BORDERS), other=0.0)
        last_column += tl.sum(tl.where(region == 1, values, 0.0), 0)
        first_column += tl.sum(tl.where(region == 2, values, 0.0), 0)
        last_row += tl.sum(tl.where(region == 3, values, 0.0), 0)
        last_last += tl.sum(tl.where(region == 4, values, 0.0), 0)
        last_first += tl.sum(tl.where(region == 5, values, 0.0), 0)
        first_row += tl.sum(tl.where(region == 6, values, 0.0), 0)
        first_last += tl.sum(tl.where(region == 7, values, 0.0), 0)
        first_first += tl.sum(tl.where(region == 8, values, 0.0), 0)
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
            other_channel = lagged % CHANNELS
            feature = channel * 9 + (row_tap * 3 + column_tap)
            other = tl.where(constant, 9 * CHANNELS, other_channel * 9 + other_row * 3 + other_column)
            wanted = real & (other_row < 3) & (other_column >= 0) & (other_column < 3)
            wanted &= (lag > 0) | (channel <= other_channel)  # lag 0 has every value twice: one, so that they are equal
            tl.store(moment + feature.to(tl.int64) * FEATURES + other, value, mask=wanted)
            tl.store(moment + other.to(tl.int64) * FEATURES + feature, value, mask=wanted)
    if ONES:
        is_first = tl.program_id(0) + tl.program_id(1) == 0
        tl.store(moment + (FEATURES * FEATURES - 1), rows.to(tl.float32), mask=is_first)
