# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""A layer's second moment ``Σ x xᵀ`` straight from its input: the patches of a convolution are never written down.

The D × D result is cut into square tiles, of which those on and below the diagonal are computed. A tile is the product
of two strips of the patch matrix, which are gathered from the image on the fly; the rows (images × positions) are split
among programs until the device is full. A second launch adds up the splits, in a fixed order: the result is the same
bit for bit every time. It also mirrors the tiles and brings the features into the weight's order.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from consequent.engines.gpu.kernels.launch import launch
from consequent.engines.gpu.kernels.table import device_guard

__all__ = ["Precision", "patch_moment"]

Precision = Literal["tf32", "tf32x3", "ieee"]
PRECISIONS = ("tf32", "tf32x3", "ieee")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

SPLITS_AT_ONCE = 64  # that a program adds up

_MOST_ROWS = 2**31 - 2**17  # positions are counted in 32 bits, and counted a little past their end


def patch_moment(
    inputs: Tensor,
    kernel_size: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    *,
    ones: bool,
    precision: Precision = "tf32",
) -> Tensor:
    """``Σ x xᵀ`` over the patches ``x`` that a two-dimensional convolution of one group sees, zeros around the image.

    Never waits for the device, and may be captured in a CUDA graph.

    Args:
        inputs: ``[N, C, H, W]`` with any strides, float32, bfloat16 or float16.
        kernel_size: of the convolution, ``(height, width)``; likewise the following three.
        stride: its steps.
        padding: rows and columns of zeros on each side.
        dilation: pixels from one tap of the kernel to the next.
        ones: whether every patch gets a last entry 1, whose weight is the bias.
        precision: of the products of float32 numbers: rounded to ``"tf32"``, made of three TF32 products (``"tf32x3"``,
            nearly float32), or ``"ieee"`` float32, which is slow. Sums are always float32.

    Returns:
        ``[D + ones, D + ones]`` in float32, ``D = C · height · width`` in the order of ``weight.flatten(1)``.

    Raises:
        ValueError: for shapes that do not fit, an unknown precision, or more than 2³¹ positions.
        TypeError: for another dtype.
    """
    check_inputs(inputs, 4, precision)
    return _moment(inputs, kernel_size, stride, padding, dilation, ones, precision)


def check_inputs(inputs: Tensor, ndim: int, precision: str) -> None:
    if inputs.dtype not in DTYPES:
        raise TypeError(f"the inputs must be float32, bfloat16 or float16, got {inputs.dtype}; convert them")
    if inputs.ndim != ndim:
        raise ValueError(f"the inputs must have {ndim} dimensions, got shape {list(inputs.shape)}")
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")


class Geometry(NamedTuple):
    """What a convolution does to images of one shape."""

    channels: int
    height: int
    width: int
    kernel: tuple[int, ...]  # height, width, steps (2), padding (2), dilation (2)
    out_height: int
    out_width: int
    features: int
    rows: int


def geometry_of(
    shape: tuple[int, ...],
    kernel_size: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
) -> Geometry:
    """The geometry, checked."""
    count, channels, height, width = shape
    (ky, kx), (sy, sx), (py, px), (dy, dx) = kernel_size, stride, padding, dilation
    if min(ky, kx, sy, sx, dy, dx) < 1 or min(py, px) < 0:
        raise ValueError(
            f"no such convolution: kernel_size={kernel_size}, stride={stride}, padding={padding}, dilation={dilation}"
        )
    spans = height + 2 * py - dy * (ky - 1), width + 2 * px - dx * (kx - 1)
    if min(spans) < 1:
        raise ValueError(
            f"a kernel of {kernel_size} with dilation {dilation} does not fit into {height}×{width} pixels"
        )
    out_height, out_width = (spans[0] - 1) // sy + 1, (spans[1] - 1) // sx + 1
    rows = count * out_height * out_width
    if rows > _MOST_ROWS:
        raise ValueError(
            f"{rows} positions are more than can be counted in 32 bits; split the batch and add the moments"
        )
    kernel = (ky, kx, sy, sx, py, px, dy, dx)
    return Geometry(channels, height, width, kernel, out_height, out_width, channels * ky * kx, rows)


