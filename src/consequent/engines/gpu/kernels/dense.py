# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The sample side of all dense layers of a step, in five kinds of launches and a table.

For every layer ``K = X Xᵀ + λI``, ``A = K⁻¹ ΔZ``, and then ``s c Aᵀ X`` in the place of the gradient, where c is the
scalar by which what is in ``.grad`` differs from ``ΔZᵀX``: see :mod:`consequent.maths.ridge` and
:mod:`consequent.statistics.rows`, which do the same with a few dozen torch calls per layer. A pivot that is rounding is
raised, as in :mod:`consequent.engines.gpu.kernels.factor`, which factorises K where there are more than 64 rows.

==========  ==========================================================================================================
launch      what its programs do
==========  ==========================================================================================================
``gram``    parts of ``X Xᵀ``, and of the probes ``X v``
``factor``  one for each layer sums the parts up and factorises K, or leaves that to teams of programs
``solve``   A for some outputs, and their part of the probes ``ΔZ u``
``look``    each reads a part of the gradient G for the probes ``u G v``; the last one finds c from all probes, and how
            much shorter the step must be for the bound
``write``   ``s c Aᵀ X`` over all tiles of all gradients
==========  ==========================================================================================================

The first two need inputs alone, the third no gradient of a weight: in a CUDA graph they run beside the forward and the
backward pass, the third in two launches. At the end of a backward pass, where there is no gradient yet, nobody looks.

Partial sums lie in a scratch buffer and are added in a fixed order: the results are bitwise reproducible.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from consequent.engines.gpu.kernels.counting import BOUNDED, EDITED, FALLEN_BACK, RESCUED, count, count_step
from consequent.engines.gpu.kernels.factor import factor_by, plan_team
from consequent.engines.gpu.kernels.launch import launch
from consequent.engines.gpu.kernels.table import (
    aligned_floats_at,
    device_guard,
    device_table,
    float_pair,
    floats_at,
    high_float,
    high_int,
    in_fours,
    int_pair,
    is_finite,
    low_float,
    low_int,
    shortening,
)
from consequent.maths.rounding import ELIMINATION, LOST_PIVOT

__all__ = ["MOST_ROWS", "DenseLayer", "DenseStep"]

MOST_ROWS = 128
MOST_ALONE = 64  # rows whose matrix one program factorises
PRECISION = "tf32x3"  # of matrix products: about that of float32; "ieee" is float32 itself, without tensor cores

_FIELDS = tl.constexpr(10)  # entries of the table per layer
_PARTS = tl.constexpr(12)  # into which the columns of X are cut
_MOST_SOLVERS = tl.constexpr(32)  # programs that share the outputs of a layer,
_SOLVED = tl.constexpr(64)  # and how many of them they solve for at once, at most
_PROBES = tl.constexpr(4)
_MOST_SHARES = tl.constexpr(512)  # of one gradient
# Trace, λ, whether K could be factorised, c, whether the gradient was edited, by what the bound shortens it, how many
# pivots were raised.
_STATUS = tl.constexpr(16)
_GRAM_COLUMNS = tl.constexpr(64)
_LEAST_BLOCKS = tl.constexpr(2)  # of so many columns in a part
_STRIP = tl.constexpr(8)  # rows of a tile that are probed at once
_NO_SUM_OVERFLOWS = tl.constexpr(1e35)  # sums of a thousand such numbers are finite
_FLOOR = tl.constexpr(ELIMINATION * torch.finfo(torch.float32).eps)
_LOST = tl.constexpr(LOST_PIVOT)
_PROBE_TILE, _WRITE_TILE = (64, 128), (32, 64)  # outputs, features
_PROBERS = _MOST_SHARES.value  # programs for all gradients together: about what a large GPU runs at once
_WRITERS = 1056
_WRITE_STAGES = 3  # of loads under way, where there is shared memory enough


class DenseLayer(NamedTuple):
    """One layer with few rows; float32, and what ``weight_grad`` and ``bias_grad`` hold is replaced."""

    inputs: Tensor  # X: [N, D], the columns side by side in memory
    output_grads: Tensor  # ΔZ: [N, O], the columns side by side in memory
    weight_grad: Tensor  # [O, D], contiguous
    bias_grad: Tensor | None  # [O], contiguous
    damping: float  # λ, or a fraction of the trace of ``X Xᵀ``
    of_trace: bool  # whether it is the latter
    scale: float  # s, what the loss was divided by
    tolerance: float  # how far the gradient may be from c ΔZᵀX by rounding, in units of ``‖ΔZ u‖ ‖X v‖``
    limit: float = math.inf  # of the change of the outputs, see consequent.maths.bound, s left out


