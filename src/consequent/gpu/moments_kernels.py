# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The two launches of :mod:`consequent.gpu.moments`: tiles of second moments, part by part, and their sums."""

import triton
import triton.language as tl

# The entries of a problem in its tables.
INPUTS, MOMENT, SUMS = (tl.constexpr(place) for place in range(3))
ADDRESSES = tl.constexpr(3)
CHANNELS, HEIGHT, WIDTH, POSITIONS, FIRST_POSITION, TAPS, TAPS_ACROSS, APART_Y, APART_X = (
    tl.constexpr(place) for place in range(9)
)
PER_IMAGE, PER_CHANNEL, PER_LINE, PER_PIXEL = (tl.constexpr(place) for place in range(9, 13))
SIZES = tl.constexpr(13)
OFFSET = tl.constexpr(2**14)  # which coordinates have, as some are below zero


@triton.jit
def _feature(size, number):
    """Channel and tap of features. They are counted as they lie in memory, so that a warp reads what lies together."""
    channels, taps = tl.load(size + CHANNELS), tl.load(size + TAPS)
    if tl.load(size + PER_CHANNEL) == 1:
        channel, tap = number % channels, number // channels
    else:
        channel, tap = number // taps, number % taps
    return channel, tap


@triton.jit
def _columns(size, first, TILE: tl.constexpr):
    """Of features: their offsets in memory and those of their taps in the image; and which there are."""
    channel, tap = _feature(size, first + tl.arange(0, TILE))
    across = tl.load(size + TAPS_ACROSS)
    y, x = tap // across * tl.load(size + APART_Y), tap % across * tl.load(size + APART_X)
    place = channel * tl.load(size + PER_CHANNEL) + y * tl.load(size + PER_LINE) + x * tl.load(size + PER_PIXEL)
    return place, y, x, (channel < tl.load(size + CHANNELS)) & (tap < tl.load(size + TAPS))


@triton.jit
def _patches(inputs, place, y, x, is_row, columns, column_y, column_x, is_column, height, width):
    """Rows and columns of the patch matrix; zeros outside of the image."""
    at_y, at_x = y[:, None] + column_y[None, :], x[:, None] + column_x[None, :]
    inside = (at_y >= 0) & (at_y < height) & (at_x >= 0) & (at_x < width)
    return tl.load(
        inputs + place[:, None] + columns[None, :], mask=inside & is_row[:, None] & is_column[None, :], other=0.0
    )


@triton.jit
def parts(
    addresses,
    sizes,
    positions,
    programs,
    scratch,
    KIND: tl.constexpr,
    PRECISION: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``Σ x xᵀ`` of a tile on or below the diagonal, and of one on it ``Σ x``, over some of the rows."""
    program = programs + 5 * tl.program_id(0)
    problem, first, second = tl.load(program), tl.load(program + 1), tl.load(program + 2)
    start, stop = tl.load(program + 3), tl.load(program + 4)
    size = sizes + problem * SIZES
    inputs = tl.load(addresses + problem * ADDRESSES + INPUTS).to(tl.pointer_type(KIND))
    left, left_y, left_x, is_left = _columns(size, first, TILE)
    right, right_y, right_x, is_right = _columns(size, second, TILE)
    height, width = tl.load(size + HEIGHT), tl.load(size + WIDTH)
    rows = positions + tl.load(size + FIRST_POSITION)
    per_image, count = tl.load(size + PER_IMAGE), tl.load(size + POSITIONS)
    per_line, per_pixel = tl.load(size + PER_LINE), tl.load(size + PER_PIXEL)
    total = tl.zeros((TILE, TILE), tl.float32)
    sums = tl.zeros((TILE,), tl.float32)
    for begin in range(start, stop, BLOCK):
        row = begin + tl.arange(0, BLOCK)
        is_row = row < stop
        image = row // count
        position = tl.load(rows + row - image * count, mask=is_row, other=0)
        y, x = (position >> 16) - OFFSET, (position & 0xFFFF) - OFFSET
        place = image * per_image + y * per_line + x * per_pixel
        a = _patches(inputs, place, y, x, is_row, left, left_y, left_x, is_left, height, width)
        b = _patches(inputs, place, y, x, is_row, right, right_y, right_x, is_right, height, width)
        total = tl.dot(tl.trans(a), b, total, input_precision=PRECISION)
        if first == second:
            sums += tl.sum(a.to(tl.float32), 0)
    out = scratch + tl.program_id(0).to(tl.int64) * (TILE + 1) * TILE
    within = tl.arange(0, TILE)
    tl.store(out + within[:, None] * TILE + within[None, :], total)
    tl.store(out + TILE * TILE + within, sums)


@triton.jit
def combine(addresses, sizes, tiles, scratch, TILE: tl.constexpr):
    """A tile's parts, added to the moment, and above the diagonal the same once more."""
    tile = tiles + 5 * tl.program_id(0)
    problem, first, second = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    begin, count = tl.load(tile + 3).to(tl.int64), tl.load(tile + 4)
    size = sizes + problem * SIZES
    taps = tl.load(size + TAPS)
    width = tl.load(size + CHANNELS) * taps
    within = tl.arange(0, TILE)
    total = tl.zeros((TILE, TILE), tl.float32)
    sums = tl.zeros((TILE,), tl.float32)
    for part in range(count):
        source = scratch + (begin + part) * (TILE + 1) * TILE
        total += tl.load(source + within[:, None] * TILE + within[None, :])
        sums += tl.load(source + TILE * TILE + within)
    channel, tap = _feature(size, first + within)
    is_row = first + within < width
    rows = channel * taps + tap
    channel, tap = _feature(size, second + within)
    inside = is_row[:, None] & (second + within < width)[None, :]
    columns = channel * taps + tap
    moment = tl.load(addresses + problem * ADDRESSES + MOMENT).to(tl.pointer_type(tl.float32))
    place = moment + rows[:, None] * width + columns[None, :]
    tl.store(place, tl.load(place, mask=inside, other=0.0) + total, mask=inside)
    if first == second:
        known = tl.load(addresses + problem * ADDRESSES + SUMS).to(tl.pointer_type(tl.float32)) + rows
        tl.store(known, tl.load(known, mask=is_row, other=0.0) + sums, mask=is_row)
    else:
        mirrored = moment + columns[None, :] * width + rows[:, None]
        tl.store(mirrored, tl.load(mirrored, mask=inside, other=0.0) + total, mask=inside)
