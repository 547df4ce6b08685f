# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The programs of the five launches of :mod:`consequent.engines.gpu.kernels.dense`, which says what they do."""

import torch
import triton
import triton.language as tl

from consequent.engines.gpu.kernels.counting import BOUNDED, EDITED, FALLEN_BACK, RESCUED, count, count_step
from consequent.engines.gpu.kernels.dense_scratch import (
    MOST_SHARES,
    MOST_SOLVERS,
    PARTS,
    PROBES,
    energies_at,
    factor_at,
    found_at,
    left_at,
    right_at,
    section_of,
    squares_at,
    status_at,
)
from consequent.engines.gpu.kernels.table import (
    aligned_floats_at,
    floats_at,
    high_float,
    high_int,
    in_fours,
    is_finite,
    low_float,
    low_int,
    shortening,
)
from consequent.maths.rounding import ELIMINATION, LOST_PIVOT

FIELDS = tl.constexpr(10)  # entries of the table per layer
SOLVED = tl.constexpr(64)  # outputs that a program solves for at once, at most
GRAM_COLUMNS = tl.constexpr(64)
LEAST_BLOCKS = tl.constexpr(2)  # of so many columns in a part
_STRIP = tl.constexpr(8)  # rows of a tile that are probed at once
_NO_SUM_OVERFLOWS = tl.constexpr(1e35)  # sums of a thousand such numbers are finite
_FLOOR = tl.constexpr(ELIMINATION * torch.finfo(torch.float32).eps)
_LOST = tl.constexpr(LOST_PIVOT)


@triton.jit
def _random_bits(index, family):
    """A hash of the index: bit p is the sign of probe p. There are two families: 0 for v (features), 1 for u."""
    bits = index.to(tl.uint32) * 0x9E3779B1 + family * 0x7F4A7C15 + 0x165667B1
    bits = (bits ^ (bits >> 15)) * 0x85EBCA77
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE3D
    return (bits ^ (bits >> 16)).to(tl.int32, bitcast=True)


@triton.jit
def _sign(bits, probe):
    return (1 - ((bits >> probe) & 1) * 2).to(tl.float32)


@triton.jit
def _chunk(columns):
    """How many columns a part has: never so few that summing up the parts would be the greater work."""
    blocks = tl.cdiv(tl.cdiv(columns, PARTS), GRAM_COLUMNS)
    return tl.maximum(blocks, LEAST_BLOCKS) * GRAM_COLUMNS


@triton.jit(do_not_specialize=["table", "scratch"])
def _gram(table, scratch, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr):
    """Some columns of X: their share of ``X Xᵀ`` and of the probes."""
    layer, part = tl.program_id(0), tl.program_id(1)
    entry = table + layer * FIELDS
    section = section_of(scratch, layer, BLOCK_N)
    shape, widths = tl.load(entry + 4), tl.load(entry + 5)
    rows, features = low_int(shape), high_int(shape)
    chunk = _chunk(features)
    start = part * chunk
    if start < features:
        n = tl.arange(0, BLOCK_N)
        d = tl.arange(0, GRAM_COLUMNS)
        gram = tl.zeros((BLOCK_N, BLOCK_N), tl.float32)
        probe = tl.arange(0, 16)  # more than are used: the least a product takes
        sums = tl.zeros((BLOCK_N, 16), tl.float32)
        row = floats_at(tl.load(entry)) + n[:, None].to(tl.int64) * high_int(widths)
        for first in range(start, tl.minimum(start + chunk, features), GRAM_COLUMNS):
            x = tl.load(row + (first + d)[None, :], (n < rows)[:, None] & (first + d < features)[None, :], other=0.0)
            signs = _sign(_random_bits(first + d, 0)[:, None], probe[None, :])
            gram = tl.dot(x, tl.trans(x), gram, input_precision=PRECISION)
            sums = tl.dot(x, signs, sums, input_precision=PRECISION)
        tl.store(section + part * BLOCK_N * BLOCK_N + n[:, None] * BLOCK_N + n[None, :], gram)
        place = right_at(section, BLOCK_N) + part * BLOCK_N * PROBES
        tl.store(place + n[:, None] * PROBES + probe[None, :], sums, (probe < PROBES)[None, :])


