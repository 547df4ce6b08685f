# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The sample side of all dense layers of a step, in three launches and a table.

For every layer ``K = X Xᵀ + λI``, ``A = K⁻¹ ΔZ``, and then ``s c Aᵀ X`` in the place of the gradient, where c is the
scalar by which what is in ``.grad`` differs from ``ΔZᵀX``: see :mod:`consequent.ridge` and :mod:`consequent.update`,
which do the same with a few dozen torch calls per layer.

=========  ===========================================================================================================
launch     what its programs do
=========  ===========================================================================================================
``scan``   parts of ``X Xᵀ`` and of the probes ``X v`` and ``ΔZ u``
``solve``  some factorise K and compute A, which takes time but few processors; the others meanwhile read the gradient G
           for the probes ``u G v``
``write``  c from the probes, ``Aᵀ X`` over all tiles of all gradients
=========  ===========================================================================================================

Partial sums lie in a scratch buffer and are added in a fixed order: the results are bitwise reproducible.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from consequent.kernels.table import (
    device_guard,
    device_table,
    float_pair,
    floats_at,
    high_float,
    high_int,
    int_pair,
    low_float,
    low_int,
)

__all__ = ["MOST_ROWS", "DenseLayer", "PreparedDense", "prepare_dense", "write_dense"]

MOST_ROWS = 64
PRECISION = "tf32x3"  # of matrix products: about that of float32; "ieee" is float32 itself, without tensor cores

_FIELDS = tl.constexpr(10)  # entries of the table per layer
_PARTS = tl.constexpr(8)  # into which the columns of X and of ΔZ are cut
_PROBES = tl.constexpr(4)
_MOST_SHARES = tl.constexpr(256)  # of one gradient
_STATUS = tl.constexpr(16)  # trace, λ, whether K could be factorised; from 4: expected probes, from 8: their sizes
_SCAN_COLUMNS = tl.constexpr(32)
_LEAST_BLOCKS = tl.constexpr(4)  # of so many columns in a part
_SOLVE_OUTPUTS = tl.constexpr(64)
_TILE_OUTPUTS = tl.constexpr(64)
_TILE_FEATURES = tl.constexpr(128)
_STRIP = tl.constexpr(8)  # rows of a tile that are probed at once
_NO_SUM_OVERFLOWS = tl.constexpr(1e36)  # sums of a hundred such numbers are finite
_ROUNDING = tl.constexpr(
    4 * torch.finfo(torch.float32).eps
)  # of one step of elimination, approximate divisions included
_MOST_SOLVERS = 16  # per layer; each then takes several chunks of outputs
_PROGRAMS = _MOST_SHARES.value  # for all gradients together: about what a large GPU runs at once


class DenseLayer(NamedTuple):
    """One layer with few rows; float32, and what ``weight_grad`` and ``bias_grad`` hold is replaced."""

    inputs: Tensor  # X: [N, D], the columns side by side in memory
    output_grads: Tensor  # ΔZ: [N, O], the columns side by side in memory
    weight_grad: Tensor  # [O, D], contiguous
    bias_grad: Tensor | None  # [O], contiguous
    damping: float  # λ
    relative: bool  # whether λ is a fraction of the mean squared norm of the inputs
    scale: float  # s, what the loss was divided by
    tolerance: float  # how far the gradient may be from c ΔZᵀX by rounding, in units of ``‖ΔZ u‖ ‖X v‖``


@dataclass
class PreparedDense:
    """What :func:`write_dense` needs; keeps alive what the table points to."""

    layers: Sequence[DenseLayer]
    table: Tensor
    scratch: Tensor
    bad: Tensor
    block_rows: int
    share: int  # tiles of a gradient per program
    programs: int  # for the largest gradient
    aligned: bool


