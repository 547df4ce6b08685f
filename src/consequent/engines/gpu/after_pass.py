"""``at="backward"`` on a GPU: the gradients of all weights of a pass are computed together, at its end.

One weight after the other would cost a dozen launches each. So a weight's node hands on nothing; its inputs and output
gradients wait, on the feature side its plain gradient while the factor of the second moment is computed beside the pass
(:mod:`consequent.engines.gpu.beside_backward`). When the pass is over all are solved in a few launches, and added to
``.grad``. This is for weights whose gradient nobody reads during the pass: hooks of theirs, and wrappers that reduce
gradients over ranks, get theirs at once (:mod:`consequent.engines.in_backward`).
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import Node

from consequent.capture.at_backward import Gathered
from consequent.capture.records import Record
from consequent.capture.torch_internals import (
    after_backward,
    backward_pass_id,
    comes_in_time,
    graph_is_being_captured,
    has_hooks,
)
from consequent.capture.use import Use
from consequent.engines.gpu import kernels
from consequent.engines.gpu.beside_backward import Ahead
from consequent.engines.gpu.by_kernels import FusedStep, fits_dense_kernel, lies_side_by_side
from consequent.engines.gpu.many_rows import RowLayer, factorise_rows, factorise_rows_beside, groups_of
from consequent.engines.gpu.row_launches import RowLaunches
from consequent.layers import Operation
from consequent.maths.damping import Damping
from consequent.maths.precision import in_full_precision, without_autocast
from consequent.ranks.process_group import several_are_running
from consequent.statistics.rows import Rows

MOST_PASSES = 16  # that are remembered although they raised


@dataclass
class _Waiting:
    """A weight that is solved for when the pass is over.

    Attributes:
        use: its only one, with inputs and output gradients on the sample side.
        damping: λ.
        scale: what the loss was divided by.
        record: on the feature side, where its second moment is computed.
        weight_grad: the plain gradient, there; later the new one.
        bias_grad: likewise.
    """

    use: Use
    damping: Damping
    scale: float
    record: Record | None = None
    weight_grad: Tensor | None = None
    bias_grad: Tensor | None = None

    def hand_over(self) -> None:
        """Add the new gradients to ``.grad``."""
        _add_to(self.use.weight, self.weight_grad)
        if self.use.bias is not None:
            _add_to(self.use.bias, self.bias_grad)


class AfterPass:
    """The weights of backward passes under way that are solved for at the end.

    Args:
        counts_on: the counts on a device, see :class:`consequent.reports.counters.Tally`.
        solved: is told each use and the side on which it was solved.
    """

    def __init__(self, counts_on: Callable[[torch.device], Tensor], solved: Callable[[Use, str], None]) -> None:
        self._counts_on = counts_on
        self._solved = solved
        self._ahead = Ahead()
        self._launches = RowLaunches()
        self._records: dict[int, Record] = {}  # by the weight's id: whose recordings they are
        self._ordinary: dict[int, tuple[Tensor, Operation, Tensor | None, bool]] = {}  # likewise
        self._passes: dict[int, list[_Waiting]] = {}
        self._lock = threading.Lock()  # each GPU has a thread of its own in a backward pass

    def takes(self, gathered: Gathered, damping: Damping, accumulators: Sequence[Node | None]) -> bool:
        """Whether the weight can wait: an ordinary one, whose gradient nobody reads before the end of the pass.

        Args:
            gathered: what the pass said of it.
            damping: λ.
            accumulators: the nodes to which the gradients of the weight and its bias go.
        """
        if len(gathered.products) != 1 or gathered.arrived or gathered.transposed is not None or damping.value == 0:
            return False
        use, inputs, output_grad = gathered.products[0]
        if inputs is None or use.rows == 0 or not self._is_ordinary(use) or torch.is_grad_enabled():
            return False
        has_bias = use.bias is not None
        if len(accumulators) != 1 + has_bias or inputs.numel() == 0:
            return False
        if use.rows < use.features + has_bias and not _has_rows_for_kernels(use, inputs, output_grad):
            return False
        if self._passes.get(backward_pass_id()) is None and (torch.is_anomaly_enabled() or several_are_running()):
            return False
        held = (use.weight,) if use.bias is None else (use.weight, use.bias)
        for parameter, accumulator in zip(held, accumulators, strict=True):
            if not comes_in_time(parameter, accumulator) or has_hooks(accumulator):
                return False
        return True

    def _is_ordinary(self, use: Use) -> bool:
        """Whether the kernels take such a layer; found out once."""
        known = self._ordinary.get(id(use.weight))
        if known is None or known[0] is not use.weight or known[1] is not use.operation or known[2] is not use.bias:
            known = self._ordinary[id(use.weight)] = (use.weight, use.operation, use.bias, _is_ordinary(use))
        return known[3]

    def add(self, gathered: Gathered, damping: Damping, scale: float) -> None:
        """Let a weight wait that :meth:`takes` approves of.

        Args:
            gathered: what the pass said of it.
            damping: λ.
            scale: what its gradient is multiplied by: the loss's divisor.
        """
        use, inputs, output_grad = gathered.products[0]
        use.take(inputs, output_grad)
        waiting = _Waiting(use, damping, scale)
        if use.rows >= use.features + (use.bias is not None):
            self._add_features(waiting)
        now = backward_pass_id()
        with self._lock:
            running = self._passes.get(now)
            if running is None:
                while len(self._passes) > MOST_PASSES:
                    self._passes.pop(next(iter(self._passes)))
                running = self._passes[now] = []
                after_backward(lambda: self._finish(now))
            running.append(waiting)

    def _add_features(self, waiting: _Waiting) -> None:
        use = waiting.use
        waiting.weight_grad, waiting.bias_grad = _plain_gradients(use)
        use.output_grad = use.plain_grads = None
        record = self._records.setdefault(id(use.weight), Record(use.weight))
        if record.weight is not use.weight or not record.is_empty:  # another pass is under way
            record = Record(use.weight)
        record.statistic, record.usual_uses = Rows.of(use), 1
        waiting.record = record
        self._ahead.add(record, waiting.damping)

    @torch.no_grad()
    def _finish(self, now: int) -> None:
        """The pass is over."""
        with self._lock:
            running = self._passes.pop(now, None)
        if running is None:
            return
        try:
            self._ahead.join()
            by_device: dict[torch.device, list[_Waiting]] = {}
            for waiting in running:
                waiting.use.refuse_overwritten_inputs()
                by_device.setdefault(waiting.use.weight.device, []).append(waiting)
            for device, its in by_device.items():
                with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                    self._solve(device, its)
            for waiting in running:
                waiting.hand_over()
                self._solved(waiting.use, "samples" if waiting.record is None else "features")
        finally:
            for waiting in running:
                waiting.use.let_go()
                if waiting.record is not None:
                    waiting.record.statistic = None

    def _solve(self, device: torch.device, all_waiting: list[_Waiting]) -> None:
        """Compute the new gradients of all weights on one device."""
        step = FusedStep(device, has_gradients=False)
        counts = self._counts_on(device)
        many: list[_Waiting] = []
        for waiting in all_waiting:
            use = waiting.use
            if waiting.record is not None:
                factor = waiting.record.captured.factor_for(waiting.damping)
                assert factor is not None
                assert waiting.weight_grad is not None
                step.add_features(waiting.weight_grad, waiting.bias_grad, factor, waiting.scale)
            elif fits_dense_kernel(use):
                waiting.weight_grad = torch.empty_like(use.weight)
                waiting.bias_grad = None if use.bias is None else torch.empty_like(use.bias)
                step.add_dense(use, waiting.weight_grad, waiting.bias_grad, waiting.damping, waiting.scale)
            else:
                many.append(waiting)
        if len(many) < len(all_waiting):
            _run(step, counts)
        if many:
            self._solve_rows(many, counts)

    def _solve_rows(self, many: list[_Waiting], counts: Tensor) -> None:
        """Layers with more rows than the dense kernel takes."""
        from consequent.engines.gpu.kernels.counting import count_factors

        layers = [RowLayer.of(waiting.use, waiting.damping, waiting.scale) for waiting in many]
        groups = groups_of(layers)
        in_graph = graph_is_being_captured()
        events = [waiting.use.inputs_there for waiting in many]

        def gradients(layers: Sequence[RowLayer], _: Sequence[Tensor]) -> tuple[Tensor, ...]:
            solved = factorise_rows_beside(layers, groups, events) if in_graph else factorise_rows(layers, groups)
            weights, biases = zip(*[group.combined(group.layers[0].scale) for group in solved], strict=True)
            return *weights, *biases, torch.cat([group.status for group in solved])

        (*found, status), are_overwritten = self._launches.run(layers, (), gradients)
        count_factors(status, counts)
        if are_overwritten:
            fresh = [torch.empty_like(one) for one in found]
            torch._foreach_copy_(fresh, found)
            found = fresh
        for places, weights, biases in zip(groups, found[: len(groups)], found[len(groups) :], strict=True):
            for place, weight_grad, bias_grad in zip(places, weights.unbind(), biases.unbind(), strict=True):
                many[place].weight_grad, many[place].bias_grad = weight_grad, bias_grad

    def remove(self) -> None:
        """Forget everything: recorded launches hold memory."""
        self._passes.clear()
        self._records.clear()
        self._ordinary.clear()
        self._ahead, self._launches = Ahead(), RowLaunches()

    def forget(self) -> None:
        """Drop what is left of passes that raised; one of another thread may be under way."""
        if not self._passes:
            return
        here = threading.get_ident()
        with self._lock:
            for over in [one for one, its in self._passes.items() if its[0].use.entry.thread == here]:
                del self._passes[over]
            if self._passes:
                return
        self._ahead.forget()
        for record in self._records.values():
            record.statistic = None


def _has_rows_for_kernels(use: Use, inputs: Tensor, output_grad: Tensor) -> bool:
    """Whether the sample side takes them."""
    return use.operation.is_dense and inputs.dtype == output_grad.dtype == torch.float32


def _is_ordinary(use: Use) -> bool:
    """Whether the kernels take such a layer."""
    operation = use.operation
    if operation.is_sparse or operation.groups > 1 or not operation.has_rows_of_outputs:
        return False
    if not kernels.run_on(use.weight.device):
        return False
    held = [use.weight] if use.bias is None else [use.weight, use.bias]
    return all(p.dtype == torch.float32 and lies_side_by_side(p) for p in held)


@in_full_precision
def _run(step: FusedStep, counts: Tensor) -> None:
    step.prepare()
    step.write(counts)


@without_autocast
def _plain_gradients(use: Use) -> tuple[Tensor, Tensor | None]:
    """``ΔZᵀX`` and the bias's, in the parameters' shapes and dtype, by products as the user allows them."""
    assert use.inputs is not None
    assert use.output_grad is not None
    known = use.plain_grads
    weight_grad = use.operation.weight_gradient(use.inputs, use.output_grad) if known is None else known[0]
    weight_grad = weight_grad.to(use.weight.dtype)
    if not lies_side_by_side(weight_grad):
        weight_grad = weight_grad.contiguous()
    if use.bias is None:
        return weight_grad, None
    bias_grad = use.operation.bias_gradient(use.output_grad) if known is None or known[1] is None else known[1]
    return weight_grad, bias_grad.to(use.bias.dtype).contiguous()


def _add_to(parameter: Tensor, gradient: Tensor | None) -> None:
    """As the parameter's accumulator would."""
    assert gradient is not None
    if parameter.grad is None:
        if gradient.stride() != parameter.stride():
            gradient = torch.empty_like(parameter).copy_(gradient)
        parameter.grad = gradient
    elif parameter.grad.requires_grad:
        parameter.grad = parameter.grad + gradient
    else:
        parameter.grad += gradient
