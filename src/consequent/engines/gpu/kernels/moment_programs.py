# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""What the programs do that compute a second moment from the layer's input: tiles of products, and their sums."""

import triton
import triton.language as tl


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
    i, j = _triangle_place(tile)
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
    image, y, x = _image_place(place, out_height, out_width)
    images_on, y_on, x_on = _image_place(DEPTH, out_height, out_width)
    product = tl.zeros((BLOCK, BLOCK), tl.float32)
    for _ in range(start, stop, DEPTH):
        valid = place < stop
        top = tl.where(valid, y * KERNEL[2] - KERNEL[4], _nowhere())
        left = x * KERNEL[3] - KERNEL[5]
        corners = _pixel_offsets(image, top, left, image_stride, row_stride, column_stride, WIDE)

        strip = _gather(
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
            other = _gather(
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
        product = _accumulate(strip, other, product, PRECISION)
        place += DEPTH
        image, y, x = _carry_over(image + images_on, y + y_on, x + x_on, out_height, out_width)

    target = partial + program.to(tl.int64) * (BLOCK * BLOCK)
    tl.store(target + within[:, None] * BLOCK + within[None, :], product)


@triton.jit
def _nowhere():
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
    return tl.where(real, above, _nowhere()), across, offsets, features == channels * TAPS


@triton.jit
def _image_place(place, height, width):
    """Which image, row and column a position counted through all images is."""
    area = height * width
    image = place // area
    rest = place - image * area
    y = rest // width
    return image, y, rest - y * width


@triton.jit
def _carry_over(image, y, x, height, width):
    """A place again, after steps in each direction that may lead beyond an edge once."""
    beyond = x >= width
    x = tl.where(beyond, x - width, x)
    y += beyond.to(tl.int32)
    beyond = y >= height
    y = tl.where(beyond, y - height, y)
    return image + beyond.to(tl.int32), y, x


@triton.jit
def _pixel_offsets(image, y, x, image_stride, row_stride, column_stride, WIDE: tl.constexpr):
    """Elements from the first to the given pixels; those that are outside of the image are not to be read."""
    if WIDE:
        image = image.to(tl.int64)
        y = y.to(tl.int64)
        x = x.to(tl.int64)
    return image * image_stride + y * row_stride + x * column_stride


@triton.jit
def _gather(inputs, corners, top, left, offsets, above, across, height, width):
    """The pixels ``above`` rows and ``across`` columns from the corners; zeros outside of the image."""
    # As unsigned numbers, negative ones are large: one comparison for both sides.
    inside = (top + above).to(tl.uint32, bitcast=True) < height
    inside &= (left + across).to(tl.uint32, bitcast=True) < width
    return tl.load(inputs + (corners + offsets), mask=inside, other=0.0)


@triton.jit
def _accumulate(left, right, product, PRECISION: tl.constexpr):
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
def _triangle_place(number):
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
    """A part of one tile: the sum of its splits, always in the same order, written to both triangles."""
    tile = tl.program_id(0)
    elements = tl.program_id(1) * PART + tl.arange(0, PART)
    first = partial + tile.to(tl.int64) * (BLOCK * BLOCK) + elements
    total = tl.zeros((PART,), tl.float32)
    for start in range(0, splits, SPLITS):
        split = start + tl.arange(0, SPLITS)
        places = first[None, :] + split.to(tl.int64)[:, None] * (tiles * (BLOCK * BLOCK))
        wanted = (split < splits)[:, None] & (elements >= 0)[None, :]
        total += tl.sum(tl.load(places, mask=wanted, other=0.0), 0)
    i, j = _triangle_place(tile)
    row = i * BLOCK + elements // BLOCK
    column = j * BLOCK + elements % BLOCK
    lower = (row < features) & (column <= row)  # on the diagonal: one of two equal halves, so that they are equal
    row = _weight_order(row, channels, taps)
    column = _weight_order(column, channels, taps)
    tl.store(moment + row.to(tl.int64) * features + column, total, mask=lower)
    tl.store(moment + column.to(tl.int64) * features + row, total, mask=lower)


@triton.jit
def _weight_order(feature, channels, taps):
    """From (tap, channel) to (channel, tap), if there are several taps; the constant 1 stays last."""
    moved = (feature % channels) * taps + feature // channels
    return tl.where((feature < channels * taps) & (taps > 1), moved, feature)
