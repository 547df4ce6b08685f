"""All layers of a step in a few launches: the records that the GPU kernels take, and what they make of them.

The mathematics is that of :mod:`consequent.engines.plain`, whose plain-torch form is the reference; there each layer
costs a few dozen launches, here all of them share a handful.
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from consequent.capture.edits import rounding
from consequent.capture.records import Record
from consequent.capture.torch_internals import graph_is_being_captured
from consequent.capture.use import Use
from consequent.engines.engine import Outcome, Work
from consequent.engines.gpu import kernels
from consequent.engines.gpu.streams import Fork, factor_streams, side_stream, switched_to
from consequent.engines.inverse_factor import InverseFactor
from consequent.maths.damping import Damping
from consequent.statistics.gradients import trained
from consequent.statistics.kept_inverses import Kept
from consequent.statistics.rows import Rows
from consequent.statistics.solution import Solution

if TYPE_CHECKING:  # imported where they are needed: Triton is not everywhere
    from consequent.engines.gpu.kernels.dense import DenseLayer, DenseStep
    from consequent.engines.gpu.kernels.features import FeatureLayer, KeptLayers, PreparedFeatures


@dataclass
class KernelSolution(Solution):
    """One of those that the kernels have found together; only they know it.

    Attributes:
        step: all of them.
    """

    step: "FusedStep | None" = None


class ByKernels:
    """Takes the usual layers on a GPU that is not waited for, if all works are on one."""

    def solve(self, works: Sequence[Work]) -> list[Solution]:
        """Solutions for the works that there are kernels for."""
        devices = {work.record.weight.device for work in works}
        if len(devices) != 1 or any(work.may_wait for work in works) or not kernels.run_on(*devices):
            return []
        step = FusedStep(*devices)
        taken = [work.record for work in works if step.take(work)]
        if not taken:
            return []
        step.prepare()
        return [KernelSolution(record, step.sides[record], finite=True, step=step) for record in taken]

    def write(self, solutions: Sequence[Solution], outcome: Outcome) -> None:
        """Write all gradients; the kernels look for themselves whether the step is one to be taken."""
        step = fused_step_of(solutions)
        if step is not None:
            counts = outcome.counts(step.device)
            step.write(counts, counts_step=outcome.counts_step, counts_skip=outcome.counts_skip)


def fused_step_of(solutions: Sequence[Solution]) -> "FusedStep | None":
    """What the kernels have prepared, if any of the solutions is theirs."""
    return next((solution.step for solution in solutions if isinstance(solution, KernelSolution)), None)


class FusedStep:
    """The layers that the kernels correct together, all on one device.

    Args:
        device: theirs.
        has_gradients: whether there are gradients already, which may have been edited: at the step. Then NaN or inf
            anywhere zeroes all; at the end of a backward pass, it stays in the gradient of its layer.

    Attributes:
        sides: on which each record is solved.
        is_bad: int32 of one element, on the device: 1 if NaN or inf was met. Others may set it as well.
    """

    def __init__(self, device: torch.device, *, has_gradients: bool = True) -> None:
        self.device = device
        self.sides: dict[Record, str] = {}
        self._has_gradients = has_gradients
        self._dense: list[DenseLayer] = []
        self._features: list[FeatureLayer] = []
        self._kept: dict[tuple[int, int], list[tuple[Kept, FeatureLayer]]] = {}  # alike: inverted together, one shape
        self._inputs_there: list[torch.cuda.Event | None] = []  # of the dense layers, in a CUDA graph
        self._output_grads_there: list[torch.cuda.Event | None] = []
        self._dense_step: DenseStep | None = None
        self._prepared: PreparedFeatures | None = None
        self.is_bad: Tensor

    def take(self, work: Work) -> bool:
        """Take the work if there is a kernel for it."""
        record, damping = work.record, work.damping
        grads = grads_of_one_layer(record)
        if grads is None or damping.value == 0 or record.weight.device != self.device:
            return False
        if type(record.statistic) is Rows:
            return self._take_dense(work, *grads)
        if isinstance(record.statistic, Kept):
            return self._take_kept(work, record.statistic, *grads)
        factor = record.captured.factor_for(damping)
        if factor is None:
            return False
        self.add_features(*grads, factor, work.scale, work.limit)
        self.sides[record] = "features"
        return True

    def add_features(
        self,
        weight_grad: Tensor,
        bias_grad: Tensor | None,
        factor: InverseFactor,
        scale: float,
        limit: float | None = None,
    ) -> None:
        """One more layer on the feature side.

        Args:
            weight_grad: G, float32, contiguous or channels last; replaced by :meth:`write`.
            bias_grad: likewise.
            factor: of the second moment of the inputs.
            scale: what the loss was divided by.
            limit: of the change of the outputs, if there is one.
        """
        from consequent.engines.gpu.kernels.features import FeatureLayer

        most = math.inf if limit is None else limit
        self._features.append(FeatureLayer(weight_grad, bias_grad, factor.inverse, factor.status, scale, most))

    def _take_kept(self, work: Work, kept: Kept, weight_grad: Tensor, bias_grad: Tensor | None) -> bool:
        from consequent.engines.gpu.kernels.features import FeatureLayer

        inverses, place, growth = kept.inverses, kept.place, kept.growth
        if inverses.matrices.dtype != torch.float32:
            return False
        # Of N S + λI that has grown, with ``energy / growth`` against ``growth · trace``.
        limit = math.inf if work.limit is None else work.limit * growth
        layer = FeatureLayer(
            weight_grad, bias_grad, inverses.matrices[place], inverses.status[place], work.scale / growth, limit
        )
        self._kept.setdefault((id(inverses), len(weight_grad)), []).append((kept, layer))
        self.sides[work.record] = "features"
        return True

    def _kept_layers(self) -> "list[KeptLayers]":
        from consequent.engines.gpu.kernels.features import KeptLayers

        found = []
        for pairs in self._kept.values():
            all_of_them = pairs[0][0].inverses.at([kept.place for kept, _ in pairs])
            found.append(KeptLayers([layer for _, layer in pairs], all_of_them.matrices.flatten(0, 1)))
        return found

    def _take_dense(self, work: Work, weight_grad: Tensor, bias_grad: Tensor | None) -> bool:
        record = work.record
        use = record.uses[0]
        use.refuse_overwritten_inputs()
        if len(record.uses) > 1 or not fits_dense_kernel(use) or not weight_grad.is_contiguous():
            return False
        self.add_dense(use, weight_grad, bias_grad, work.damping, work.scale, rounding(record), work.limit)
        self.sides[record] = "samples"
        return True

    def add_dense(
        self,
        use: Use,
        weight_grad: Tensor,
        bias_grad: Tensor | None,
        damping: Damping,
        scale: float,
        tolerance: float = 0.0,
        limit: float | None = None,
    ) -> None:
        """One more layer on the sample side.

        Args:
            use: one that :func:`fits_dense_kernel`.
            weight_grad: ``[O, D]``, float32, contiguous: replaced by :meth:`write`.
            bias_grad: likewise.
            damping: λ.
            scale: what the loss was divided by.
            tolerance: how far the gradient may be from a multiple of ``ΔZᵀX`` by rounding.
            limit: of the change of the outputs, if there is one.
        """
        from consequent.engines.gpu.kernels.dense import DenseLayer

        inputs, output_grad = use.inputs, use.output_grad
        assert inputs is not None
        assert output_grad is not None
        X, dZ = (_rows(matrix) for matrix in (inputs, output_grad))
        level = damping.level(use.rows, use.features + (bias_grad is not None))
        most = math.inf if limit is None else limit
        layer = DenseLayer(X, dZ, weight_grad, bias_grad, level.value, level.of_trace, scale, tolerance, most)
        self._dense.append(layer)
        self._inputs_there.append(use.inputs_there if X.data_ptr() == inputs.data_ptr() else None)
        self._output_grads_there.append(use.output_grad_there if dZ.data_ptr() == output_grad.data_ptr() else None)

    def prepare(self) -> None:
        """Solve for all layers; no gradient is written yet."""
        aside = self._fork()
        with nullcontext() if aside is None else switched_to(aside.stream):
            flags = torch.zeros(1 + len(self._dense), dtype=torch.int32, device=self.device)
            if self._dense:
                from consequent.engines.gpu.kernels.dense import DenseStep

                self._dense_step = DenseStep(self._dense, flags)
                self._dense_step.factorise()
                if aside is None:
                    self._dense_step.solve()
                else:
                    self._dense_step.used_on(aside.origin)
                    self._solve_aside(self._dense_step, aside)
        if aside is not None:
            aside.join()
        if self._dense_step is not None and self._has_gradients:
            self._dense_step.look()
        self.is_bad = flags[:1]
        if self._features or self._kept:
            from consequent.engines.gpu.kernels.features import prepare_features

            self._prepared = prepare_features(self._features, self.is_bad, self._kept_layers())

    def write(self, counts: Tensor, *, counts_step: bool = False, counts_skip: bool = False) -> None:
        """Write all gradients, or zeros into all of them if NaN or inf was met.

        Args:
            counts: int64, on the device, an element for each of :data:`consequent.reports.counters.NAMES`; added to.
            counts_step: whether this is counted as a step,
            counts_skip: and, if NaN or inf was met, as a skipped one.
        """
        steps, skips = int(counts_step), int(counts_skip)
        if self._dense_step is not None:
            self._dense_step.write(counts, steps=steps, skips=skips, is_looked_at=self._has_gradients)
            steps = skips = 0
        if self._prepared is not None:
            from consequent.engines.gpu.kernels.features import write_features

            write_features(self._prepared, counts, steps=steps, skips=skips, zeroes_bad=self._has_gradients)
        grads = [parameter.grad for record in self.sides for parameter in trained(record)]
        torch.autograd.graph.increment_version([grad for grad in grads if grad is not None])

    def _solve_aside(self, step: "DenseStep", aside: Fork) -> None:
        """The last layer apart: the backward pass comes to it last, and nearly at its end."""
        last = len(self._dense) - 1
        if last > 0:
            aside.wait(self._output_grads_there[:last])
            step.solve(0, last)
        aside.wait(self._output_grads_there[last:])
        step.solve(last)

    def _fork(self) -> Fork | None:
        """In a CUDA graph, a stream for what needs no gradient of a weight, from where the inputs are there."""
        if not self._dense or not graph_is_being_captured():
            return None
        return Fork(side_stream(self.device, "samples"), self._inputs_there, factor_streams(self.device, "samples"))


def fits_dense_kernel(use: Use) -> bool:
    """Whether the kernel for dense layers on the sample side takes this use: float32, not transposed, not many rows."""
    from consequent.engines.gpu.kernels.dense import MOST_ROWS

    inputs, output_grad = use.inputs, use.output_grad
    if inputs is None or output_grad is None or not use.operation.is_dense or not use.operation.has_rows_of_outputs:
        return False
    return 0 < use.rows <= MOST_ROWS and inputs.dtype == torch.float32 and output_grad.dtype == torch.float32


def grads_of_one_layer(record: Record) -> tuple[Tensor, Tensor | None] | None:
    """The gradients of a weight and its only bias, if that is all there is and they lie in memory as kernels expect."""
    weight_grad = record.weight.grad
    if not record.features or weight_grad is None or len(record.biases) > 1 or record.beside:
        return None
    bias_grad = record.biases[0].grad if record.biases else None
    if record.biases and bias_grad is None:
        return None
    if weight_grad.dtype != torch.float32 or (bias_grad is not None and bias_grad.dtype != torch.float32):
        return None
    if record.operation.groups > 1 or not record.operation.has_rows_of_outputs:
        return None
    if not lies_side_by_side(weight_grad) or (bias_grad is not None and not bias_grad.is_contiguous()):
        return None
    return weight_grad, bias_grad


def lies_side_by_side(tensor: Tensor) -> bool:
    """Whether its numbers do, in an order that the kernels know."""
    return tensor.is_contiguous() or (tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last))


def _rows(tensor: Tensor) -> Tensor:
    """The tensor as a matrix whose columns lie side by side in memory."""
    matrix = tensor if tensor.ndim == 2 else tensor.reshape(-1, tensor.shape[-1])
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()