@triton.jit(do_not_specialize=["table", "scratch", "flags", "matrices"])
def _factor(table, scratch, flags, matrices, BLOCK_N: tl.constexpr, ALONE: tl.constexpr):
    """The factors of ``K = X Xᵀ + λI`` for one layer; or K itself, for others to factorise."""
    layer = tl.program_id(0)
    entry = table + layer * FIELDS
    section = section_of(scratch, layer, BLOCK_N)
    shape, more = tl.load(entry + 4), tl.load(entry + 6)
    rows, features = low_int(shape), high_int(shape)
    n = tl.arange(0, BLOCK_N)
    square = n[:, None] * BLOCK_N + n[None, :]
    parts = tl.cdiv(features, _chunk(features))
    gram = tl.zeros((BLOCK_N, BLOCK_N), tl.float32)
    if ALONE:
        for part in tl.static_range(PARTS):  # all are on their way at once
            there = n[:, None] < tl.where(part < parts, BLOCK_N, 0)
            gram += tl.load(section + part * BLOCK_N * BLOCK_N + square, mask=there, other=0.0)
    else:
        for part in range(parts):
            gram += tl.load(section + part * BLOCK_N * BLOCK_N + square)
    inside = (n < rows)[:, None] & (n < rows)[None, :]
    gram += tl.where(inside & (tl.load(entry + 3) != 0), 1.0, 0.0)

    on_diagonal = n[:, None] == n[None, :]
    trace = tl.sum(tl.sum(tl.where(on_diagonal, gram, 0.0), 1), 0)
    damping = low_float(tl.load(entry + 7))
    relative = tl.where(trace > 0, damping * trace, 1.0)
    level = tl.where((high_int(more) != 0) & (damping > 0), relative, damping)
    K = gram + tl.where(on_diagonal, tl.where((n < rows)[:, None], level, 1.0), 0.0)
    status = status_at(section, BLOCK_N)
    tl.store(status, trace)
    tl.store(status + 1, level)
    tl.store(status + 3, 1.0)  # unless somebody looks
    tl.store(status + 4, 0.0)
    tl.store(status + 5, 1.0)
    if ALONE:
        V, pivots, ok, raised = _factorised(K, BLOCK_N)
        factor = factor_at(section, BLOCK_N)
        tl.store(factor + square, V)
        tl.store(factor + BLOCK_N * BLOCK_N + n, pivots)
        tl.store(status + 2, ok.to(tl.float32))
        tl.store(status + 6, raised.to(tl.float32))
    else:
        tl.store(matrices + layer * BLOCK_N * BLOCK_N + square, K)
    if is_finite(trace) == 0:
        tl.store(flags, 1)


@triton.jit
def _factorised(K, BLOCK_N: tl.constexpr):
    """The unit lower triangular V and the pivots of ``K⁻¹ = Vᵀ pivots⁻¹ V``, and whether K is positive definite.

    It is Cholesky's factorisation without square roots, with the inverse of the factor in the place of the factor: one
    pass over the columns, where a factorisation and two triangular solves would take three. A pivot below the rounding
    of the entry that it came from is raised to that entry; where no rounding explains it, K is none.

    Returns:
        V, the pivots, whether K is positive definite, and how many pivots were raised.
    """
    n = tl.arange(0, BLOCK_N)
    wholes = tl.sum(tl.where(n[:, None] == n[None, :], K, 0.0), 0)
    M = K  # from the left V grows over what is left to eliminate
    found = tl.zeros((BLOCK_N,), tl.float32)
    if BLOCK_N <= 32:
        for k in tl.static_range(BLOCK_N):  # a known k makes most of a step vanish
            M, found = _eliminated(M, found, wholes, k, BLOCK_N)
    else:
        for k in range(BLOCK_N):
            M, found = _eliminated(M, found, wholes, k, BLOCK_N)
    is_low = found < wholes * _FLOOR
    ok = tl.min(((found > -_LOST * wholes) & is_finite(found)).to(tl.int32), 0) == 1
    V = tl.where(n[:, None] > n[None, :], M, tl.where(n[:, None] == n[None, :], 1.0, 0.0))
    return V, tl.where(is_low, wholes, found), ok, tl.sum(is_low.to(tl.int32), 0)


