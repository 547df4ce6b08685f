"""``at="step"``: what backward passes say is recorded until the optimiser's step, for all micro-batches together."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from consequent.capture.records import Record
from consequent.capture.torch_internals import (
    accumulator_of,
    after_backward,
    backward_pass_id,
    leaf_of,
    version_of,
    will_run,
)
from consequent.capture.use import Entry, Use
from consequent.engines.gpu.beside_backward import Ahead
from consequent.maths.damping import Damping
from consequent.ranks.sharded_tensors import is_sharded
from consequent.statistics.averages import Averages
from consequent.statistics.rows import Rows


class StepCorrector:
    """Keeps a record for every weight that took part in the gradients now in ``.grad``.

    Args:
        damping_of: λ for a parameter.
        averages: of moments, over steps.
        largest_block_of: how many features of a parameter's layer are solved for together; None: all of them.
        keep_rows: whether inputs and output gradients are kept although their moment would do.
    """

    replaces_gradients = False

    def __init__(
        self,
        damping_of: Callable[[Tensor], Damping],
        averages: Averages,
        largest_block_of: Callable[[Tensor], int | None],
        *,
        keep_rows: bool,
    ) -> None:
        self.records: dict[Tensor, Record] = {}
        self.is_shared_out = False  # with other ranks, whose inputs are still to come at the step
        self._weights: set[Tensor] = set()
        self._damping_of = damping_of
        self._largest_block_of = largest_block_of
        self._keep_rows = keep_rows
        self._averages = averages
        self._ahead = self._new_ahead()
        self._running: dict[int, dict[Record, None]] = {}  # backward passes under way, and the records they fill
        self._returned: dict[tuple[int, Tensor], _Returned] = {}  # to accumulators, by backward pass and parameter
        self._weight_of: dict[Tensor, Tensor] = {}  # for a weight itself, and for the bias of a layer
        self._hooks: dict[Tensor, RemovableHandle] = {}  # on parameters

    def _new_ahead(self) -> Ahead:
        return Ahead(factorises=not self.is_shared_out and not self._averages.are_used)

    def share_out(self) -> None:
        """From now on other ranks' inputs join in at the step."""
        self.is_shared_out = True
        self._ahead.factorises = False

    # ---- what products say ------------------------------------------------------------------------------------------

    def before_product(self, use: Use, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The layer's own."""
        return weight, bias

    def after_product(self, use: Use, outputs: Tensor) -> None:
        """Nothing is to be done yet."""

    def product_reached(self, use: Use, inputs: Tensor | None, output_grad: Tensor, node: Node) -> None:
        """ΔZ is known, and will be in ``.grad``."""
        leaf = leaf_of(node)
        if leaf is None or not leaf.requires_grad:
            return  # it was frozen since the forward pass: its node runs, and adds nothing
        record = self._record_of(use.weight, use.key.grad)
        record.note_pass(use, backward_pass_id())
        if not record.is_empty:
            self._ahead.join_on(output_grad.device)  # an earlier use may be waiting to be reduced, or being reduced
        record.add(use, inputs, output_grad, idle=self._averages.is_idle(use))
        if not isinstance(record.statistic, Rows):
            if not self._keep_rows:
                use.let_go()
            return
        cuts = record.statistic.cuts(self._largest_block_of(use.key))
        if cuts:
            record.reduce(keep_rows=self._keep_rows, cuts=cuts)
            return
        damping = self._damping_of(use.key)
        if record.rows < record.columns or damping.value == 0 or record.keeps_inputs:
            return
        if not self._keep_rows and self._ahead.takes(record):
            self._ahead.add(record, damping)
        else:
            record.reduce(keep_rows=self._keep_rows)

    def transpose_reached(self, use: Use, output_grad: Tensor, weight_grad: Tensor, node: Node) -> None:
        """The weight acts in ``Wᵀ ΔZ``, too."""
        record = self._record_of(use.weight, use.key.grad)
        record.note_pass(use, backward_pass_id())
        record.beside.add_transposed(use.operation, output_grad, weight_grad)

    def gradient_returned(self, use: Use, parameter: Tensor, gradient: Tensor, node: Node | None) -> None:
        """Note what goes to the parameter's accumulator from its uses: what else comes there is told apart."""
        record = self.records.get(use.weight)
        if record is None:
            return
        gradient = gradient.detach() if gradient.requires_grad else gradient
        key = (backward_pass_id(), parameter)
        known = self._returned.get(key)
        if known is not None:
            known.add(gradient)
            return
        if parameter in self._hooks:
            self._returned[key] = _Returned(record, parameter, gradient)
        elif node is not None and leaf_of(node) is not None:  # sharded: another tensor stands in for it in the graph
            self._returned[key] = _Returned(record, parameter, gradient)
            handle: Any = None

            def arrived(grads: tuple[Tensor, ...]) -> None:
                handle.remove()
                self._gradient_arrives(parameter, grads[0])

            handle = node.register_prehook(arrived)

    def _gradient_arrives(self, parameter: Tensor, gradient: Tensor | None) -> None:
        """A gradient is on its way to the parameter's ``.grad``, or to whom asked ``torch.autograd.grad`` for it."""
        if gradient is None or parameter not in self._weight_of:
            return
        returned = self._returned.pop((backward_pass_id(), parameter), None)
        if returned is not None:
            returned.compare(gradient)
        elif not gradient.is_sparse and will_run(accumulator_of(parameter)):
            record = self._record_of(self._weight_of[parameter], parameter.grad)
            record.beside.add_other(parameter, gradient.detach().clone())

    def _record_of(self, weight: Tensor, grad: Tensor | None) -> Record:
        """The weight's record in the running pass.

        Args:
            weight: as the optimiser holds it.
            grad: what the pass is going to add to.
        """
        record = self.records.get(weight)
        if record is None:
            record = self.records[weight] = Record(weight)
        now = backward_pass_id()
        if now not in self._running:
            self._running[now] = {}
            after_backward(partial(self._backward_pass_ended, now))
        if record not in self._running[now]:
            # A pass may run inside another (reentrant checkpointing): the outer one's uses are not in .grad yet.
            if not any(record in others for others in self._running.values()):
                record.begin_backward_pass(grad)
            self._running[now][record] = None
        return record

    def _backward_pass_ended(self, backward_pass: int) -> None:
        if self.is_shared_out:  # wrappers reduce the gradients in callbacks of their own: be behind them
            after_backward(partial(self._mark_gradients, backward_pass))
        else:
            self._mark_gradients(backward_pass)

    def _mark_gradients(self, backward_pass: int) -> None:
        self._ahead.join()
        for record in self._running.pop(backward_pass, {}):
            record.mark_accumulated()

    # ---- between passes ---------------------------------------------------------------------------------------------

    def before_entry(self) -> None:
        """Drop what a backward pass left that raised."""
        self._running.clear()
        self._returned.clear()
        self._ahead.forget()

    def correct_only(self, biases: dict[Tensor, list[Tensor]]) -> None:
        """Only these weights are corrected from now on."""
        self._weights = set(biases)
        self._averages.average_only(biases)
        self._weight_of = {weight: weight for weight in biases}
        self._weight_of |= {bias: weight for weight, its in biases.items() for bias in its}
        self._forget_unwatched()
        for parameter in [known for known in self._hooks if known not in self._weight_of]:
            self._hooks.pop(parameter).remove()
        for parameter in self._weight_of:
            if parameter not in self._hooks and parameter.requires_grad and not is_sharded(parameter):
                self._hooks[parameter] = parameter.register_hook(partial(self._gradient_arrives, parameter))

    def _forget_unwatched(self) -> None:
        self.records = {weight: record for weight, record in self.records.items() if weight in self._weights}

    def remove(self) -> None:
        """Forget everything."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self.records.clear()
        self._ahead = self._new_ahead()  # recordings hold memory

    def clear(self) -> None:
        """Forget what was captured."""
        self._ahead.forget()
        for record in self.records.values():
            record.clear()
        if len(self.records) > len(self._weights):  # of weights that stood in for a layer's own (functional_call)
            self._forget_unwatched()

    def filled_records(self) -> list[Record]:
        """Records of weights that took part in the gradients now in ``.grad``."""
        self._ahead.join()  # if the backward pass raised
        for record in self.records.values():
            if not record.is_empty and (not record.grads or record.is_zeroed_since()):
                record.clear()
        return [record for record in self.records.values() if not record.is_empty]

    def passes(self) -> list[set[Entry]]:
        """The backward passes whose gradients are in ``.grad``, each with the entries that took part in it."""
        found: dict[int, set[Entry]] = {}
        for record in self.records.values():
            for backward_pass, entries in record.passes.items():
                found.setdefault(backward_pass, set()).update(entries)
        return list(found.values())


class _Returned:
    """What the uses of a parameter have handed to its accumulator in the running pass."""

    def __init__(self, record: Record, parameter: Tensor, gradient: Tensor) -> None:
        self._record = record
        self._parameter = parameter
        self._sum = gradient
        self._version = version_of(gradient)
        self._count = 1

    def add(self, gradient: Tensor) -> None:
        """In the order in which the engine adds, so that the sums are equal bit for bit."""
        self._sum = self._sum + gradient
        self._count += 1

    def compare(self, arrived: Tensor) -> None:
        """Keep what arrived besides; a user's own hooks may have changed it, which is an edit and not told apart."""
        expected, self._sum = self._sum, arrived
        if arrived.is_sparse:
            return  # of a table of embeddings: what else comes to it, a penalty, would be dense
        if expected.is_sparse:
            expected = expected.to_dense()
        is_it = self._count == 1 and arrived.data_ptr() == expected.data_ptr() and version_of(arrived) == self._version
        if is_it or len(self._parameter._backward_hooks or ()) > 1:
            return
        rest = arrived.detach() - expected
        if not rest.is_cuda and not bool(rest.any()):
            return
        self._record.beside.add_other(self._parameter, rest)
