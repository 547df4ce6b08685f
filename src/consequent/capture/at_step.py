"""``at="step"``: what backward passes say is recorded until the optimiser's step, for all micro-batches together."""

import threading
from collections.abc import Callable, Iterable
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from consequent.capture.loss_values import LossNow, LossValues
from consequent.capture.plain_passes import PlainPasses
from consequent.capture.records import Record
from consequent.capture.separate_scales import note_sizes
from consequent.capture.torch_internals import (
    accumulator_of,
    after_backward,
    backward_pass_id,
    callers_of_backward,
    leaf_of,
    threads_in_backward,
    version_of,
    will_run,
)
from consequent.capture.use import Entry, JointUse, Use
from consequent.engines.gpu.beside_backward import Ahead
from consequent.maths.damping import Damping
from consequent.ranks.sharded_tensors import is_sharded
from consequent.statistics.averages import Averages
from consequent.statistics.joint import JointInputs
from consequent.statistics.rows import Rows

# The weight of a parameter's first use in a pass, the sum of the gradients that its uses handed over, and its version.
_Returned = tuple[Tensor, Tensor, int]
_SUM = -1  # in place of the version where there were several

P = ParamSpec("P")
R = TypeVar("R")


def _one_at_a_time(
    method: Callable[Concatenate["StepCorrector", P], R],
) -> Callable[Concatenate["StepCorrector", P], R]:
    """Backward passes may run in several threads: each GPU has its own, and so may the user."""

    @wraps(method)
    def locked(self: "StepCorrector", /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._lock:
            return method(self, *args, **kwargs)

    return locked


class StepCorrector:
    """Keeps a record for every weight that took part in the gradients now in ``.grad``.

    Args:
        damping_of: λ for a parameter.
        averages: of moments, over steps.
        largest_block_of: how many features of a parameter's layer are solved for together; None: all of them.
        are_apart: whether parameters lie in more than one parameter group.
        keep_rows: whether inputs and output gradients are kept although their moment would do.
    """

    replaces_gradients = False

    def __init__(
        self,
        damping_of: Callable[[Tensor], Damping],
        averages: Averages,
        largest_block_of: Callable[[Tensor], int | None],
        are_apart: Callable[[Iterable[Tensor]], bool],
        *,
        keep_rows: bool,
    ) -> None:
        self.records: dict[Tensor, Record] = {}
        self._lock = threading.RLock()
        self.is_shared_out = False  # with other ranks, whose inputs are still to come at the step
        self.losses: LossValues | None = None  # of the passes, where somebody asks for them
        self._plain = PlainPasses(self._comes_to_plain, self._has_come_to_plain)
        self._weights: set[Tensor] = set()
        self._damping_of = damping_of
        self._largest_block_of = largest_block_of
        self._are_apart = are_apart
        self._keep_rows = keep_rows
        self._averages = averages
        self._ahead = self._new_ahead()
        self._running: dict[int, dict[Record, None]] = {}  # backward passes under way, and the records they fill
        self._threads: dict[int, set[int]] = {}  # that may have called these passes
        self.last_pass = -1  # the last backward pass that reached a product
        self._arrivals: dict[int, _Arrivals] = {}  # by the id of a weight, or of the bias of a layer

    def _new_ahead(self) -> Ahead:
        return Ahead(factorises=not self.is_shared_out and not self._averages.are_used)

    def share_out(self) -> None:
        """From now on other ranks' inputs join in at the step."""
        self.is_shared_out = True
        self._ahead.factorises = False

    # ---- what products say ------------------------------------------------------------------------------------------

    def before_product(
        self, use: Use, weight: Tensor, bias: Tensor | None, *, is_compiled: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Does not happen: gradients are not replaced yet."""
        return weight, bias

    def after_product(self, use: Use, outputs: Tensor) -> None:
        """Does not happen."""

    @_one_at_a_time
    def product_reached(self, use: Use, inputs: Tensor | None, output_grad: Tensor, node: Node) -> None:
        """ΔZ is known, and will be in ``.grad``."""
        leaf = leaf_of(node)
        if leaf is None or not leaf.requires_grad:
            return  # it was frozen since the forward pass: its node runs, and adds nothing
        self.last_pass = backward_pass = backward_pass_id()
        weight = use.weight
        record = self._record_of(weight, weight.grad if use.trains_weight else use.key.grad, backward_pass)
        self._note_pass(record, use, backward_pass)
        if record.statistic is not None:
            self._ahead.join_on(output_grad.device)  # an earlier use may be waiting to be reduced, or being reduced
        record.add(use, inputs, output_grad, idle=self._averages.is_idle(use))
        statistic = record.statistic
        if isinstance(statistic, JointInputs):
            record.statistic = statistic.reduced(self._damping_of(use.key))
        if not isinstance(statistic, Rows):
            if not self._keep_rows:
                use.let_go()
            return
        largest_block = self._largest_block_of(use.key)
        cuts = () if largest_block is None else statistic.cuts(largest_block)
        if cuts:
            record.reduce(keep_rows=self._keep_rows, cuts=cuts)
            return
        if statistic.rows < statistic.columns or record.keeps_inputs:
            return
        damping = self._damping_of(use.key)
        if damping.value == 0:
            return
        if not self._keep_rows and self._ahead.takes(record):
            use.output_grad = None  # only the inputs are waited with
            self._ahead.add(record, damping)
        else:
            record.reduce(keep_rows=self._keep_rows)

    def joint_left_plain(self, use: Use) -> None:
        """What was recorded for its unit does not count."""
        self.records.pop(use.weight, None)

    def before_joint(self, use: JointUse, parameters: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Does not happen: gradients are not replaced yet."""
        return parameters

    @_one_at_a_time
    def transpose_reached(self, use: Use, output_grad: Tensor, weight_grad: Tensor, node: Node) -> None:
        """The weight acts in ``Wᵀ ΔZ``, too."""
        record = self._record_of(use.weight, use.key.grad, backward_pass_id())
        self._note_pass(record, use, backward_pass_id())
        record.beside.add_transposed(use.operation, output_grad, weight_grad)

    @_one_at_a_time
    def gradient_returned(self, use: Use, parameter: Tensor, gradient: Tensor, node: Node | None) -> None:
        """Note what goes to the parameter's accumulator from its uses: what else comes there is told apart."""
        arrivals = self._arrivals.get(id(parameter))
        if arrivals is None:
            return
        gradient = gradient.detach() if gradient.requires_grad else gradient
        now = backward_pass_id()
        known = arrivals.returned.get(now)
        if known is not None:  # in the order in which the engine adds, so that the sums are equal bit for bit
            arrivals.returned[now] = (known[0], known[1] + gradient, _SUM)
        elif arrivals.hook is not None:
            arrivals.returned[now] = (use.weight, gradient, version_of(gradient))
        elif node is not None and leaf_of(node) is not None:  # sharded: another tensor stands in for it in the graph
            arrivals.returned[now] = (use.weight, gradient, version_of(gradient))
            handle: Any = None

            def arrived(grads: tuple[Tensor, ...]) -> None:
                handle.remove()
                self._gradient_arrives(arrivals, grads[0])

            handle = node.register_prehook(arrived)

    @_one_at_a_time
    def _gradient_arrives(self, arrivals: "_Arrivals", gradient: Tensor | None) -> None:
        """A gradient is on its way to the parameter's ``.grad``, or to whom asked ``torch.autograd.grad`` for it."""
        if gradient is None:
            return
        now = backward_pass_id()
        returned = arrivals.returned.pop(now, None)
        parameter = arrivals.parameter
        if returned is not None:
            weight, expected, version = returned
            if gradient is expected and version_of(gradient) == version:
                return  # the one that was handed over, and nothing else
            rest = _rest(gradient, expected, version, parameter)
            if rest is not None and weight in self.records:
                self.records[weight].beside.add_other(parameter, rest)
        elif not gradient.is_sparse and will_run(accumulator_of(parameter)):
            record = self._record_of(arrivals.weight, parameter.grad, now)
            record.beside.add_other(parameter, gradient.detach().clone())
            record.beside.passes.add(now)
            self._look_at_loss(now)

    def _record_of(self, weight: Tensor, grad: Tensor | None, backward_pass: int) -> Record:
        """The weight's record in the running pass.

        Args:
            weight: as the optimiser holds it.
            grad: what the pass is going to add to.
            backward_pass: the running one.
        """
        record = self.records.get(weight)
        if record is None:
            record = self.records[weight] = Record(weight)
        running = self._running.get(backward_pass)
        if running is None:
            running = self._running[backward_pass] = {}
            self._threads[backward_pass] = callers_of_backward()
            after_backward(partial(self._backward_pass_ended, backward_pass))
        if record not in running:
            # A pass may run inside another (reentrant checkpointing): the outer one's uses are not in .grad yet.
            if len(self._running) == 1 or not any(record in others for others in self._running.values()):
                record.begin_backward_pass(grad)
            running[record] = None
        return record

    def _note_pass(self, record: Record, use: Use, backward_pass: int) -> None:
        """The use is in this pass; one that is part of another (reentrant checkpointing) counts as that."""
        record.note_pass(use, backward_pass)
        self._look_at_loss(record.passes[-1][0])

    @_one_at_a_time
    def _comes_to_plain(self, backward_pass: int) -> None:
        self._look_at_loss(backward_pass)

    @_one_at_a_time
    def _has_come_to_plain(self, parameters: list[Tensor]) -> None:
        if self.losses is None:
            return
        if self.is_shared_out:  # be behind wrappers, who reduce gradients in callbacks of their own
            after_backward(partial(self.losses.note_sizes, parameters))
        else:
            self.losses.note_sizes(parameters)

    def _look_at_loss(self, backward_pass: int) -> None:
        if self.losses is not None and backward_pass not in self.losses:
            self.losses.forget_but(self._members_by_pass())
            self.losses.look(backward_pass)

    def _backward_pass_ended(self, backward_pass: int) -> None:
        if self.is_shared_out:  # wrappers reduce the gradients in callbacks of their own: be behind them
            after_backward(partial(self._mark_gradients, backward_pass))
        else:
            self._mark_gradients(backward_pass)

    @property
    def is_in_a_pass(self) -> bool:
        """Whether a backward pass through the layers is under way here, so that gradients are still to come."""
        return bool(self._running) and backward_pass_id() in self._running

    @_one_at_a_time
    def _mark_gradients(self, backward_pass: int) -> None:
        self._ahead.join()
        records = self._running.pop(backward_pass, {})
        self._threads.pop(backward_pass, None)
        for record in records:
            record.mark_accumulated()
        if self.losses is not None:
            if self.is_shared_out:  # then gradients come from other ranks, too
                corrected = [arrivals.parameter for arrivals in self._arrivals.values()]
                self.losses.note_sizes([*corrected, *self._plain_ones()])
            else:
                present = {p for record in self.records.values() for p in record.members or [record.weight]}
                self.losses.forget_sizes_but(present.union(*self._plain.by_pass().values()))
                self.losses.note_sizes([p for record in records for p in record.members or [record.weight]])
        note_sizes(
            record
            for record in records
            if self._are_apart(p for p, _ in record.accumulated) and not is_sharded(record.weight)
        )

    # ---- between passes ---------------------------------------------------------------------------------------------

    @_one_at_a_time
    def before_entry(self) -> None:
        """Drop what a backward pass left that raised; one of another thread may be under way."""
        self.watch_plain()
        calling = threads_in_backward() if self._threads else set()
        for over in [one for one, threads in self._threads.items() if not threads & calling]:
            del self._threads[over]
            self._running.pop(over, None)
        for arrivals in self._arrivals.values():
            for over in [one for one in arrivals.returned if one not in self._running]:
                del arrivals.returned[over]
        if not self._running:
            self._ahead.forget()

    def watch_plain(self) -> None:
        """Watch the parameters that are not corrected now, where somebody asks for losses."""
        self._plain.watch(self._plain_ones())

    def _plain_ones(self) -> list[Tensor]:
        """Parameters that are not corrected, and that a step changes; none where nobody asks for losses."""
        return [] if self.losses is None else [p for p in self.losses.parameters() if id(p) not in self._arrivals]

    def correct_only(self, biases: dict[Tensor, list[Tensor]]) -> None:
        """Only these weights are corrected from now on."""
        self._weights = set(biases)
        self._averages.average_only(biases)
        self._forget_unwatched()
        for record in self.records.values():
            if record.is_empty:
                record.clear()  # what came beside uses may have come from some, of a layer that was not trained yet
        before, self._arrivals = self._arrivals, {}
        pairs = [(parameter, weight) for weight, its in biases.items() for parameter in (weight, *its)]
        for parameter, weight in pairs:
            key = id(parameter)
            arrivals = self._arrivals.get(key) or before.pop(key, None) or _Arrivals(parameter)
            self._arrivals[key] = arrivals
            arrivals.weight = weight
            if arrivals.hook is None and parameter.requires_grad and not is_sharded(parameter):
                arrivals.hook = parameter.register_hook(partial(self._gradient_arrives, arrivals))
        for arrivals in before.values():
            arrivals.stop()

    def _forget_unwatched(self) -> None:
        self.records = {weight: record for weight, record in self.records.items() if weight in self._weights}

    def remove(self) -> None:
        """Forget everything."""
        for arrivals in self._arrivals.values():
            arrivals.stop()
        self._arrivals.clear()
        self._plain.watch(())
        self.records.clear()
        self._ahead = self._new_ahead()  # recordings hold memory

    def clear(self) -> None:
        """Forget what was captured."""
        self._ahead.forget()
        for record in self.records.values():
            record.clear()
        self._plain.clear()
        if self.losses is not None:
            self.losses.forget_but(())
            self.losses.forget_sizes_but(())
        if len(self.records) > len(self._weights):  # of weights that stood in for a layer's own (functional_call)
            self._forget_unwatched()

    def filled_records(self) -> list[Record]:
        """Records of weights that took part in the gradients now in ``.grad``."""
        self._ahead.join()  # if the backward pass raised
        found = []
        for record in self.records.values():
            if record.statistic is None:
                continue
            if not record.grads or record.is_zeroed_since():
                record.clear()
            else:
                found.append(record)
        return found

    def loss(self) -> LossNow | None:
        """The loss whose gradient is in ``.grad``, where it was looked at and is known."""
        if self.losses is None:
            return None
        has_parts = any(is_sharded(weight) for weight in self.records)
        owned = set(self.losses.parameters())
        passes = {one: [p for p in members if p in owned] for one, members in self._members_by_pass().items()}
        passes = {one: members for one, members in passes.items() if members}
        return self.losses.now(passes, zeros_are_none=not has_parts)

    def _members_by_pass(self) -> dict[int, list[Tensor]]:
        """The backward passes whose gradients are in ``.grad``, and in whose; in the order of their losses' sum."""
        found: dict[int, list[Tensor]] = {}
        for record in self.records.values():
            through = {backward_pass for backward_pass, _ in record.passes}
            for backward_pass in through | record.beside.passes:
                found.setdefault(backward_pass, []).extend(record.members)
        for backward_pass, parameters in self._plain.by_pass().items():
            found.setdefault(backward_pass, []).extend(parameters)
        return dict(sorted(found.items()))

    def passes(self) -> list[set[Entry]]:
        """The backward passes whose gradients are in ``.grad``, each with the entries that took part in it."""
        found: dict[int, set[Entry]] = {}
        for record in self.records.values():
            for backward_pass, entry in record.passes:
                entries = found.get(backward_pass)
                if entries is None:
                    found[backward_pass] = {entry}
                else:
                    entries.add(entry)
        return list(found.values())


class _Arrivals:
    """A parameter whose accumulator is watched, so that what comes there otherwise than from uses is told apart."""

    __slots__ = ("hook", "parameter", "returned", "weight")

    def __init__(self, parameter: Tensor) -> None:
        self.parameter = parameter
        self.weight = parameter  # in whose record it is if it comes from no use: for a bias, that of its layer
        self.hook: RemovableHandle | None = None
        self.returned: dict[int, _Returned] = {}  # by the backward pass, from all uses together

    def stop(self) -> None:
        """Take the hook off the parameter."""
        if self.hook is not None:
            self.hook.remove()


def _rest(arrived: Tensor, expected: Tensor, version: int, parameter: Tensor) -> Tensor | None:
    """What arrived besides; a user's own hooks may have changed it, which is an edit and not told apart."""
    if arrived.is_sparse:
        return None  # of a table of embeddings: what else comes to it, a penalty, would be dense
    if expected.is_sparse:
        expected = expected.to_dense()
    is_it = arrived.data_ptr() == expected.data_ptr() and version_of(arrived) == version
    if is_it or len(parameter._backward_hooks or ()) > 1:
        return None
    rest = arrived.detach() - expected
    return rest if rest.is_cuda or bool(rest.any()) else None
