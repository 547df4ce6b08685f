# mypy: disable-error-code="no-untyped-call"
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
from torch import Tensor

from consequent.engines.gpu.kernels.dense_programs import (
    GRAM_COLUMNS,
    LEAST_BLOCKS,
    SOLVED,
    _factor,
    _gram,
    _look,
    _solve,
    _write,
)
from consequent.engines.gpu.kernels.dense_scratch import MOST_SHARES, MOST_SOLVERS, PARTS, floats_of_section
from consequent.engines.gpu.kernels.factor import factor_by, plan_team
from consequent.engines.gpu.kernels.launch import launch
from consequent.engines.gpu.kernels.table import device_guard, device_table, float_pair, int_pair

__all__ = ["MOST_ROWS", "DenseLayer", "DenseStep"]

MOST_ROWS = 128
MOST_ALONE = 64  # rows whose matrix one program factorises
PRECISION = "tf32x3"  # of matrix products: about that of float32; "ieee" is float32 itself, without tensor cores

_PROBE_TILE, _WRITE_TILE = (64, 128), (32, 64)  # outputs, features
_PROBERS = MOST_SHARES.value  # programs for all gradients together: about what a large GPU runs at once
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
        parts = min(-(-widest // (LEAST_BLOCKS.value * GRAM_COLUMNS.value)), PARTS.value)
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
        solvers = min(-(-outputs // min(self._block_rows, SOLVED.value)), MOST_SOLVERS.value)
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
            counts: int64, the first six of :data:`consequent.reports.counters.NAMES`, added to. Layers whose
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
    end = len(layers) * floats_of_section(block_rows)
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
