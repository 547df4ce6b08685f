# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The two launches of :mod:`consequent.gpu.multiply`: products of all layers, then shortening and writing."""

import triton
import triton.language as tl

# The entries of a problem in its table: addresses, sizes, whether it has a bias, where its products and tiles begin.
INVERSE, SHIFT, UNIT, TRACE, ROWS, COLUMNS, TAPS, HAS_BIAS, START, FIRST_TILE, TILES, FIRST_BLOCK, BLOCKS = (
    tl.constexpr(place) for place in range(13)
)
FIELDS = tl.constexpr(13)


@triton.jit
def _address(entry, SIMPLE: tl.constexpr):
    pointer = tl.load(entry).to(tl.pointer_type(tl.float32))
    return tl.multiple_of(pointer, 16) if SIMPLE else pointer


@triton.jit
def _column_offsets(columns, size, taps, SIMPLE: tl.constexpr):
    """Where columns of a gradient lie in memory: in their order, or those of a tap together (channels last)."""
    return columns if SIMPLE else (columns % taps) * (size // taps) + columns // taps


@triton.jit
def products(
    gradients,
    problems,
    tiles,
    scratch,
    energies,
    SIMPLE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_INNER: tl.constexpr,
):
    """A tile of ``U = (G − g mᵀ) K``, and its share of the energy ``⟨U, G − g mᵀ⟩ + κ ‖g‖²``."""
    tile = tl.program_id(0)
    which = tl.load(tiles + 3 * tile)
    problem = problems + which * FIELDS
    first_row, first_column = tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
    gradient = _address(gradients + 2 * which, SIMPLE)
    inverse = _address(problem + INVERSE, SIMPLE)
    bias = _address(gradients + 2 * which + 1, False)
    shift = _address(problem + SHIFT, False)
    has_bias = tl.load(problem + HAS_BIAS) != 0
    height, width = tl.load(problem + ROWS).to(tl.int32), tl.load(problem + COLUMNS).to(tl.int32)
    taps = tl.load(problem + TAPS).to(tl.int32)
    if SIMPLE:
        width = tl.multiple_of(width, 16)
    rows = first_row + tl.arange(0, BLOCK_ROWS)
    columns = first_column + tl.arange(0, BLOCK_COLUMNS)
    inner = tl.arange(0, BLOCK_INNER)
    known_rows, known_columns = tl.where(has_bias, height, 0), tl.where(has_bias, width, 0)
    of_rows = tl.load(bias + rows, mask=rows < known_rows, other=0.0)
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    for start in range(0, width, BLOCK_INNER):
        k = start + inner
        place = rows[:, None] * width + _column_offsets(k, width, taps, SIMPLE)[None, :]
        left = tl.load(gradient + place, mask=(rows < height)[:, None] & (k < width)[None, :], other=0.0)
        means = tl.load(shift + k, mask=k < known_columns, other=0.0)
        left -= of_rows[:, None] * means[None, :]
        place = columns[:, None] * width + k[None, :]  # K is symmetric: its rows are its columns
        right = tl.load(inverse + place, mask=(columns < width)[:, None] & (k < width)[None, :], other=0.0)
        total = tl.dot(left, tl.trans(right), total, input_precision=PRECISION)
    inside = (rows < height)[:, None] & (columns < width)[None, :]
    out = scratch + tl.load(problem + START)
    tl.store(out + rows[:, None] * width + columns[None, :], total, mask=inside)
    place = rows[:, None] * width + _column_offsets(columns, width, taps, SIMPLE)[None, :]
    plain = tl.load(gradient + place, mask=inside, other=0.0)
    means = tl.load(shift + columns, mask=columns < known_columns, other=0.0)
    energy = tl.sum(tl.sum((plain - of_rows[:, None] * means[None, :]) * total, 1), 0)
    if has_bias & (first_column == 0):
        energy += tl.load(_address(problem + UNIT, False)) * tl.sum(of_rows * of_rows, 0)
    tl.store(energies + tile, energy)


@triton.jit(do_not_specialize=["rate", "limit"])
def write(
    gradients,
    problems,
    blocks,
    numbers,
    scratch,
    energies,
    squares,
    rate,
    limit,
    SIMPLE: tl.constexpr,
    BOUNDED: tl.constexpr,
    TOLD: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """A few rows of the new gradient of a layer, and of its bias ``u = κ g − U m``: scaled, and shortened."""
    which = tl.load(blocks + 2 * tl.program_id(0))
    problem = problems + which * FIELDS
    rows = tl.load(blocks + 2 * tl.program_id(0) + 1) + tl.arange(0, BLOCK_ROWS)
    gradient = _address(gradients + 2 * which, SIMPLE)
    bias = _address(gradients + 2 * which + 1, False)
    shift = _address(problem + SHIFT, False)
    has_bias = tl.load(problem + HAS_BIAS) != 0
    height, width = tl.load(problem + ROWS).to(tl.int32), tl.load(problem + COLUMNS).to(tl.int32)
    taps = tl.load(problem + TAPS).to(tl.int32)
    if SIMPLE:
        width = tl.multiple_of(width, 16)
    scale = tl.load(numbers + 2 * which)
    if BOUNDED:
        energy = _sum(energies + tl.load(problem + FIRST_TILE), tl.load(problem + TILES))
        trace = tl.load(_address(problem + TRACE, False))
        share = tl.load(numbers + 2 * which + 1)  # how its rate and its shape count
        change = rate * share * scale * tl.sqrt(tl.maximum(energy / trace, 0.0))
        if (trace > 0) & (change > limit) & (change < float("inf")):
            scale *= limit / change
        elif (trace > 0) & (change == float("inf")):
            scale = 0.0 * scale
    out = scratch + tl.load(problem + START)
    dots = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    length = tl.zeros((BLOCK_ROWS,), tl.float32)
    for start in range(0, width, BLOCK_COLUMNS):
        columns = start + tl.arange(0, BLOCK_COLUMNS)
        inside = (rows < height)[:, None] & (columns < width)[None, :]
        update = tl.load(out + rows[:, None] * width + columns[None, :], mask=inside, other=0.0)
        means = tl.load(shift + columns, mask=columns < tl.where(has_bias, width, 0), other=0.0)
        dots += update * means[None, :]
        if TOLD:
            length += tl.sum(update * update, 1)
        place = rows[:, None] * width + _column_offsets(columns, width, taps, SIMPLE)[None, :]
        tl.store(gradient + place, scale * update, mask=inside)
    if has_bias:
        plain = tl.load(bias + rows, mask=rows < height, other=0.0)
        update = tl.load(_address(problem + UNIT, False)) * plain - tl.sum(dots, 1)
        tl.store(bias + rows, scale * update, mask=rows < height)
        length += update * update
    if TOLD:
        tl.store(squares + tl.program_id(0), tl.sum(length, 0))


@triton.jit
def _sum(values, count):
    total = tl.zeros((128,), tl.float32)
    for start in range(0, count, 128):
        place = start + tl.arange(0, 128)
        total += tl.load(values + place, mask=place < count, other=0.0)
    return tl.sum(total, 0)


@triton.jit
def tell(problems, numbers, energies, squares, changes):
    """How much a gradient of length 1 changes the outputs, relative to the inputs."""
    which = tl.program_id(0)
    problem = problems + which * FIELDS
    energy = _sum(energies + tl.load(problem + FIRST_TILE), tl.load(problem + TILES))
    length = _sum(squares + tl.load(problem + FIRST_BLOCK), tl.load(problem + BLOCKS))
    share = tl.load(numbers + 2 * which + 1)
    tl.store(changes + which, energy / length / tl.load(_address(problem + TRACE, False)) * share * share)
