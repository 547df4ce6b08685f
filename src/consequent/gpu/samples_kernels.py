# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The three launches of :mod:`consequent.gpu.samples`: inverses, updates, and what there is to tell."""

import triton
import triton.language as tl

from consequent.gpu.elimination import inverse

# The entries of a call in its table.
INPUTS, OUTPUT_GRADS, WEIGHT, BIAS = (tl.constexpr(place) for place in range(4))
SAMPLES, FEATURES, OUTPUTS, ONES, FIRST_TILE, TILES = (tl.constexpr(place) for place in range(6))
ADDRESSES, SIZES = tl.constexpr(4), tl.constexpr(6)
TRACE, LEVEL, FAILED = (tl.constexpr(place) for place in range(3))
NOTES = tl.constexpr(3)


@triton.jit
def _pointer(entry):
    return tl.load(entry).to(tl.pointer_type(tl.float32))


@triton.jit(do_not_specialize=["damping"])
def inverses(
    addresses,
    sizes,
    out,
    notes,
    damping,
    LEAST: tl.constexpr,
    PRECISION: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``(XXᵀ + λI)⁻¹`` of one call."""
    call = tl.program_id(0)
    size = sizes + call * SIZES
    samples, features = tl.load(size + SAMPLES), tl.load(size + FEATURES)
    ones = tl.load(size + ONES)
    inputs = _pointer(addresses + call * ADDRESSES + INPUTS)
    rows = tl.arange(0, SIZE)
    matrix = tl.zeros((SIZE, SIZE), tl.float32)
    for start in range(0, features, BLOCK):
        k = start + tl.arange(0, BLOCK)
        mask = (rows < samples)[:, None] & (k < features)[None, :]
        x = tl.load(inputs + rows[:, None] * features + k[None, :], mask=mask, other=0.0)
        matrix = tl.dot(x, tl.trans(x), matrix, input_precision=PRECISION)
    is_diagonal = rows[:, None] == rows[None, :]
    inside = (rows < samples)[:, None] & (rows < samples)[None, :]
    matrix = tl.where(inside, matrix + ones, 0.0)
    trace = tl.sum(tl.sum(tl.where(is_diagonal, matrix, 0.0), 1), 0)
    level = tl.where(trace > 0, damping * trace / tl.minimum(samples, features + ones), 1.0)
    matrix += tl.where(is_diagonal, tl.where(inside, level, 1.0), 0.0)
    scale_rows = tl.rsqrt(tl.sum(tl.where(is_diagonal, matrix, 0.0), 1))
    scale_columns = tl.rsqrt(tl.sum(tl.where(is_diagonal, matrix, 0.0), 0))
    matrix *= scale_rows[:, None] * scale_columns[None, :]
    matrix, smallest = inverse(matrix, SIZE)
    matrix *= scale_rows[:, None] * scale_columns[None, :]
    matrix = tl.where(smallest >= LEAST, matrix, tl.where(is_diagonal, 1.0 / (trace + level), 0.0))
    tl.store(out + call * SIZE * SIZE + rows[:, None] * SIZE + rows[None, :], tl.where(inside, matrix, 0.0))
    tl.store(notes + call * NOTES + TRACE, trace)
    tl.store(notes + call * NOTES + LEVEL, level)
    has_failed = (smallest < LEAST) & (trace < float("inf"))
    tl.store(notes + call * NOTES + FAILED, tl.where(has_failed, 1.0, 0.0))


@triton.jit
def updates(
    addresses,
    sizes,
    tiles,
    scales,
    inverses,
    notes,
    energies,
    MEASURED: tl.constexpr,
    PRECISION: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
):
    """A tile of ``U = Aᵀ X`` with ``A = (XXᵀ + λI)⁻¹ ΔZ``, times its scale."""
    tile = tl.program_id(0)
    call, first_output, first_feature = (
        tl.load(tiles + 3 * tile),
        tl.load(tiles + 3 * tile + 1),
        tl.load(tiles + 3 * tile + 2),
    )
    address, size = addresses + call * ADDRESSES, sizes + call * SIZES
    samples, features, outputs = tl.load(size + SAMPLES), tl.load(size + FEATURES), tl.load(size + OUTPUTS)
    rows = tl.arange(0, SIZE)
    o, d = first_output + tl.arange(0, BLOCK_OUTPUTS), first_feature + tl.arange(0, BLOCK_FEATURES)
    solver = tl.load(inverses + call * SIZE * SIZE + rows[:, None] * SIZE + rows[None, :])
    mask = (rows < samples)[:, None] & (o < outputs)[None, :]
    wanted = tl.load(_pointer(address + OUTPUT_GRADS) + rows[:, None] * outputs + o[None, :], mask=mask, other=0.0)
    coefficients = tl.dot(solver, wanted, input_precision="tf32x3")
    mask = (rows < samples)[:, None] & (d < features)[None, :]
    x = tl.load(_pointer(address + INPUTS) + rows[:, None] * features + d[None, :], mask=mask, other=0.0)
    update = tl.dot(tl.trans(coefficients), x, input_precision=PRECISION)
    scale = tl.load(scales + call)
    mask = (o < outputs)[:, None] & (d < features)[None, :]
    tl.store(_pointer(address + WEIGHT) + o[:, None] * features + d[None, :], scale * update, mask=mask)
    if first_feature == 0:
        if tl.load(size + ONES) != 0:
            tl.store(_pointer(address + BIAS) + o, scale * tl.sum(coefficients, 0), mask=o < outputs)
        if MEASURED:
            kept = wanted - tl.load(notes + call * NOTES + LEVEL) * coefficients
            place = energies + 2 * (tl.load(size + FIRST_TILE) + first_output // BLOCK_OUTPUTS)
            tl.store(place, tl.sum(tl.sum(kept * wanted, 1), 0))
            tl.store(place + 1, tl.sum(tl.sum(kept * coefficients, 1), 0))


@triton.jit
def tell(sizes, notes, energies, told, MEASURED: tl.constexpr):
    """Of one call: 1 if it can be told how much its outputs change, that, and whether its factorisation failed."""
    call = tl.program_id(0)
    size = sizes + call * SIZES
    change = tl.load(notes + call * NOTES + TRACE) * 0.0
    if MEASURED:
        first, count = tl.load(size + FIRST_TILE), tl.load(size + TILES)
        energy, length = tl.zeros((64,), tl.float32), tl.zeros((64,), tl.float32)
        for start in range(0, count, 64):
            tile = start + tl.arange(0, 64)
            energy += tl.load(energies + 2 * (first + tile), mask=tile < count, other=0.0)
            length += tl.load(energies + 2 * (first + tile) + 1, mask=tile < count, other=0.0)
        columns = tl.load(size + FEATURES) + tl.load(size + ONES)
        shape = columns.to(tl.float32) / tl.load(size + OUTPUTS).to(tl.float32)
        change = shape * tl.sum(energy, 0) / tl.sum(length, 0) / tl.load(notes + call * NOTES + TRACE)
    tells = (change > 0) & (change < float("inf"))
    tl.store(told + 3 * call, tl.where(tells, 1.0, 0.0))
    tl.store(told + 3 * call + 1, tl.where(tells, change, 0.0))
    tl.store(told + 3 * call + 2, tl.load(notes + call * NOTES + FAILED))
