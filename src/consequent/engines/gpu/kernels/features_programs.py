# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The programs of the launches of :mod:`consequent.engines.gpu.kernels.features`, which says what they are for."""

import triton
import triton.language as tl

from consequent.engines.gpu.kernels.counting import BOUNDED, FALLEN_BACK, RESCUED, count, count_step
from consequent.engines.gpu.kernels.table import (
    floats_at,
    high_float,
    high_int,
    is_finite,
    low_float,
    low_int,
    shortening,
)

PARTS = tl.constexpr(1024)  # of a sum, as many as there are programs at most
_FIELDS = tl.constexpr(9)  # entries of the table per layer


@triton.jit
def _layer_at(entry):
    """A layer's outputs, features, these with the bias, the bias's address or 0, taps, and steps to tap and channel."""
    shape, strides, bias_address = tl.load(entry + 5), tl.load(entry + 6), tl.load(entry + 1)
    features = high_int(shape)
    size = features + (bias_address != 0).to(tl.int32)
    channel_stride = low_int(tl.load(entry + 7))
    return low_int(shape), features, size, bias_address, low_int(strides), high_int(strides), channel_stride


@triton.jit
def _places(f, taps, tap_stride, channel_stride):
    return f // taps * channel_stride + f % taps * tap_stride


@triton.jit(do_not_specialize=["table", "scratch", "bad", "entries"])
def _first_product(
    table,
    scratch,
    bad,
    entries: tl.int64,
    BLOCK_O: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Some tiles of ``Y = G Wᵀ``: ``Y[o, i] = Σ_{j ≤ i} G[o, j] W[i, j]``."""
    layer, program = tl.program_id(0), tl.program_id(1)
    entry = table + layer * _FIELDS
    outputs, features, size, bias_address, taps, tap_stride, channel_stride = _layer_at(entry)
    tiles_down = tl.cdiv(outputs, BLOCK_O)
    tiles_across = tl.cdiv(size, BLOCK_F)
    gradient, bias_grad = floats_at(tl.load(entry)), floats_at(bias_address)
    factor, status = floats_at(tl.load(entry + 2)), floats_at(tl.load(entry + 3))
    product = scratch + tl.load(entry + 4)
    ok = tl.load(status + 2) != 0
    energy = 0.0
    for tile in range(program, tiles_down * tiles_across, tl.num_programs(1)):
        first = (tiles_across - 1 - tile // tiles_down) * BLOCK_F  # the tiles with most to sum up begin
        o = tile % tiles_down * BLOCK_O + tl.arange(0, BLOCK_O)
        i = first + tl.arange(0, BLOCK_F)
        row = gradient + o[:, None].to(tl.int64) * features
        factor_row = factor + i[None, :].to(tl.int64) * size
        Y = tl.zeros((BLOCK_F, BLOCK_O), tl.float32)  # transposed, and faster so: warps share the rows of a product
        stop = tl.where(ok, tl.minimum(first + BLOCK_F, features), 0)
        for start in range(0, stop, BLOCK_K):
            j = start + tl.arange(0, BLOCK_K)
            g_mask = (o < outputs)[:, None] & (j < features)[None, :]
            g = tl.load(row + _places(j, taps, tap_stride, channel_stride)[None, :], g_mask, other=0.0)
            w_mask = (j[:, None] <= i[None, :]) & (i < size)[None, :] & (j < features)[:, None]
            w = tl.load(factor_row + j[:, None], w_mask, other=0.0)
            Y = tl.dot(tl.trans(w), tl.trans(g), Y, input_precision=PRECISION)
        Y = tl.trans(Y)
        # The bias is the last feature, and the triangle has it contribute to the last column alone.
        bias = tl.load(bias_grad + o, o < tl.where(bias_address != 0, outputs, 0), other=0.0)
        corner = tl.load(factor + i.to(tl.int64) * size + features, (i == features) & (i < size), other=0.0)
        Y += bias[:, None] * tl.where(ok, corner, 0.0)[None, :]
        mask = (o < outputs)[:, None] & (i < size)[None, :]
        tl.store(product + o[:, None].to(tl.int64) * size + i[None, :], Y, mask)
        energy += tl.sum(tl.sum(Y * Y, 1), 0)

        place = row + _places(i, taps, tap_stride, channel_stride)[None, :]
        own = tl.load(place, (o < outputs)[:, None] & (i < features)[None, :], other=0.0)
        finite = is_finite(own) & is_finite(Y)  # a bias that is not has left its mark on Y, by 0 · inf = NaN
        if (tl.min(tl.min(finite.to(tl.int32), 1), 0) == 0) | (is_finite(tl.load(status)) == 0):
            tl.store(bad, 1)
    tl.store(scratch + entries + layer * PARTS + program, energy)


@triton.jit(do_not_specialize=["table", "scratch", "bad"])
def _gather(table, scratch, bad, BLOCK_O: tl.constexpr, BLOCK_F: tl.constexpr):
    """Some tiles of G, the bias its last column, put where a product can be made of them."""
    layer, program = tl.program_id(0), tl.program_id(1)
    entry = table + layer * _FIELDS
    outputs, features, size, bias_address, taps, tap_stride, channel_stride = _layer_at(entry)
    tiles_down = tl.cdiv(outputs, BLOCK_O)
    gradient, bias_grad = floats_at(tl.load(entry)), floats_at(bias_address)
    gathered = scratch + tl.load(entry + 4)
    for tile in range(program, tiles_down * tl.cdiv(size, BLOCK_F), tl.num_programs(1)):
        o = tile % tiles_down * BLOCK_O + tl.arange(0, BLOCK_O)
        j = tile // tiles_down * BLOCK_F + tl.arange(0, BLOCK_F)
        place = gradient + o[:, None].to(tl.int64) * features + _places(j, taps, tap_stride, channel_stride)[None, :]
        G = tl.load(place, (o < outputs)[:, None] & (j < features)[None, :], other=0.0)
        bias = tl.load(bias_grad + o, o < tl.where(bias_address != 0, outputs, 0), other=0.0)
        G = tl.where((j == features)[None, :], bias[:, None], G)
        mask = (o < outputs)[:, None] & (j < size)[None, :]
        tl.store(gathered + o[:, None].to(tl.int64) * size + j[None, :], G, mask)
        finite = is_finite(G) | (mask == 0)
        if (tl.min(tl.min(finite.to(tl.int32), 1), 0) == 0) | (is_finite(tl.load(floats_at(tl.load(entry + 3)))) == 0):
            tl.store(bad, 1)


@triton.jit(do_not_specialize=["table", "scratch", "gathered", "bad", "entries"])
def _energies(table, scratch, gathered, bad, entries: tl.int64, BLOCK_O: tl.constexpr, BLOCK_F: tl.constexpr):
    """Some tiles' part of ``⟨U, G⟩``, with U in the scratch."""
    layer, program = tl.program_id(0), tl.program_id(1)
    entry = table + layer * _FIELDS
    outputs, _, size, _, _, _, _ = _layer_at(entry)
    tiles_down = tl.cdiv(outputs, BLOCK_O)
    first = tl.load(entry + 4)
    energy = 0.0
    for tile in range(program, tiles_down * tl.cdiv(size, BLOCK_F), tl.num_programs(1)):
        o = tile % tiles_down * BLOCK_O + tl.arange(0, BLOCK_O)
        j = tile // tiles_down * BLOCK_F + tl.arange(0, BLOCK_F)
        mask = (o < outputs)[:, None] & (j < size)[None, :]
        place = first + o[:, None].to(tl.int64) * size + j[None, :]
        U = tl.load(scratch + place, mask, other=0.0)
        energy += tl.sum(tl.sum(U * tl.load(gathered + place, mask, other=0.0), 1), 0)
        if tl.min(tl.min(is_finite(U).to(tl.int32), 1), 0) == 0:
            tl.store(bad, 1)
    tl.store(scratch + entries + layer * PARTS + program, energy)


@triton.jit(do_not_specialize=["table", "scratch", "bad", "counts", "entries", "parts", "steps", "skips"])
def _second_product(
    table,
    scratch,
    bad,
    counts,
    entries: tl.int64,
    parts: tl.int32,
    steps: tl.int32,
    skips: tl.int32,
    BLOCK_O: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    MULTIPLIES: tl.constexpr,
):
    """Some tiles of ``s Y W``: ``Σ_{i ≥ j} Y[o, i] W[i, j]``, written in the place of ``G[o, j]``.

    Unless it multiplies, the product is in the scratch already.
    """
    layer, program = tl.program_id(0), tl.program_id(1)
    entry = table + layer * _FIELDS
    outputs, features, size, bias_address, taps, tap_stride, channel_stride = _layer_at(entry)
    tiles_down = tl.cdiv(outputs, BLOCK_O)
    tiles_across = tl.cdiv(size, BLOCK_F)
    gradient, bias_grad = floats_at(tl.load(entry)), floats_at(bias_address)
    factor, status = floats_at(tl.load(entry + 2)), floats_at(tl.load(entry + 3))
    product = scratch + tl.load(entry + 4)
    scale = low_float(tl.load(entry + 8))
    ok, is_bad = tl.load(status + 2) != 0, tl.load(bad) != 0
    if (program == 0) & (layer == 0):
        count_step(counts, steps, skips, is_bad)
    part = tl.arange(0, PARTS)
    energy = tl.sum(tl.load(scratch + entries + layer * PARTS + part, part < parts, other=0.0), 0)
    limit = high_float(tl.load(entry + 8))
    allowed = limit * limit * (tl.load(status) * (outputs.to(tl.float32) / size.to(tl.float32)))
    shorter = shortening(energy, allowed)
    if (program == 0) & (is_bad == 0):
        count(counts, RESCUED, ok & (tl.load(status + 3) > 0))
        count(counts, FALLEN_BACK, ok == 0)
        count(counts, BOUNDED, ok & (shorter < 1))
    for tile in range(program, tiles_down * tiles_across, tl.num_programs(1)):
        first = tile // tiles_down * BLOCK_F  # the tiles with most to sum up begin
        o = tile % tiles_down * BLOCK_O + tl.arange(0, BLOCK_O)
        j = first + tl.arange(0, BLOCK_F)
        row = product + o[:, None].to(tl.int64) * size
        if MULTIPLIES:
            U = tl.zeros((BLOCK_O, BLOCK_F), tl.float32)
            for start in range(first, tl.where(ok & (is_bad == 0), size, 0), BLOCK_K):
                i = start + tl.arange(0, BLOCK_K)
                y = tl.load(row + i[None, :], (o < outputs)[:, None] & (i < size)[None, :], other=0.0)
                w_mask = (j[None, :] <= i[:, None]) & (i < size)[:, None]
                w = tl.load(factor + i[:, None].to(tl.int64) * size + j[None, :], w_mask, other=0.0)
                U = tl.dot(y, w, U, input_precision=PRECISION)
        else:
            there = (o < outputs)[:, None] & (j < tl.where(is_bad, 0, size))[None, :]
            U = tl.load(row + j[None, :], there, other=0.0)
        U = U * (scale * shorter)

        weight_mask = (o < outputs)[:, None] & (j < features)[None, :]
        bias_mask = (o < outputs)[:, None] & ((j == features) & (j < size))[None, :]
        place = gradient + o[:, None].to(tl.int64) * features
        place += _places(j, taps, tap_stride, channel_stride)[None, :]
        bias_place = bias_grad + o[:, None] + (j * 0)[None, :]
        if (ok == 0) & (is_bad == 0):
            G = tl.load(place, weight_mask, other=0.0) + tl.load(bias_place, bias_mask, other=0.0)
            trace = tl.load(status)
            U = G * tl.where(is_finite(trace), scale / (trace + tl.load(status + 1)), float("nan"))
        tl.store(place, U, weight_mask)
        tl.store(bias_place, U, bias_mask)