def prepare_dense(layers: Sequence[DenseLayer], bad: Tensor) -> PreparedDense:
    """Solve for all layers; their gradients are read and not yet written.

    Args:
        layers: all on one device.
        bad: int32 of one element; becomes 1 if a layer's trace, solution or gradient is not finite.
    """
    device = bad.device
    block_rows = max([16, *(triton.next_power_of_2(layer.inputs.shape[0]) for layer in layers)])
    values, floats, aligned = _table_of(layers, block_rows)
    tiles = [_tiles(layer) for layer in layers]
    share = -(-sum(tiles) // _PROGRAMS)
    programs = max((-(-number // share) for number in tiles), default=0)
    outputs = max((layer.weight_grad.shape[0] for layer in layers), default=0)
    widest = max((layer.weight_grad.shape[1] for layer in layers), default=0)
    parts = min(-(-max(outputs, widest) // (_LEAST_BLOCKS.value * _SCAN_COLUMNS.value)), _PARTS.value)
    solvers = min(-(-outputs // (2 * _SOLVE_OUTPUTS.value)), _MOST_SOLVERS)
    scratch = torch.empty(floats, device=device)
    with device_guard(device):
        table = device_table(values, device, key="dense")
        if layers:
            _scan[(len(layers), 2 * parts)](table, scratch, block_rows, PRECISION)
            grid = (len(layers), solvers + programs)
            _solve_and_probe[grid](table, scratch, bad, solvers, share, block_rows, PRECISION, aligned, num_stages=1)
    return PreparedDense(layers, table, scratch, bad, block_rows, share, programs, aligned)


def write_dense(prepared: PreparedDense, counts: Tensor) -> None:
    """Write the gradients of all layers, or zeros into all of them if ``bad`` is set by now.

    Args:
        prepared: by :func:`prepare_dense`.
        counts: int64 of three elements, the first two of which are added to: layers whose matrix could not be
            factorised, and layers whose gradient is no multiple of ``ΔZᵀX``. Both get ``s G / (trace + λ)``.
    """
    if not prepared.layers:
        return
    grid = (len(prepared.layers), prepared.programs)
    with device_guard(prepared.bad.device):
        _write[grid](
            prepared.table,
            prepared.scratch,
            prepared.bad,
            counts,
            prepared.share,
            prepared.block_rows,
            PRECISION,
            prepared.aligned,
            num_stages=1,
        )


def _table_of(layers: Sequence[DenseLayer], block_rows: int) -> tuple[list[int], int, bool]:
    """The table, how many floats of scratch it counts on, and whether four floats can be moved at a time."""
    values: list[int] = []
    end = len(layers) * _section(block_rows)
    divisible = 0
    for layer in layers:
        rows, features, outputs = _checked_shape(layer)
        inputs, weight_grad = layer.inputs.data_ptr(), layer.weight_grad.data_ptr()
        input_stride = layer.inputs.stride(0)
        values += (
            inputs,
            layer.output_grads.data_ptr(),
            weight_grad,
            0 if layer.bias_grad is None else layer.bias_grad.data_ptr(),
            int_pair(rows, features),
            int_pair(outputs, input_stride),
            int_pair(layer.output_grads.stride(0), layer.relative),
            float_pair(layer.damping, layer.scale),
            float_pair(layer.tolerance, 0.0),
            end,
        )
        end += _rounded_up(rows * outputs)
        divisible |= features | input_stride | (inputs | weight_grad) >> 2
    return values, end, divisible & 3 == 0


def _checked_shape(layer: DenseLayer) -> tuple[int, int, int]:
    rows, features = layer.inputs.shape
    outputs = layer.output_grads.shape[1]
    if not 1 <= rows <= MOST_ROWS:
        raise ValueError(f"inputs must have 1 to {MOST_ROWS} rows, got {rows}")
    if layer.output_grads.shape[0] != rows or layer.weight_grad.shape != (outputs, features):
        raise ValueError(
            f"inputs [{rows}, {features}], output_grads {list(layer.output_grads.shape)} and "
            f"weight_grad {list(layer.weight_grad.shape)} do not fit together"
        )
    side_by_side = layer.inputs.stride(1) == 1 or features == 1
    side_by_side &= layer.output_grads.stride(1) == 1 or outputs == 1
    if not (side_by_side and layer.weight_grad.is_contiguous()):
        raise ValueError("inputs and output_grads need columns that are side by side, weight_grad must be contiguous")
    for tensor in layer[:4]:
        if tensor is not None and tensor.dtype != torch.float32:
            raise TypeError(f"the tensors of a layer must be float32, got {tensor.dtype}")
    if layer.bias_grad is not None and (layer.bias_grad.shape != (outputs,) or not layer.bias_grad.is_contiguous()):
        raise ValueError(f"bias_grad must be contiguous [{outputs}], got {list(layer.bias_grad.shape)}")
    return rows, features, outputs


def _tiles(layer: DenseLayer) -> int:
    outputs, features = layer.weight_grad.shape
    tiles: int = -(-outputs // _TILE_OUTPUTS.value) * -(-features // _TILE_FEATURES.value)
    return tiles


def _section(block_rows: int) -> int:
    """Floats of scratch per layer, the solution aside; as the kernels' own ``_*_at`` have it."""
    parts = _PARTS.value * (block_rows * block_rows + 2 * block_rows * _PROBES.value)
    floats: int = parts + _MOST_SHARES.value * _PROBES.value + _STATUS.value
    return floats


def _rounded_up(floats: int) -> int:
    return (floats + 31) & ~31


@triton.jit
def _section_of(scratch, layer, BLOCK_N: tl.constexpr):
    """Where a layer's scratch begins: first the parts of the Gram matrix."""
    SECTION: tl.constexpr = _PARTS * (BLOCK_N * BLOCK_N + 2 * BLOCK_N * _PROBES) + _MOST_SHARES * _PROBES + _STATUS
    return scratch + layer.to(tl.int64) * SECTION


@triton.jit
def _sums_at(section, BLOCK_N: tl.constexpr):
    """The parts of ``X v``, then those of ``ΔZ u``."""
    return section + _PARTS * BLOCK_N * BLOCK_N


@triton.jit
def _found_at(section, BLOCK_N: tl.constexpr):
    """The parts of ``u G v``."""
    return _sums_at(section, BLOCK_N) + _PARTS * 2 * BLOCK_N * _PROBES


@triton.jit
def _status_at(section, BLOCK_N: tl.constexpr):
    return _found_at(section, BLOCK_N) + _MOST_SHARES * _PROBES


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
def _is_finite(values):
    return tl.abs(values) < float("inf")


@triton.jit
def _chunk(columns):
    """How many columns a part has: never so few that summing up the parts would be the greater work."""
    blocks = tl.cdiv(tl.cdiv(columns, _PARTS), _SCAN_COLUMNS)
    return tl.maximum(blocks, _LEAST_BLOCKS) * _SCAN_COLUMNS


@triton.jit
def _scan(table, scratch, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr):
    """A program takes some columns of X, or of ΔZ: their share of ``X Xᵀ`` and of the probes."""
    layer, program = tl.program_id(0), tl.program_id(1)
    entry = table + layer * _FIELDS
    section = _section_of(scratch, layer, BLOCK_N)
    shape, widths, more = tl.load(entry + 4), tl.load(entry + 5), tl.load(entry + 6)
    rows = low_int(shape)
    parts = tl.num_programs(1) // 2
    of_outputs = program >= parts
    matrix = floats_at(tl.load(entry + of_outputs.to(tl.int32)))
    columns = tl.where(of_outputs, low_int(widths), high_int(shape))
    stride = tl.where(of_outputs, low_int(more), high_int(widths))
    family = of_outputs.to(tl.uint32)
    part = program % parts
    chunk = _chunk(columns)
    start = part * chunk
    if start < columns:
        n = tl.arange(0, BLOCK_N)
        d = tl.arange(0, _SCAN_COLUMNS)
        probe = tl.arange(0, 16)  # more than are used: the least a product takes
        gram = tl.zeros((BLOCK_N, BLOCK_N), tl.float32)
        sums = tl.zeros((BLOCK_N, 16), tl.float32)
        row = matrix + n[:, None].to(tl.int64) * stride
        for first in range(start, tl.minimum(start + chunk, columns), _SCAN_COLUMNS):
            x = tl.load(row + (first + d)[None, :], (n < rows)[:, None] & (first + d < columns)[None, :], other=0.0)
            signs = _sign(_random_bits(first + d, family)[:, None], probe[None, :])
            gram = tl.dot(x, tl.trans(x), gram, input_precision=PRECISION)
            sums = tl.dot(x, signs, sums, input_precision=PRECISION)
        if program < parts:
            tl.store(section + part * BLOCK_N * BLOCK_N + n[:, None] * BLOCK_N + n[None, :], gram)
        place = _sums_at(section, BLOCK_N) + (of_outputs.to(tl.int32) * _PARTS + part) * BLOCK_N * _PROBES
        tl.store(place + n[:, None] * _PROBES + probe[None, :], sums, (probe < _PROBES)[None, :])


@triton.jit(do_not_specialize=["solvers", "share"])
def _solve_and_probe(
    table,
    scratch,
    bad,
    solvers,
    share,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    layer, program = tl.program_id(0), tl.program_id(1)
    entry = table + layer * _FIELDS
    section = _section_of(scratch, layer, BLOCK_N)
    if program < solvers:
        _solve(entry, section, scratch, bad, program, solvers, BLOCK_N, PRECISION)
    else:
        _probe(entry, _found_at(section, BLOCK_N), bad, program - solvers, share, ALIGNED)


@triton.jit
def _solve(entry, section, scratch, bad, program, programs, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr):
    """``A = K⁻¹ ΔZ`` for some of the outputs; every program factorises K for itself."""
    shape, widths, more = tl.load(entry + 4), tl.load(entry + 5), tl.load(entry + 6)
    rows, features, outputs = low_int(shape), high_int(shape), low_int(widths)
    numbers = tl.load(entry + 7)
    has_bias = tl.load(entry + 3) != 0
    n = tl.arange(0, BLOCK_N)
    square = n[:, None] * BLOCK_N + n[None, :]
    parts = tl.cdiv(features, _chunk(features))
    gram = tl.zeros((BLOCK_N, BLOCK_N), tl.float32)
    for part in tl.static_range(_PARTS):
        gram += tl.load(
            section + part * BLOCK_N * BLOCK_N + square, mask=n[:, None] < tl.where(part < parts, BLOCK_N, 0), other=0.0
        )
    inside = (n < rows)[:, None] & (n < rows)[None, :]
    on_diagonal = n[:, None] == n[None, :]
    gram += tl.where(inside & has_bias, 1.0, 0.0)
    trace = tl.sum(tl.sum(tl.where(on_diagonal, gram, 0.0), 1), 0)
    damping = low_float(numbers)
    relative = tl.where(trace > 0, damping / rows.to(tl.float32) * trace, 1.0)
    level = tl.where((high_int(more) != 0) & (damping > 0), relative, damping)
    K = gram + tl.where(on_diagonal, tl.where(inside, level, 1.0), 0.0)
    V, pivots, ok = _factorised(K, rows, BLOCK_N)

    finite = _is_finite(trace)
    solution = floats_at(tl.load(entry + 9) * 4 + scratch.to(tl.int64))
    output_grads = floats_at(tl.load(entry + 1))
    for first in range(program * _SOLVE_OUTPUTS, outputs, programs * _SOLVE_OUTPUTS):
        o = first + tl.arange(0, _SOLVE_OUTPUTS)
        mask = (n < rows)[:, None] & (o < outputs)[None, :]
        wanted = tl.load(output_grads + n[:, None].to(tl.int64) * low_int(more) + o[None, :], mask, other=0.0)
        halfway = tl.dot(V, wanted, input_precision=PRECISION) / pivots[:, None]
        A = tl.dot(tl.trans(V), halfway, input_precision=PRECISION)
        finite = finite & ((ok == 0) | (tl.sum(tl.sum((_is_finite(A) == 0).to(tl.int32), 1), 0) == 0))
        tl.store(solution + n[:, None].to(tl.int64) * outputs + o[None, :], A, mask)
    if finite == 0:
        tl.store(bad, 1)
    if program == 0:
        status = _status_at(section, BLOCK_N)
        tl.store(status, trace)
        tl.store(status + 1, level)
        tl.store(status + 2, ok.to(tl.float32))
        _store_expected(status, _sums_at(section, BLOCK_N), rows, features, outputs, has_bias, BLOCK_N)


@triton.jit
def _factorised(K, rows, BLOCK_N: tl.constexpr):
    """The unit lower triangular V and the pivots of ``K⁻¹ = Vᵀ pivots⁻¹ V``, and whether K is positive definite.

    It is Cholesky's factorisation without square roots, with the inverse of the factor in the place of the factor: one
    pass over the columns, where a factorisation and two triangular solves would take three. A pivot below the rounding
    of the entry that it came from says nothing about K, and fails.
    """
    n = tl.arange(0, BLOCK_N)
    # Rows and pivots are vectors along the axis that one warp holds: finding a pivot needs no barrier.
    pivots = tl.sum(tl.where(n[:, None] == n[None, :], K, 0.0), 0)
    rounding = pivots * _ROUNDING
    M = K  # from the left V grows over what is left to eliminate
    for k in range(rows):
        column = tl.sum(tl.where((n == k)[None, :], M, 0.0), 1)
        row = tl.sum(tl.where((n == k)[:, None], M, 0.0), 0)
        reciprocal = 1.0 / tl.sum(tl.where(n == k, pivots, 0.0), 0)
        pivots -= tl.where(n > k, row * row * reciprocal, 0.0)
        multipliers = tl.where(n > k, column * reciprocal, 0.0)[:, None]
        M = tl.where((n == k)[None, :], -multipliers, M - multipliers * row[None, :])
    ok = tl.min((pivots > rounding).to(tl.int32), 0) == 1
    V = tl.where(n[:, None] > n[None, :], M, tl.where(n[:, None] == n[None, :], 1.0, 0.0))
    return V, pivots, ok


@triton.jit
def _store_expected(status, sums, rows, features, outputs, has_bias, BLOCK_N: tl.constexpr):
    """``(ΔZ u) · (X v)`` and ``‖ΔZ u‖ ‖X v‖`` of every probe."""
    n = tl.arange(0, BLOCK_N)
    probe = tl.arange(0, _PROBES)
    place = n[:, None] * _PROBES + probe[None, :]
    bias_sign = _sign(_random_bits(features, 0), probe[None, :])
    right = tl.where((n < rows)[:, None] & has_bias, bias_sign, 0.0)
    left = tl.zeros((BLOCK_N, _PROBES), tl.float32)
    right_parts = tl.cdiv(features, _chunk(features))
    left_parts = tl.cdiv(outputs, _chunk(outputs))
    for part in tl.static_range(_PARTS):
        step = part * BLOCK_N * _PROBES
        right += tl.load(sums + step + place, mask=n[:, None] < tl.where(part < right_parts, BLOCK_N, 0), other=0.0)
        left_place = sums + _PARTS * BLOCK_N * _PROBES + step + place
        left += tl.load(left_place, mask=n[:, None] < tl.where(part < left_parts, BLOCK_N, 0), other=0.0)
    tl.store(status + 4 + probe, tl.sum(left * right, 0))
    tl.store(status + 8 + probe, tl.sqrt(tl.sum(left * left, 0)) * tl.sqrt(tl.sum(right * right, 0)))


@triton.jit
def _probe(entry, found, bad, program, share, ALIGNED: tl.constexpr):
    """This program's share of ``u G v`` for every probe: some tiles of the gradient, each read once."""
    outputs, features = low_int(tl.load(entry + 5)), high_int(tl.load(entry + 4))
    bias_address = tl.load(entry + 3)
    gradient = floats_at(tl.load(entry + 2))
    if ALIGNED:
        gradient = tl.multiple_of(gradient, 16)
        features = tl.multiple_of(features, 4)
    tiles_across = tl.cdiv(features, _TILE_FEATURES)
    tiles = tiles_across * tl.cdiv(outputs, _TILE_OUTPUTS)
    programs = tl.cdiv(tiles, share)
    sum_0 = tl.zeros((_STRIP, _TILE_FEATURES), tl.float32)
    sum_1 = tl.zeros((_STRIP, _TILE_FEATURES), tl.float32)
    sum_2 = tl.zeros((_STRIP, _TILE_FEATURES), tl.float32)
    sum_3 = tl.zeros((_STRIP, _TILE_FEATURES), tl.float32)
    for tile in range(program, tl.where(program < programs, tiles, 0), programs):
        d = tile % tiles_across * _TILE_FEATURES + tl.arange(0, _TILE_FEATURES)
        part_0 = tl.zeros((_STRIP, _TILE_FEATURES), tl.float32)
        part_1 = tl.zeros((_STRIP, _TILE_FEATURES), tl.float32)
        part_2 = tl.zeros((_STRIP, _TILE_FEATURES), tl.float32)
        part_3 = tl.zeros((_STRIP, _TILE_FEATURES), tl.float32)
        for strip in tl.static_range(0, _TILE_OUTPUTS, _STRIP):
            o = tile // tiles_across * _TILE_OUTPUTS + strip + tl.arange(0, _STRIP)
            place = o[:, None].to(tl.int64) * features + d[None, :]
            g = tl.load(gradient + place, (o < outputs)[:, None] & (d < features)[None, :], other=0.0)
            u = _random_bits(o, 1)
            part_0 += g * _sign(u, 0)[:, None]
            part_1 += g * _sign(u, 1)[:, None]
            part_2 += g * _sign(u, 2)[:, None]
            part_3 += g * _sign(u, 3)[:, None]
        v = _random_bits(d, 0)
        sum_0 += part_0 * _sign(v, 0)[None, :]
        sum_1 += part_1 * _sign(v, 1)[None, :]
        sum_2 += part_2 * _sign(v, 2)[None, :]
        sum_3 += part_3 * _sign(v, 3)[None, :]
    probe = tl.arange(0, _PROBES)
    total = tl.where(probe == 0, tl.sum(tl.sum(sum_0, 1), 0), tl.sum(tl.sum(sum_1, 1), 0))
    total = tl.where(probe == 2, tl.sum(tl.sum(sum_2, 1), 0), total)
    total = tl.where(probe == 3, tl.sum(tl.sum(sum_3, 1), 0), total)
    if (program == 0) & (bias_address != 0):
        total += _probed_bias(floats_at(bias_address), features, outputs)
    if program < programs:
        tl.store(found + program * _PROBES + probe, total)
        if tl.sum((tl.abs(total) < _NO_SUM_OVERFLOWS).to(tl.int32), 0) < _PROBES:
            tl.store(bad, 1)


@triton.jit
def _probed_bias(bias_grad, features, outputs):
    """The bias column's share of ``u G v``."""
    probe = tl.arange(0, _PROBES)
    i = tl.arange(0, 256)
    sums = tl.zeros((256, _PROBES), tl.float32)
    for first in range(0, outputs, 256):
        b = tl.load(bias_grad + first + i, first + i < outputs, other=0.0)
        sums += b[:, None] * _sign(_random_bits(first + i, 1)[:, None], probe[None, :])
    return tl.sum(sums, 0) * _sign(_random_bits(features, 0), probe)


@triton.jit(do_not_specialize=["share"])
def _write(
    table,
    scratch,
    bad,
    counts,
    share,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """``s c Aᵀ X`` for some tiles of one layer's gradient."""
    layer, program = tl.program_id(0), tl.program_id(1)
    entry = table + layer * _FIELDS
    shape, widths = tl.load(entry + 4), tl.load(entry + 5)
    rows, features, outputs, input_stride = low_int(shape), high_int(shape), low_int(widths), high_int(widths)
    tiles_across = tl.cdiv(features, _TILE_FEATURES)
    tiles = tiles_across * tl.cdiv(outputs, _TILE_OUTPUTS)
    programs = tl.cdiv(tiles, share)
    if program >= programs:
        return
    inputs, gradient = floats_at(tl.load(entry)), floats_at(tl.load(entry + 2))
    bias_address = tl.load(entry + 3)
    bias_grad = floats_at(bias_address)
    solution = floats_at(tl.load(entry + 9) * 4 + scratch.to(tl.int64))
    scale = high_float(tl.load(entry + 7))
    is_bad = tl.load(bad) != 0
    section = _section_of(scratch, layer, BLOCK_N)
    status = _status_at(section, BLOCK_N)
    found = _found_at(section, BLOCK_N)
    factor, edited = _compare(status, found, programs, low_float(tl.load(entry + 8)))
    ok = tl.load(status + 2) != 0
    shortening = scale / (tl.load(status) + tl.load(status + 1))
    if (program == 0) & (is_bad == 0):
        tl.atomic_add(counts, (ok == 0).to(tl.int64))
        tl.atomic_add(counts + 1, edited.to(tl.int64))

    if ALIGNED:
        inputs = tl.multiple_of(inputs, 16)
        gradient = tl.multiple_of(gradient, 16)
        features = tl.multiple_of(features, 4)
        input_stride = tl.multiple_of(input_stride, 4)
    n = tl.arange(0, BLOCK_N)
    for tile in range(program, tiles, programs):
        o = tile // tiles_across * _TILE_OUTPUTS + tl.arange(0, _TILE_OUTPUTS)
        d = tile % tiles_across * _TILE_FEATURES + tl.arange(0, _TILE_FEATURES)
        mask = (o < outputs)[:, None] & (d < features)[None, :]
        place = gradient + o[:, None].to(tl.int64) * features + d[None, :]
        has_bias = o < tl.where((bias_address != 0) & (tile % tiles_across == 0), outputs, 0)
        if is_bad:
            tl.store(place, tl.zeros((_TILE_OUTPUTS, _TILE_FEATURES), tl.float32), mask)
            tl.store(bias_grad + o, tl.zeros((_TILE_OUTPUTS,), tl.float32), has_bias)
        elif edited | (ok == 0):
            tl.store(place, tl.load(place, mask, other=0.0) * shortening, mask)
            tl.store(bias_grad + o, tl.load(bias_grad + o, has_bias, other=0.0) * shortening, has_bias)
        else:
            row = n.to(tl.int64)
            A = tl.load(
                solution + row[None, :] * outputs + o[:, None], (n < rows)[None, :] & (o < outputs)[:, None], other=0.0
            )
            X = tl.load(
                inputs + row[:, None] * input_stride + d[None, :],
                (n < rows)[:, None] & (d < features)[None, :],
                other=0.0,
            )
            A = A * (factor * scale)
            tl.store(place, tl.dot(A, X, input_precision=PRECISION), mask)
            tl.store(bias_grad + o, tl.sum(A, 1), has_bias)


@triton.jit
def _compare(status, found, parts, tolerance):
    """The c with ``G = c ΔZᵀX`` by least squares over the probes, and whether most of them say that there is none."""
    probe = tl.arange(0, _PROBES)
    part = tl.arange(0, _MOST_SHARES)
    place = part[:, None] * _PROBES + probe[None, :]
    found = tl.sum(tl.load(found + place, mask=place < parts * _PROBES, other=0.0), 0)
    expected = tl.load(status + 4 + probe)
    sizes = tl.load(status + 8 + probe)
    largest = tl.max(tl.abs(expected), 0)
    unit = 1.0 / tl.where(largest > 0, largest, 1.0)  # squares of small numbers would vanish
    squared = tl.sum(expected * unit * (expected * unit), 0)
    factor = tl.where(squared > 0, tl.sum(found * unit * (expected * unit), 0) / squared, 1.0)
    off = tl.abs(found - factor * expected) > tolerance * tl.abs(factor) * sizes
    return factor, tl.sum(off.to(tl.int32), 0) > _PROBES // 2