@triton.jit
def _eliminated(M, found, wholes, k, BLOCK_N: tl.constexpr):
    """One step: row k is subtracted from those below, and what is left of column k gives way to V's."""
    n = tl.arange(0, BLOCK_N)
    row = tl.sum(tl.where((n == k)[:, None], M, 0.0), 0)
    pivot, whole = tl.gather(row, n * 0 + k, 0), tl.gather(wholes, n * 0 + k, 0)
    raised = tl.where(pivot < whole * _FLOOR, whole, pivot)
    multipliers = (row / raised)[:, None]  # what is left is symmetric: the row is the column
    row = tl.where(n == k, 1.0, row)[None, :]
    left = tl.where((n == k)[None, :], 0.0, M)
    return tl.where((n > k)[:, None], left - multipliers * row, M), tl.where(n == k, pivot, found)


@triton.jit(do_not_specialize=["table", "scratch", "inverses", "statuses", "flags", "first"])
def _solve(
    table,
    scratch,
    inverses,
    statuses,
    flags,
    first: tl.int32,
    BLOCK_N: tl.constexpr,
    ALONE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``A = K⁻¹ ΔZ`` for some of the outputs, stored output by output, and their part of the probes ``ΔZ u``."""
    layer, program = first + tl.program_id(0), tl.program_id(1)
    entry = table + layer * FIELDS
    outputs = low_int(tl.load(entry + 5))
    BLOCK_O: tl.constexpr = min(BLOCK_N, SOLVED)
    SLICE: tl.constexpr = BLOCK_N if ALONE else 32  # rows of V in shared memory at once
    blocks = tl.cdiv(outputs, BLOCK_O)
    solvers = tl.minimum(blocks, MOST_SOLVERS)
    if program >= solvers:
        return
    section = section_of(scratch, layer, BLOCK_N)
    solution = aligned_floats_at(tl.load(entry + 9) * 4 + scratch.to(tl.int64))
    rows = low_int(tl.load(entry + 4))
    n = tl.arange(0, BLOCK_N)
    row = floats_at(tl.load(entry + 1)) + n[:, None].to(tl.int64) * low_int(tl.load(entry + 6))
    factor = factor_at(section, BLOCK_N)
    if ALONE == 0:
        factor = inverses + layer * BLOCK_N * BLOCK_N
    probe = tl.arange(0, 16)
    sums = tl.zeros((BLOCK_N, 16), tl.float32)
    infinite = 0
    energy = 0.0
    status = status_at(section, BLOCK_N)
    level = tl.load(status + 1)
    if ALONE:
        ok = tl.load(status + 2) != 0
    else:
        ok = tl.load(statuses + layer * 4 + 2) != 0
        if program == 0:
            tl.store(status + 2, ok.to(tl.float32))
            tl.store(status + 6, tl.load(statuses + layer * 4 + 3))
    trace = tl.load(status)  # what the plain gradient is divided by where there is no factor, λ added
    shortened = tl.where(is_finite(trace), 1.0 / (trace + level), float("nan"))
    for block in range(program, blocks, solvers):
        o = block * BLOCK_O + tl.arange(0, BLOCK_O)
        wanted = tl.load(row + o[None, :], (n < rows)[:, None] & (o < outputs)[None, :], other=0.0)
        A = tl.zeros((BLOCK_N, BLOCK_O), tl.float32)
        for start in range(0, BLOCK_N, SLICE):
            i = start + tl.arange(0, SLICE)
            V = tl.load(factor + i[:, None] * BLOCK_N + n[None, :])
            halfway = tl.dot(V, wanted, input_precision=PRECISION)
            if ALONE:
                halfway = halfway / tl.load(factor + BLOCK_N * BLOCK_N + i)[:, None]
            A = tl.dot(tl.trans(V), halfway, A, input_precision=PRECISION)
        A = tl.where(ok, A, wanted * shortened)
        tl.store(solution + o[None, :].to(tl.int64) * BLOCK_N + n[:, None], A, (o < outputs)[None, :])
        signs = _sign(_random_bits(o, 1)[:, None], probe[None, :])
        sums = tl.dot(wanted, signs, sums, input_precision=PRECISION)
        infinite += tl.sum(tl.sum((is_finite(A) == 0).to(tl.int32), 1), 0)
        energy += tl.sum(tl.sum(wanted * (wanted - level * A), 1), 0)
    tl.store(energies_at(section, BLOCK_N) + program, energy)
    place = left_at(section, BLOCK_N) + program * BLOCK_N * PROBES
    tl.store(place + n[:, None] * PROBES + probe[None, :], sums, (probe < PROBES)[None, :])
    if infinite > 0:
        tl.store(flags, 1)


@triton.jit
def _compare(entry, section, shares, BLOCK_N: tl.constexpr):
    """The c with ``G = c ΔZᵀX`` by least squares over the probes, and whether most of them say that there is none.

    And by what the bound shortens the new gradient, which where there is none is ``G / (trace + λ)``.
    """
    shape = tl.load(entry + 4)
    rows, features, outputs = low_int(shape), high_int(shape), low_int(tl.load(entry + 5))
    tolerance = low_float(tl.load(entry + 8))
    probe = tl.arange(0, PROBES)
    SIZE: tl.constexpr = BLOCK_N * PROBES
    found = _summed(found_at(section, BLOCK_N), shares, MOST_SHARES, PROBES)
    parts = tl.cdiv(features, _chunk(features))
    right = tl.reshape(_summed(right_at(section, BLOCK_N), parts, 16, SIZE), (BLOCK_N, PROBES))
    n = tl.arange(0, BLOCK_N)
    has_one = n < tl.where(tl.load(entry + 3) != 0, rows, 0)
    right += tl.where(has_one[:, None], _sign(_random_bits(features, 0), probe[None, :]), 0.0)
    BLOCK_O: tl.constexpr = min(BLOCK_N, SOLVED)
    solvers = tl.minimum(tl.cdiv(outputs, BLOCK_O), MOST_SOLVERS)
    left = tl.reshape(_summed(left_at(section, BLOCK_N), solvers, MOST_SOLVERS, SIZE), (BLOCK_N, PROBES))
    expected = tl.sum(left * right, 0)
    sizes = tl.sqrt(tl.sum(left * left, 0)) * tl.sqrt(tl.sum(right * right, 0))
    largest = tl.max(tl.abs(expected), 0)
    unit = 1.0 / tl.where(largest > 0, largest, 1.0)  # squares of small numbers would vanish
    squared = tl.sum(expected * unit * (expected * unit), 0)
    factor = tl.where(squared > 0, tl.sum(found * unit * (expected * unit), 0) / squared, 1.0)
    off = tl.abs(found - factor * expected) > tolerance * tl.abs(factor) * sizes
    status = status_at(section, BLOCK_N)
    tl.store(status + 3, factor)
    is_edited = tl.sum(off.to(tl.int32), 0) > PROBES // 2
    tl.store(status + 4, is_edited.to(tl.float32))

    program = tl.arange(0, MOST_SOLVERS)
    energies = tl.load(energies_at(section, BLOCK_N) + program, program < solvers, other=0.0)
    energy = tl.sum(energies, 0) * factor * factor
    squares = tl.sum(_summed(squares_at(section, BLOCK_N), shares, MOST_SHARES, 1), 0)
    energy = tl.where(is_edited, squares / (tl.load(status) + tl.load(status + 1)), energy)
    limit = high_float(tl.load(entry + 8))
    columns = features + (tl.load(entry + 3) != 0).to(tl.int32)
    allowed = limit * limit * (tl.load(status) * (outputs.to(tl.float32) / columns.to(tl.float32)))
    tl.store(status + 5, shortening(energy, allowed))


@triton.jit
def _summed(parts, number, MOST: tl.constexpr, SIZE: tl.constexpr):
    """The sum of so many vectors of this size that lie one behind the other: all are on their way at once."""
    part = tl.arange(0, MOST)[:, None]
    place = part * SIZE + tl.arange(0, SIZE)[None, :]
    return tl.sum(tl.load(parts + place, part + place * 0 < number, other=0.0), 0)


@triton.jit(do_not_specialize=["table", "scratch", "flags", "share"])
def _look(
    table,
    scratch,
    flags,
    share: tl.int32,
    TILE_O: tl.constexpr,
    TILE_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """This program's share of ``u G v`` for every probe: some tiles of the gradient, each read once."""
    layer, program = tl.program_id(0), tl.program_id(1)
    entry = table + layer * FIELDS
    section = section_of(scratch, layer, BLOCK_N)
    outputs, features = low_int(tl.load(entry + 5)), high_int(tl.load(entry + 4))
    bias_address = tl.load(entry + 3)
    gradient = floats_at(tl.load(entry + 2))
    if ALIGNED:
        gradient = aligned_floats_at(tl.load(entry + 2))
        features = in_fours(features)
    tiles_across = tl.cdiv(features, TILE_D)
    tiles = tiles_across * tl.cdiv(outputs, TILE_O)
    programs = tl.cdiv(tiles, share)
    if program >= programs:
        return
    sum_0 = tl.zeros((_STRIP, TILE_D), tl.float32)
    sum_1 = tl.zeros((_STRIP, TILE_D), tl.float32)
    sum_2 = tl.zeros((_STRIP, TILE_D), tl.float32)
    sum_3 = tl.zeros((_STRIP, TILE_D), tl.float32)
    squares = tl.zeros((_STRIP, TILE_D), tl.float32)
    for tile in range(program, tiles, programs):
        d = tile % tiles_across * TILE_D + tl.arange(0, TILE_D)
        part_0 = tl.zeros((_STRIP, TILE_D), tl.float32)
        part_1 = tl.zeros((_STRIP, TILE_D), tl.float32)
        part_2 = tl.zeros((_STRIP, TILE_D), tl.float32)
        part_3 = tl.zeros((_STRIP, TILE_D), tl.float32)
        for strip in tl.static_range(0, TILE_O, _STRIP):
            o = tile // tiles_across * TILE_O + strip + tl.arange(0, _STRIP)
            place = o[:, None].to(tl.int64) * features + d[None, :]
            g = tl.load(gradient + place, (o < outputs)[:, None] & (d < features)[None, :], other=0.0)
            u = _random_bits(o, 1)
            part_0 += g * _sign(u, 0)[:, None]
            part_1 += g * _sign(u, 1)[:, None]
            part_2 += g * _sign(u, 2)[:, None]
            part_3 += g * _sign(u, 3)[:, None]
            squares += g * g
        v = _random_bits(d, 0)
        sum_0 += part_0 * _sign(v, 0)[None, :]
        sum_1 += part_1 * _sign(v, 1)[None, :]
        sum_2 += part_2 * _sign(v, 2)[None, :]
        sum_3 += part_3 * _sign(v, 3)[None, :]
    probe = tl.arange(0, PROBES)
    total = tl.where(probe == 0, tl.sum(tl.sum(sum_0, 1), 0), tl.sum(tl.sum(sum_1, 1), 0))
    total = tl.where(probe == 2, tl.sum(tl.sum(sum_2, 1), 0), total)
    total = tl.where(probe == 3, tl.sum(tl.sum(sum_3, 1), 0), total)
    square = tl.sum(tl.sum(squares, 1), 0)
    if (program == 0) & (bias_address != 0):
        total += _probed_bias(floats_at(bias_address), features, outputs)
        square += _squared_bias(floats_at(bias_address), outputs)
    tl.store(found_at(section, BLOCK_N) + program * PROBES + probe, total)
    tl.store(squares_at(section, BLOCK_N) + program, square)
    if tl.sum((tl.abs(total) < _NO_SUM_OVERFLOWS).to(tl.int32), 0) < PROBES:
        tl.store(flags, 1)
    tl.debug_barrier()  # the whole program's part is there before it counts as done
    done = tl.atomic_add(flags + 1 + layer, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    if done == programs - 1:
        _compare(entry, section, programs, BLOCK_N)


@triton.jit
def _probed_bias(bias_grad, features, outputs):
    """The bias column's share of ``u G v``."""
    probe = tl.arange(0, PROBES)
    i = tl.arange(0, 256)
    sums = tl.zeros((256, PROBES), tl.float32)
    for first in range(0, outputs, 256):
        b = tl.load(bias_grad + first + i, first + i < outputs, other=0.0)
        sums += b[:, None] * _sign(_random_bits(first + i, 1)[:, None], probe[None, :])
    return tl.sum(sums, 0) * _sign(_random_bits(features, 0), probe)


@triton.jit
def _squared_bias(bias_grad, outputs):
    """The bias column's share of ``‖G‖²``."""
    i = tl.arange(0, 256)
    sums = tl.zeros((256,), tl.float32)
    for first in range(0, outputs, 256):
        b = tl.load(bias_grad + first + i, first + i < outputs, other=0.0)
        sums += b * b
    return tl.sum(sums, 0)


@triton.jit(do_not_specialize=["table", "scratch", "flags", "counts", "share", "steps", "skips"])
def _write(
    table,
    scratch,
    flags,
    counts,
    share: tl.int32,
    steps: tl.int32,
    skips: tl.int32,
    TILE_O: tl.constexpr,
    TILE_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """``s c Aᵀ X`` for some neighbouring tiles of one layer's gradient, which have A in common."""
    layer, program = tl.program_id(0), tl.program_id(1)
    entry = table + layer * FIELDS
    shape, widths = tl.load(entry + 4), tl.load(entry + 5)
    rows, features, outputs, input_stride = low_int(shape), high_int(shape), low_int(widths), high_int(widths)
    tiles_across = tl.cdiv(features, TILE_D)
    shares = tl.cdiv(tiles_across, share)  # of a row of tiles
    first = program % shares * share
    last = tl.minimum(first + share, tiles_across)
    o = program // shares * TILE_O + tl.arange(0, TILE_O)
    if program >= shares * tl.cdiv(outputs, TILE_O):
        return
    inputs, gradient = floats_at(tl.load(entry)), floats_at(tl.load(entry + 2))
    bias_address = tl.load(entry + 3)
    bias_grad = floats_at(bias_address)
    solution = aligned_floats_at(tl.load(entry + 9) * 4 + scratch.to(tl.int64))
    scale = high_float(tl.load(entry + 7))
    is_bad = tl.load(flags) != 0
    status = status_at(section_of(scratch, layer, BLOCK_N), BLOCK_N)
    plain_scale = scale / (tl.load(status) + tl.load(status + 1))
    ok = tl.load(status + 2) != 0
    factor = tl.load(status + 3)
    edited = tl.load(status + 4) != 0
    if (program == 0) & (layer == 0):
        count_step(counts, steps, skips, is_bad)
    shorter = tl.load(status + 5)
    if (program == 0) & (is_bad == 0):
        count(counts, RESCUED, ok & (tl.load(status + 6) > 0))
        count(counts, FALLEN_BACK, ok == 0)
        count(counts, EDITED, edited)
        count(counts, BOUNDED, (ok | edited) & (shorter < 1))

    if ALIGNED:
        inputs, gradient = aligned_floats_at(tl.load(entry)), aligned_floats_at(tl.load(entry + 2))
        features, input_stride = in_fours(features), in_fours(input_stride)
    n = tl.arange(0, BLOCK_N)
    row = gradient + o[:, None].to(tl.int64) * features
    has_bias = o < tl.where((bias_address != 0) & (first == 0), outputs, 0)
    if is_bad | edited:
        for tile in range(first, last):
            d = tile * TILE_D + tl.arange(0, TILE_D)
            mask = (o < outputs)[:, None] & (d < features)[None, :]
            G = tl.load(row + d[None, :], mask, other=0.0) * (plain_scale * shorter)
            tl.store(row + d[None, :], tl.where(is_bad, 0.0, G), mask)
        b = tl.load(bias_grad + o, has_bias, other=0.0) * (plain_scale * shorter)
        tl.store(bias_grad + o, tl.where(is_bad, 0.0, b), has_bias)
    else:
        A = tl.load(solution + o[:, None].to(tl.int64) * BLOCK_N + n[None, :], (o < outputs)[:, None], other=0.0)
        A = A * (factor * scale * tl.where(ok, shorter, 1.0))
        X_row = inputs + n[:, None].to(tl.int64) * input_stride
        for tile in range(first, last):
            d = tile * TILE_D + tl.arange(0, TILE_D)
            X = tl.load(X_row + d[None, :], (n < rows)[:, None] & (d < features)[None, :], other=0.0)
            mask = (o < outputs)[:, None] & (d < features)[None, :]
            tl.store(row + d[None, :], tl.dot(A, X, input_precision=PRECISION), mask)
        tl.store(bias_grad + o, tl.sum(A, 1), has_bias)