class DenseStep:
    """The launches for all layers, one by one. Keeps alive what the table points to.

    Args:
        layers: all on one device, at least one.
        flags: int32, zeros, one element more than there are layers. The first becomes 1 if a layer's trace, solution or
            gradient is not finite, and others may set it as well before :meth:`write`.
    """

    def __init__(self, layers: Sequence[DenseLayer], flags: Tensor) -> None:
        self._layers = layers
        self._flags = flags
        self._block_rows = max([16, *(triton.next_power_of_2(layer.inputs.shape[0]) for layer in layers)])
        self._warps = 8 if self._block_rows > MOST_ALONE else 4
        values, floats, self._aligned = _table_of(layers, self._block_rows)
        self._scratch = torch.empty(floats, dtype=torch.float32, device=flags.device)
        self._inverses = self._statuses = self._scratch  # of teams
        with device_guard(flags.device):
            self._table = device_table(values, flags.device, key="dense")

    def used_on(self, stream: torch.cuda.Stream) -> None:
        """This stream, too, uses what was allocated here: nobody else gets it before that is over."""
        for tensor in (self._flags, self._scratch, self._table, self._inverses, self._statuses):
            tensor.record_stream(stream)

    def factorise(self) -> None:
        """The Gram matrices, whose factors stand for them from now on. Reads the inputs alone."""
        widest = max(layer.weight_grad.shape[1] for layer in self._layers)
        parts = min(-(-widest // (_LEAST_BLOCKS.value * _GRAM_COLUMNS.value)), _PARTS.value)
        self._launch(_gram, parts, (), (self._block_rows, PRECISION))
        warps = 1 if self._block_rows <= 32 else None
        if self._block_rows <= MOST_ALONE:
            self._launch(_factor, 1, (self._flags, self._scratch), (self._block_rows, True), warps=warps)
            return
        matrices = self._scratch.new_empty(len(self._layers), self._block_rows, self._block_rows)
        self._launch(_factor, 1, (self._flags, matrices), (self._block_rows, False), warps=warps)
        self._inverses, self._statuses = factor_by(plan_team(matrices), matrices, 0.0)

    def solve(self, first: int = 0, last: int | None = None) -> None:
        """The solutions, and the probes of the output gradients; after :meth:`factorise`.

        Args:
            first: layer to be solved for,
            last: and the one before which to stop.
        """
        layers = self._layers[first:last]
        outputs = max(layer.weight_grad.shape[0] for layer in layers)
        solvers = min(-(-outputs // min(self._block_rows, _SOLVED.value)), _MOST_SOLVERS.value)
        arguments = (self._inverses, self._statuses, self._flags, first)
        constants = (self._block_rows, self._block_rows <= MOST_ALONE, PRECISION)
        self._launch(_solve, solvers, arguments, constants, layers=len(layers))

    def look(self) -> None:
        """Find out what became of the gradients since the backward pass, which are only read; after :meth:`solve`."""
        share, probers = _shares(self._layers, _PROBE_TILE, _PROBERS)
        constants = (*_PROBE_TILE, self._block_rows, self._aligned)
        self._launch(_look, probers, (self._flags, share), constants)

    def write(self, counts: Tensor, *, steps: int = 0, skips: int = 0, is_looked_at: bool = True) -> None:
        """Write the gradients of all layers, or zeros into all of them if the first flag is set; after all others.

        Args:
            counts: int64 of six elements that are added to, :data:`consequent.reports.counters.NAMES`. Layers whose
                matrix could not be factorised, and layers whose gradient is no multiple of ``ΔZᵀX``, are counted; both
                get ``s G / (trace + λ)``. So are raised pivots and shortened steps.
            steps: added to the first count.
            skips: added to the second one if the first flag is set.
            is_looked_at: whether :meth:`look` was called. Otherwise what the gradients hold is not read, and what is
                not finite leaves its mark on the gradient of its layer, as in any backward pass.
        """
        flags = self._flags if is_looked_at else self._flags[1:]  # which are zero still
        share, writers = _shares_of_rows(self._layers, _WRITE_TILE, _WRITERS)
        constants = (*_WRITE_TILE, self._block_rows, PRECISION, self._aligned)
        stages = _WRITE_STAGES if self._block_rows <= 64 else 2
        self._launch(_write, writers, (flags, counts, share, steps, skips), constants, stages=stages)

    def _launch(
        self,
        kernel: Any,
        programs: int,
        arguments: tuple[Any, ...],
        constants: tuple[Any, ...],
        *,
        layers: int | None = None,
        warps: int | None = None,
        stages: int = 1,
    ) -> None:
        """Launch so many programs for each layer, or for so many layers."""
        with device_guard(self._flags.device):
            grid = (len(self._layers) if layers is None else layers, programs, 1)
            arguments = (self._table, self._scratch, *arguments)
            launch(kernel, grid, arguments, constants, num_warps=warps or self._warps, num_stages=stages)


def _shares(layers: Sequence[DenseLayer], tile: tuple[int, int], programs: int) -> tuple[int, int]:
    """How many tiles of a gradient a program takes, and how many programs the largest gradient then needs."""
    shapes = [layer.weight_grad.shape for layer in layers]
    tiles = [-(-outputs // tile[0]) * -(-features // tile[1]) for outputs, features in shapes]
    share = -(-sum(tiles) // programs)
    return share, -(-max(tiles) // share)


def _shares_of_rows(layers: Sequence[DenseLayer], tile: tuple[int, int], programs: int) -> tuple[int, int]:
    """The same where a program takes tiles of one row of tiles, so that there may be more programs."""
    shapes = [layer.weight_grad.shape for layer in layers]
    rows = [(-(-outputs // tile[0]), -(-features // tile[1])) for outputs, features in shapes]
    share = -(-sum([down * across for down, across in rows]) // programs)
    return share, max([down * -(-across // share) for down, across in rows])


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
            int_pair(layer.output_grads.stride(0), layer.of_trace),
            float_pair(layer.damping, layer.scale),
            float_pair(layer.tolerance, layer.limit),
            end,
        )
        end += outputs * block_rows
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


def _section(block_rows: int) -> int:
    """Floats of scratch per layer, the solution aside; as the kernels' own ``_*_at`` have it."""
    square, probes = block_rows * block_rows, block_rows * _PROBES.value
    floats: int = _PARTS.value * (square + probes) + square + block_rows
    floats += _MOST_SOLVERS.value * (probes + 1) + _MOST_SHARES.value * _PROBES.value + _STATUS.value
    return floats


@triton.jit
def _section_of(scratch, layer, BLOCK_N: tl.constexpr):
    """Where a layer's scratch begins: first the parts of the Gram matrix."""
    PARTS: tl.constexpr = _PARTS * (BLOCK_N * BLOCK_N + BLOCK_N * _PROBES)
    FACTOR: tl.constexpr = BLOCK_N * BLOCK_N + BLOCK_N
    FOUND: tl.constexpr = _MOST_SOLVERS * BLOCK_N * _PROBES + _MOST_SHARES * _PROBES
    return scratch + layer.to(tl.int64) * (PARTS + FACTOR + FOUND + _STATUS + _MOST_SOLVERS)


@triton.jit
def _right_at(section, BLOCK_N: tl.constexpr):
    """The parts of ``X v``."""
    return section + _PARTS * BLOCK_N * BLOCK_N


@triton.jit
def _factor_at(section, BLOCK_N: tl.constexpr):
    """V, row after row, then the pivots."""
    return _right_at(section, BLOCK_N) + _PARTS * BLOCK_N * _PROBES


@triton.jit
def _left_at(section, BLOCK_N: tl.constexpr):
    """The parts of ``ΔZ u``."""
    return _factor_at(section, BLOCK_N) + BLOCK_N * BLOCK_N + BLOCK_N


@triton.jit
def _found_at(section, BLOCK_N: tl.constexpr):
    """The shares of ``u G v``."""
    return _left_at(section, BLOCK_N) + _MOST_SOLVERS * BLOCK_N * _PROBES


@triton.jit
def _status_at(section, BLOCK_N: tl.constexpr):
    return _found_at(section, BLOCK_N) + _MOST_SHARES * _PROBES


@triton.jit
def _energies_at(section, BLOCK_N: tl.constexpr):
    """The parts of ``⟨U, G⟩``."""
    return _status_at(section, BLOCK_N) + _STATUS


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
    blocks = tl.cdiv(tl.cdiv(columns, _PARTS), _GRAM_COLUMNS)
    return tl.maximum(blocks, _LEAST_BLOCKS) * _GRAM_COLUMNS


@triton.jit(do_not_specialize=["table", "scratch"])
def _gram(table, scratch, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr):
    """Some columns of X: their share of ``X Xᵀ`` and of the probes."""
    layer, part = tl.program_id(0), tl.program_id(1)
    entry = table + layer * _FIELDS
    section = _section_of(scratch, layer, BLOCK_N)
    shape, widths = tl.load(entry + 4), tl.load(entry + 5)
    rows, features = low_int(shape), high_int(shape)
    chunk = _chunk(features)
    start = part * chunk
    if start < features:
        n = tl.arange(0, BLOCK_N)
        d = tl.arange(0, _GRAM_COLUMNS)
        gram = tl.zeros((BLOCK_N, BLOCK_N), tl.float32)
        probe = tl.arange(0, 16)  # more than are used: the least a product takes
        sums = tl.zeros((BLOCK_N, 16), tl.float32)
        row = floats_at(tl.load(entry)) + n[:, None].to(tl.int64) * high_int(widths)
        for first in range(start, tl.minimum(start + chunk, features), _GRAM_COLUMNS):
            x = tl.load(row + (first + d)[None, :], (n < rows)[:, None] & (first + d < features)[None, :], other=0.0)
            signs = _sign(_random_bits(first + d, 0)[:, None], probe[None, :])
            gram = tl.dot(x, tl.trans(x), gram, input_precision=PRECISION)
            sums = tl.dot(x, signs, sums, input_precision=PRECISION)
        tl.store(section + part * BLOCK_N * BLOCK_N + n[:, None] * BLOCK_N + n[None, :], gram)
        place = _right_at(section, BLOCK_N) + part * BLOCK_N * _PROBES
        tl.store(place + n[:, None] * _PROBES + probe[None, :], sums, (probe < _PROBES)[None, :])


@triton.jit(do_not_specialize=["table", "scratch", "flags", "matrices"])
def _factor(table, scratch, flags, matrices, BLOCK_N: tl.constexpr, ALONE: tl.constexpr):
    """The factors of ``K = X Xᵀ + λI`` for one layer; or K itself, for others to factorise."""
    layer = tl.program_id(0)
    entry = table + layer * _FIELDS
    section = _section_of(scratch, layer, BLOCK_N)
    shape, more = tl.load(entry + 4), tl.load(entry + 6)
    rows, features = low_int(shape), high_int(shape)
    n = tl.arange(0, BLOCK_N)
    square = n[:, None] * BLOCK_N + n[None, :]
    parts = tl.cdiv(features, _chunk(features))
    gram = tl.zeros((BLOCK_N, BLOCK_N), tl.float32)
    if ALONE:
        for part in tl.static_range(_PARTS):  # all are on their way at once
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
    status = _status_at(section, BLOCK_N)
    tl.store(status, trace)
    tl.store(status + 1, level)
    tl.store(status + 3, 1.0)  # unless somebody looks
    tl.store(status + 4, 0.0)
    tl.store(status + 5, 1.0)
    if ALONE:
        V, pivots, ok, raised = _factorised(K, BLOCK_N)
        factor = _factor_at(section, BLOCK_N)
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
    entry = table + layer * _FIELDS
    outputs = low_int(tl.load(entry + 5))
    BLOCK_O: tl.constexpr = min(BLOCK_N, _SOLVED)
    SLICE: tl.constexpr = BLOCK_N if ALONE else 32  # rows of V in shared memory at once
    blocks = tl.cdiv(outputs, BLOCK_O)
    solvers = tl.minimum(blocks, _MOST_SOLVERS)
    if program >= solvers:
        return
    section = _section_of(scratch, layer, BLOCK_N)
    solution = aligned_floats_at(tl.load(entry + 9) * 4 + scratch.to(tl.int64))
    rows = low_int(tl.load(entry + 4))
    n = tl.arange(0, BLOCK_N)
    row = floats_at(tl.load(entry + 1)) + n[:, None].to(tl.int64) * low_int(tl.load(entry + 6))
    factor = _factor_at(section, BLOCK_N)
    if ALONE == 0:
        factor = inverses + layer * BLOCK_N * BLOCK_N
    probe = tl.arange(0, 16)
    sums = tl.zeros((BLOCK_N, 16), tl.float32)
    infinite = 0
    energy = 0.0
    status = _status_at(section, BLOCK_N)
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
    tl.store(_energies_at(section, BLOCK_N) + program, energy)
    place = _left_at(section, BLOCK_N) + program * BLOCK_N * _PROBES
    tl.store(place + n[:, None] * _PROBES + probe[None, :], sums, (probe < _PROBES)[None, :])
    if infinite > 0:
        tl.store(flags, 1)


@triton.jit
def _compare(entry, section, shares, BLOCK_N: tl.constexpr):
    """The c with ``G = c ΔZᵀX`` by least squares over the probes, and whether most of them say that there is none."""
    shape = tl.load(entry + 4)
    rows, features, outputs = low_int(shape), high_int(shape), low_int(tl.load(entry + 5))
    tolerance = low_float(tl.load(entry + 8))
    probe = tl.arange(0, _PROBES)
    SIZE: tl.constexpr = BLOCK_N * _PROBES
    found = _summed(_found_at(section, BLOCK_N), shares, _MOST_SHARES, _PROBES)
    parts = tl.cdiv(features, _chunk(features))
    right = tl.reshape(_summed(_right_at(section, BLOCK_N), parts, 16, SIZE), (BLOCK_N, _PROBES))
    n = tl.arange(0, BLOCK_N)
    has_one = n < tl.where(tl.load(entry + 3) != 0, rows, 0)
    right += tl.where(has_one[:, None], _sign(_random_bits(features, 0), probe[None, :]), 0.0)
    BLOCK_O: tl.constexpr = min(BLOCK_N, _SOLVED)
    solvers = tl.minimum(tl.cdiv(outputs, BLOCK_O), _MOST_SOLVERS)
    left = tl.reshape(_summed(_left_at(section, BLOCK_N), solvers, _MOST_SOLVERS, SIZE), (BLOCK_N, _PROBES))
    expected = tl.sum(left * right, 0)
    sizes = tl.sqrt(tl.sum(left * left, 0)) * tl.sqrt(tl.sum(right * right, 0))
    largest = tl.max(tl.abs(expected), 0)
    unit = 1.0 / tl.where(largest > 0, largest, 1.0)  # squares of small numbers would vanish
    squared = tl.sum(expected * unit * (expected * unit), 0)
    factor = tl.where(squared > 0, tl.sum(found * unit * (expected * unit), 0) / squared, 1.0)
    off = tl.abs(found - factor * expected) > tolerance * tl.abs(factor) * sizes
    status = _status_at(section, BLOCK_N)
    tl.store(status + 3, factor)
    tl.store(status + 4, (tl.sum(off.to(tl.int32), 0) > _PROBES // 2).to(tl.float32))

    program = tl.arange(0, _MOST_SOLVERS)
    energies = tl.load(_energies_at(section, BLOCK_N) + program, program < solvers, other=0.0)
    energy = tl.sum(energies, 0) * factor * factor
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
    entry = table + layer * _FIELDS
    section = _section_of(scratch, layer, BLOCK_N)
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
    tl.store(_found_at(section, BLOCK_N) + program * _PROBES + probe, total)
    if tl.sum((tl.abs(total) < _NO_SUM_OVERFLOWS).to(tl.int32), 0) < _PROBES:
        tl.store(flags, 1)
    tl.debug_barrier()  # the whole program's part is there before it counts as done
    done = tl.atomic_add(flags + 1 + layer, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    if done == programs - 1:
        _compare(entry, section, programs, BLOCK_N)


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
    entry = table + layer * _FIELDS
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
    status = _status_at(_section_of(scratch, layer, BLOCK_N), BLOCK_N)
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
        count(counts, BOUNDED, ok & (edited == 0) & (shorter < 1))

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
            G = tl.load(row + d[None, :], mask, other=0.0) * plain_scale
            tl.store(row + d[None, :], tl.where(is_bad, 0.0, G), mask)
        b = tl.load(bias_grad + o, has_bias, other=0.0) * plain_scale
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