@dataclass(frozen=True)
class Tiling:
    """How the work is cut up; a simple rule instead of a search at run time."""

    block: int  # features in a tile, each way
    depth: int  # rows at a time
    warps: int
    stages: int
    programs: int = 3  # to a multiprocessor, so that they hide each other's waiting


def tiling(features: int) -> Tiling:
    """The tiling for so many features: one tile if they fit, large tiles only where that wastes little of them."""
    if features <= 32:
        return Tiling(block=32, depth=64, warps=4, stages=3)
    if features <= 320:
        return Tiling(block=64, depth=32, warps=4, stages=3)
    return Tiling(block=128, depth=32, warps=8, stages=3)


def multiprocessors(device: torch.device) -> int:
    """How many programs run side by side, at least; the interpreter has but one."""
    return _multiprocessors(device.index or 0) if device.type == "cuda" else 1


@lru_cache
def _multiprocessors(index: int) -> int:
    count: int = torch.cuda.get_device_properties(index).multi_processor_count
    return count


def part_of(tile: int, device: torch.device) -> int:
    """Elements of a tile that one program adds up: few, since all wait for the memory; the interpreter has but one."""
    return 64 if device.type == "cuda" else tile


def needs_wide_offsets(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether the last element is farther from the first than 32 bits can say."""
    return sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) >= 2**31


def suited(inputs: Tensor, precision: Precision) -> tuple[Tensor, Precision]:
    """The inputs and the precision as the kernels want them."""
    if inputs.device.type != "cuda" and inputs.dtype == torch.bfloat16:
        return inputs.float(), "ieee"  # the interpreter is made of NumPy, which has no bfloat16
    if inputs.dtype != torch.float32:
        return inputs, "ieee"  # they are multiplied as they are: one kernel for all precisions
    return inputs, precision


class Cut(NamedTuple):
    """All that a launch needs to know but the inputs' address; worked out once for every shape."""

    geometry: Geometry
    plan: Tiling
    features: int
    blocks: int
    tiles: int
    splits: int
    share: int  # rows in a split
    part: int
    wide: bool


@lru_cache(maxsize=1024)
def _cut(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    kernel_size: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    ones: bool,
    device: torch.device,
) -> Cut:
    geometry = geometry_of(shape, kernel_size, stride, padding, dilation)
    features = geometry.features + ones
    plan = tiling(features)
    blocks = -(-features // plan.block)
    tiles = max(1, blocks * (blocks + 1) // 2)
    most_splits = -(-geometry.rows // (4 * plan.depth))  # with less to do, adding up would cost more
    splits = max(1, min(most_splits, plan.programs * multiprocessors(device) // tiles))
    share = max(1, -(-geometry.rows // (splits * plan.depth))) * plan.depth
    splits = -(-geometry.rows // share)
    part = part_of(plan.block**2, device)
    return Cut(geometry, plan, features, blocks, tiles, splits, share, part, needs_wide_offsets(shape, strides))


def _moment(
    inputs: Tensor,
    kernel_size: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    ones: bool,
    precision: Precision,
) -> Tensor:
    inputs, precision = suited(inputs, precision)
    strides = inputs.stride()
    cut = _cut(inputs.shape, strides, kernel_size, stride, padding, dilation, ones, inputs.device)
    geometry, plan, features = cut.geometry, cut.plan, cut.features
    if geometry.rows == 0 or features == 0:
        return inputs.new_zeros((features, features), dtype=torch.float32)
    channels_first = strides[1] > strides[3]
    partial = torch.empty(cut.splits * cut.tiles * plan.block**2, dtype=torch.float32, device=inputs.device)
    moment = torch.empty((features, features), dtype=torch.float32, device=inputs.device)
    with device_guard(inputs.device):
        launch(
            _multiply_strips,
            (cut.tiles * cut.splits,),
            (
                *(inputs, partial, *strides, geometry.height, geometry.width, geometry.out_height, geometry.out_width),
                *(geometry.channels, geometry.rows, cut.share, cut.tiles),
            ),
            (
                *(geometry.kernel, ones, channels_first, cut.wide, precision),
                *(cut.blocks == 1, plan.block, plan.depth),
            ),
            num_warps=plan.warps,
            num_stages=plan.stages,
        )
        taps = 1 if channels_first else geometry.kernel[0] * geometry.kernel[1]
        launch(
            _add_splits,
            (cut.tiles, plan.block**2 // cut.part),
            (partial, moment, features, cut.splits, cut.tiles, geometry.channels, taps),
            (plan.block, cut.part, SPLITS_AT_ONCE),
            num_warps=4,
        )
    return moment


@triton.jit(
    do_not_specialize=["rows", "share", "tiles"],
    do_not_specialize_on_alignment=["height", "width", "out_height", "out_width"],
)
def _multiply_strips(
    inputs,
    partial,
    image_stride,
    channel_stride,
    row_stride,
    column_stride,
    height,
    width,
    out_height,
    out_width,
    channels,
    rows,
    share,
    tiles,
    KERNEL: tl.constexpr,
    ONES: tl.constexpr,
    CHANNELS_FIRST: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    SINGLE: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """One tile, over one share of the rows. Neighbouring programs read the same rows."""
    program = tl.program_id(0)
    tile = program % tiles
    split = program // tiles
    i, j = triangle_place(tile)
    within = tl.arange(0, BLOCK)
    above, across, offsets, constant = _feature_places(
        i * BLOCK + within, channel_stride, row_stride, column_stride, channels, KERNEL, CHANNELS_FIRST
    )
    other_above, other_across, other_offsets, other_constant = _feature_places(
        j * BLOCK + within, channel_stride, row_stride, column_stride, channels, KERNEL, CHANNELS_FIRST
    )

    start = split * share
    stop = tl.minimum(start + share, rows)
    place = start + tl.arange(0, DEPTH)
    image, y, x = image_place(place, out_height, out_width)
    images_on, y_on, x_on = image_place(DEPTH, out_height, out_width)
    product = tl.zeros((BLOCK, BLOCK), tl.float32)
    for _ in range(start, stop, DEPTH):
        valid = place < stop
        top = tl.where(valid, y * KERNEL[2] - KERNEL[4], nowhere())
        left = x * KERNEL[3] - KERNEL[5]
        corners = pixel_offsets(image, top, left, image_stride, row_stride, column_stride, WIDE)

        strip = gather(
            inputs,
            corners[None, :],
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
        if SINGLE:
            other = tl.trans(strip)
        else:
            other = gather(
                inputs,
                corners[:, None],
                top[:, None],
                left[:, None],
                other_offsets[None, :],
                other_above[None, :],
                other_across[None, :],
                height,
                width,
            )
            if ONES:
                other = tl.where(other_constant[None, :] & valid[:, None], 1.0, other)
        product = accumulate(strip, other, product, PRECISION)
        place += DEPTH
        image, y, x = carry_over(image + images_on, y + y_on, x + x_on, out_height, out_width)

    target = partial + program.to(tl.int64) * (BLOCK * BLOCK)
    tl.store(target + within[:, None] * BLOCK + within[None, :], product)


@triton.jit
def nowhere():
    """A row above every image, however far the kernel reaches."""
    return -(1 << 30)


@triton.jit
def _feature_places(
    features,
    channel_stride,
    row_stride,
    column_stride,
    channels,
    KERNEL: tl.constexpr,
    CHANNELS_FIRST: tl.constexpr,
):
    """Where the features of a patch lie: rows below and columns right of its corner, elements from there; which is 1.

    Neighbouring features are neighbours in memory: of channels-last images the channel varies fastest, not the tap.
    """
    TAPS: tl.constexpr = KERNEL[0] * KERNEL[1]
    if CHANNELS_FIRST:
        channel = features // TAPS
        tap = features % TAPS
    else:
        channel = features % channels
        tap = features // channels
    above = (tap // KERNEL[1]) * KERNEL[6]
    across = (tap % KERNEL[1]) * KERNEL[7]
    offsets = channel * channel_stride + above * row_stride + across * column_stride
    real = features < channels * TAPS
    return tl.where(real, above, nowhere()), across, offsets, features == channels * TAPS


@triton.jit
def image_place(place, height, width):
    """Which image, row and column a position counted through all images is."""
    area = height * width
    image = place // area
    rest = place - image * area
    y = rest // width
    return image, y, rest - y * width


@triton.jit
def carry_over(image, y, x, height, width):
    """A place again, after steps in each direction that may lead beyond an edge once."""
    beyond = x >= width
    x = tl.where(beyond, x - width, x)
    y += beyond.to(tl.int32)
    beyond = y >= height
    y = tl.where(beyond, y - height, y)
    return image + beyond.to(tl.int32), y, x


@triton.jit
def pixel_offsets(image, y, x, image_stride, row_stride, column_stride, WIDE: tl.constexpr):
    """Elements from the first to the given pixels; those that are outside of the image are not to be read."""
    if WIDE:
        image = image.to(tl.int64)
        y = y.to(tl.int64)
        x = x.to(tl.int64)
    return image * image_stride + y * row_stride + x * column_stride


@triton.jit
def gather(inputs, corners, top, left, offsets, above, across, height, width):
    """The pixels ``above`` rows and ``across`` columns from the corners; zeros outside of the image."""
    # As unsigned numbers, negative ones are large: one comparison for both sides.
    inside = (top + above).to(tl.uint32, bitcast=True) < height
    inside &= (left + across).to(tl.uint32, bitcast=True) < width
    return tl.load(inputs + (corners + offsets), mask=inside, other=0.0)


@triton.jit
def accumulate(left, right, product, PRECISION: tl.constexpr):
    """``product + left @ right``."""
    if PRECISION == "tf32" and left.dtype == tl.float32:
        result = tl.dot(nearest_tf32(left), nearest_tf32(right), product, input_precision="tf32")
    else:
        result = tl.dot(left, right, product, input_precision=PRECISION)
    return result


@triton.jit
def nearest_tf32(values):
    """Rounded to TF32. Tensor cores would cut the digits off, which makes every sum of squares too small."""
    bits = values.to(tl.int32, bitcast=True)
    rounded = ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(values) < float("inf"), rounded, values)


@triton.jit
def triangle_place(number):
    """Row and column of a tile, when those on and below the diagonal are counted row by row."""
    row = ((tl.sqrt(8.0 * number + 1.0) - 1.0) * 0.5).to(tl.int32)
    row -= (row * (row + 1) // 2 > number).to(tl.int32)  # the square root was rounded
    row += ((row + 1) * (row + 2) // 2 <= number).to(tl.int32)
    return row, number - row * (row + 1) // 2


@triton.jit(do_not_specialize=["features", "splits", "tiles", "channels", "taps"])
def _add_splits(
    partial,
    moment,
    features,
    splits,
    tiles,
    channels,
    taps,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """A part of one tile: the sum of its splits, written to both triangles."""
    tile = tl.program_id(0)
    elements = tl.program_id(1) * PART + tl.arange(0, PART)
    total = sum_splits(
        partial + tile.to(tl.int64) * (BLOCK * BLOCK) + elements,
        elements >= 0,
        splits,
        tiles * (BLOCK * BLOCK),
        PART,
        SPLITS,
    )
    i, j = triangle_place(tile)
    row = i * BLOCK + elements // BLOCK
    column = j * BLOCK + elements % BLOCK
    wanted = (row < features) & (column <= row)  # on the diagonal: one of two equal halves, so that they are equal
    row = _weight_order(row, channels, taps)
    column = _weight_order(column, channels, taps)
    tl.store(moment + row.to(tl.int64) * features + column, total, mask=wanted)
    tl.store(moment + column.to(tl.int64) * features + row, total, mask=wanted)


@triton.jit
def sum_splits(first, wanted, splits, step, PART: tl.constexpr, SPLITS: tl.constexpr):
    """The sum of ``splits`` numbers that lie ``step`` apart from the ``first`` ones, always in the same order."""
    total = tl.zeros((PART,), tl.float32)
    for start in range(0, splits, SPLITS):
        split = start + tl.arange(0, SPLITS)
        places = first[None, :] + split.to(tl.int64)[:, None] * step
        total += tl.sum(tl.load(places, mask=(split < splits)[:, None] & wanted[None, :], other=0.0), 0)
    return total


@triton.jit
def _weight_order(feature, channels, taps):
    """From (tap, channel) to (channel, tap), if there are several taps; the constant 1 stays last."""
    moved = (feature % channels) * taps + feature // channels
    return tl.where((feature < channels * taps) & (taps > 1), moved, feature)
