"""Rewriting the gradients of one step: all of them, or none."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from consequent.capture.at_step import StepCorrector
from consequent.capture.capture import Capture
from consequent.capture.records import Record
from consequent.capture.torch_internals import answers_at_once, graph_is_being_captured
from consequent.capture.use import Entry
from consequent.engines.bounding import Bounded, shorten
from consequent.engines.by_inverses import ByInverses
from consequent.engines.engine import Engine, Outcome, Work
from consequent.engines.gpu.by_groups import ByGroups
from consequent.engines.gpu.by_kernels import ByKernels, FusedStep, KernelSolution, fused_step_of
from consequent.engines.grouped import Grouped
from consequent.engines.plain import Plain
from consequent.engines.unwatched import Unwatched
from consequent.foresight import Foresight, Watch
from consequent.maths.damping import Damping
from consequent.options.parameter_groups import Groups
from consequent.options.settings import LossReduction, loss_divisor
from consequent.ranks.exchange import Exchange
from consequent.ranks.process_group import several_are_running
from consequent.ranks.sharded_tensors import is_sharded, local
from consequent.ranks.shards import hand_over, own_part
from consequent.reports.errors import LinAlgError
from consequent.reports.guards import (
    refuse_capture_before_first_step,
    refuse_capture_of_averages,
    refuse_capture_of_ranks,
    refuse_corrected_before,
    refuse_promise_of_ranks,
    uncaptured_layers,
)
from consequent.reports.reports import Reports, shown
from consequent.statistics.averages import Averages
from consequent.statistics.solution import Solution

# Each work goes to the first engine that takes it.
ENGINES: tuple[type[Engine], ...] = (ByKernels, ByInverses, ByGroups, Grouped, Unwatched, Plain)

_UNCAPTURED = (
    "its weight got a gradient, and from no call of the layer that can be seen: a function or a copy uses the weight, "
    "or the layer is called inside of torch.func (vmap, grad), or the loss is one of derivatives of its outputs alone"
)


class Rewriter:
    """Puts consequentialist gradients in the place of the plain ones."""

    def __init__(
        self,
        capture: Capture,
        corrector: StepCorrector,
        groups: Groups,
        reports: Reports,
        averages: Averages,
        *,
        foresight: bool,
        bound: float | None,
    ) -> None:
        self._capture = capture
        self._corrector = corrector
        self._groups = groups
        self.forget_recordings()
        self._reports = reports
        self._keeps_foresight = foresight
        self.bound = bound  # β
        self.promise: float | None = None  # π
        self.averages = averages
        self._watch: Watch | None = None
        self._filled: list[Record] = []  # what there is to do, on this rank
        self._steps = 0
        self.exchange: Exchange | None = None  # with the other ranks, once there are any
        self.samples: int | None = None  # N of the last step
        self.divisor: float | None = None  # what its loss was taken to be divided by
        self.sides: dict[str, str] = {}  # on which each layer was solved last
        self.uncaptured: dict[str, str] = {}  # layers whose gradient comes from no product of theirs, and why

    def forget_recordings(self) -> None:
        """Start with new engines: recorded launches hold memory."""
        self._engines: list[Engine] = [engine() for engine in ENGINES]

    def has_work(self, others: Iterable[StepCorrector]) -> bool:
        """Whether a backward pass was captured, on any rank, for the gradients now in ``.grad``.

        All ranks ask this together. What must not be corrected is refused here, on all of them.

        Args:
            others: of other corrections, which may have rewritten the same gradients.
        """
        failure: Exception | None = None
        records = self._filled = self._corrector.filled_records()
        try:
            refuse_corrected_before(records, self._capture, others)
            refuse_capture_before_first_step(self._steps)
            if self.averages.are_used:
                refuse_capture_of_averages()
            if self.exchange is not None:
                refuse_capture_of_ranks()
                refuse_promise_of_ranks(self.promise, self._groups.model, by_hand=self.exchange.by_hand)
                for record in records:
                    for use in record.uses:
                        use.refuse_overwritten_inputs()
        except RuntimeError as error:
            self._corrector.clear()
            if self.exchange is None:
                raise
            failure = error  # first tell the others, who would wait
        return bool(records) if self.exchange is None else self.exchange.open(failure)

    def to_be_rewritten(self) -> list[list[Tensor]]:
        """Each layer's parameters, of those that this step may rewrite; of several ranks this one may lack a layer."""
        if self.exchange is None:
            return [record.members for record in self._filled]
        return [unit for layer in self._capture.layers.values() for unit in self._capture.units_of(layer)]

    @property
    def looks(self) -> bool:
        """Whether this step may wait for the device, to look at numbers: the first one may."""
        return self._reports.check or self._steps == 0

    def rewrite(
        self, loss_reduction: LossReduction, passes: list[set[Entry]], *, bounded: bool, loss_is_sound: bool | Tensor
    ) -> list[list[Tensor]] | None:
        """Rewrite the gradients of all corrected layers; after :meth:`has_work` has said that there is something to do.

        Args:
            loss_reduction: how the loss sums up over samples.
            passes: the backward passes on this rank, each with the entries that took part in it.
            bounded: whether the optimiser's step follows at once, so that the bound knows what is applied.
            loss_is_sound: whether there is a loss that the step may be taken for.

        Returns:
            each layer's parameters whose gradients were rewritten, on all ranks. None if the step must not be taken;
            then nothing was.
        """
        try:
            if self.exchange is None:
                records, self.samples = self._filled, self._capture.entries.count(passes)
            else:
                records, self.samples = self.exchange.complete(self._may_wait), self.exchange.samples
            self.list_uncaptured(records)
            if self.averages.are_used:
                self.averages.apply(records, self._damping_of)
                records = [record for record in records if not record.is_empty]
            bounded &= len(records) > 1  # one alone lands where it should
            rewritten = [record.members for record in records]
            records = [part for record in records if (part := self._own_part(record)) is not None]
            self.divisor = divisor = loss_divisor(loss_reduction, self.samples)
            solved, shortened = self._solutions_of(records, divisor, bounded=bounded)
            solutions = [solution for _, its in solved for solution in its]
            fused = fused_step_of(solutions)
            finite = self._all_finite(solutions, fused, loss_is_sound)
            in_graph = fused is not None and graph_is_being_captured()  # then the kernels count it
            if not in_graph:
                self._reports.add_step(self.device)
            if finite is False:
                return None
            if self._reports.check:
                self._refuse_failure_elsewhere(solutions)
            for count in shortened:
                is_taken = finite.to(count.device) if isinstance(finite, Tensor) and isinstance(count, Tensor) else 1
                self._reports.add("bounded", count * is_taken)
            for solution in solutions:
                name = self._name(solution.record)
                if not isinstance(solution, KernelSolution):  # which count on the device
                    self._reports.updated(name, solution)
                    if solution.record.held_unseen and solution.edited is False:
                        self._reports.held_unseen(name)
                self.sides[name] = solution.side
            if self._keeps_foresight:
                self._watch = Watch(records, self._capture.names, self._groups.learning_rate_of, divisor)
            outcome = Outcome(finite, self._reports.on_device, in_graph, self._found_inf is None)
            for engine, its in solved:
                engine.write(its, outcome)
            self._reports.step_taken()
            self.averages.step_taken()
            for record in records:
                if record.stands_for is None:
                    record.mark_corrected([p for p in record.members if p.grad is not None])
                else:
                    hand_over(record)
                    record.stands_for.mark_corrected(record.stands_for.members)
            return rewritten
        finally:
            self._filled = []
            self._steps += 1
            self._corrector.clear()

    def note_corrected(self) -> None:
        """The gradients in ``.grad`` are those that the step will be taken with."""
        if self._watch is not None:
            self._watch.note_corrected()

    def _name(self, record: Record) -> str:
        return self._capture.names[record.first_use.layer]

    def _own_part(self, record: Record) -> Record | None:
        """What of the record this rank corrects: all, unless the weight is sharded."""
        return own_part(record) if is_sharded(record.weight) else record

    @property
    def device(self) -> torch.device:
        """Of the model's layers."""
        weight, _ = self._capture.parameters_of(next(iter(self._capture.layers.values())))
        return weight.device

    @property
    def _found_inf(self) -> Tensor | None:
        """A GradScaler's, with a fused optimiser."""
        found = [getattr(optimizer, "found_inf", None) for optimizer in self._groups.optimizers]
        return next((found_inf for found_inf in found if found_inf is not None), None)

    def _solutions_of(
        self, records: list[Record], divisor: float, *, bounded: bool
    ) -> tuple[list[tuple[Engine, list[Solution]]], list[int | Tensor]]:
        """Each engine, and what it has found; and how many of that were shortened, as :func:`shorten` says it."""
        works = []
        of_groups: dict[int, tuple[Damping, float | None]] = {}  # λ and the bound's limit, by the group's id
        for record in records:
            key = (record.stands_for or record).first_use.key
            group = id(self._groups.group_of(key))
            if group not in of_groups:
                of_groups[group] = self._groups.damping_of(key), self._limit(key, divisor) if bounded else None
            damping, limit = of_groups[group]
            works.append(Work(record, damping, self._may_wait(record.weight), divisor, limit))
        by_record = {work.record: work for work in works}
        solved = []
        first = 1 if self._keeps_foresight else 0  # kernels do not keep what was before
        for engine in self._engines[first:]:
            if not works:
                break
            solutions = engine.solve(works)
            if solutions:
                solved.append((engine, solutions))
                done = {solution.record for solution in solutions}
                works = [work for work in works if work.record not in done]
        cases = [
            Bounded(solution, solution.change, work.limit, work.may_wait)
            for _, its in solved
            for solution in its
            if solution.change is not None and (work := by_record[solution.record]).limit is not None
        ]
        return solved, shorten(cases)

    def _limit(self, parameter: Tensor, divisor: float) -> float | None:
        """How large a change of its layer's outputs may be, in units of the gradient before the divisor."""
        rate = self._groups.rate_in_the_long_run(parameter)
        return None if self.bound is None or not rate or not divisor else self.bound / (rate * divisor)

    def _damping_of(self, record: Record) -> Damping:
        return self._groups.damping_of((record.stands_for or record).first_use.key)

    def _all_finite(
        self, solutions: list[Solution], fused: FusedStep | None, loss_is_sound: bool | Tensor
    ) -> bool | Tensor:
        """Whether the step may be taken; on a GPU that is not waited for, a tensor (and plain gradients are zeroed)."""
        updates = [solution for solution in solutions if not isinstance(solution, KernelSolution)]
        records = [solution.record for solution in solutions]
        corrected = {id(p) for record in records for p in (record.stands_for or record).members}
        rest = [p.grad for p in self._groups.parameters() if id(p) not in corrected]
        plain = [local(grad) for grad in rest if grad is not None]
        flags: list[tuple[str, bool | Tensor]]
        flags = [(shown(self._name(update.record)), update.finite) for update in updates if update.finite is not True]
        flags += [("a layer that is not corrected", flag) for flag in _are_finite(plain)]
        flags += [] if loss_is_sound is True else [("the loss", loss_is_sound)]
        found_inf = self._found_inf
        bad = [name for name, flag in flags if self._may_wait(flag) and not flag]
        ranks = None if self.exchange is None else self.exchange.ranks
        may_wait = self._reports.check or answers_at_once(self.device)
        if ranks is not None and may_wait and not ranks.is_true_everywhere(not bad):
            bad = bad or ["a layer, on another rank"]
        if bad:
            if found_inf is None or not bool(found_inf):  # otherwise the scaler knows, and skips the step itself
                self._reports.non_finite(list(dict.fromkeys(bad)))
            return False
        waiting = [flag for _, flag in flags if isinstance(flag, Tensor) and not self._may_wait(flag)]
        if not waiting and fused is None and (ranks is None or may_wait):
            return True
        is_bad = None if fused is None else fused.is_bad
        if waiting:
            finite = torch.stack([flag.to(waiting[0].device) for flag in waiting]).all()
            is_bad = (~finite).int().view(1) if is_bad is None else is_bad.bitwise_or_(~finite)
        if ranks is not None and not may_wait:
            is_bad = torch.zeros(1, dtype=torch.int32, device=self.device) if is_bad is None else is_bad
            ranks.spread(is_bad)
        assert is_bad is not None
        if found_inf is None and fused is None:
            self._reports.add("skipped", is_bad)
        if not updates and not plain:
            return True  # the kernels look for themselves
        finite = is_bad[0] == 0
        for grad in plain:
            values = grad._values() if grad.is_sparse else grad
            values.masked_fill_(~finite.to(grad.device), 0)
        return finite

    def _refuse_failure_elsewhere(self, updates: list[Solution]) -> None:
        """Raise if a factorisation failed on other ranks only: those that have rows of a sharded weight."""
        failed = any(update.fallen_back for update in updates)
        if self.exchange is not None and not self.exchange.ranks.is_true_everywhere(not failed) and not failed:
            raise LinAlgError(
                "on another rank, a Gram matrix plus damping could not be factorised, not even in float64; the error "
                "there names the layer. No weight was changed."
            )

    def list_uncaptured(self, records: list[Record]) -> None:
        """Note and tell of layers whose gradient comes from no product of theirs.

        Args:
            records: of all gradients that do.
        """
        self._leave_plain_but({id(record.weight) for record in records})
        if self.uncaptured:
            for record in records:
                self.uncaptured.pop(self._name(record), None)
        self._warn_of_misbehaving()

    def list_unsolved(self) -> None:
        """The same where backward passes have solved for the gradients; at the first step.

        On several ranks a gradient may be that of the others, who have called the layer.
        """
        if self._steps == 0 and not graph_is_being_captured() and not several_are_running():
            solved = [self._capture.layers[name] for name in self.sides if name in self._capture.layers]
            self._leave_plain_but({id(unit[0]) for layer in solved for unit in self._capture.units_of(layer)})
        for name in self.sides if self.uncaptured else ():
            self.uncaptured.pop(name, None)
        self._steps += 1
        self._warn_of_misbehaving()

    def _leave_plain_but(self, solved: set[int]) -> None:
        """Note and tell of layers that have a gradient, and whose weight's id is not among these."""
        for name in uncaptured_layers(solved, self._capture, self._corrector, self._groups.owns):
            self.uncaptured[name] = _UNCAPTURED
            self._reports.left_plain(name, _UNCAPTURED)

    def _warn_of_misbehaving(self) -> None:
        """Tell of layers that keep their plain gradient although they were to be corrected."""
        for layer, reason in self._capture.misbehaving.items():
            if layer in self._capture.names:
                self._reports.left_plain(self._capture.names[layer], reason)

    def foresight_of_the_step(self) -> Foresight | None:
        """After the optimiser's step: what it did to the outputs, if that was watched."""
        watch, self._watch = self._watch, None
        return None if watch is None else watch.compare()

    def _may_wait(self, tensor: bool | Tensor) -> bool:
        return self._reports.check or not isinstance(tensor, Tensor) or answers_at_once(tensor)


def _are_finite(grads: list[Tensor]) -> list[Tensor]:
    """Whether the gradients hold no NaN or inf: a flag for each device and dtype that they are on."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        values = grad.coalesce().values() if grad.is_sparse else grad
        if values.numel():
            kinds.setdefault((values.device, values.dtype), []).append(values)
    return [torch.stack(torch._foreach_norm(values, math.inf)).isfinite().all() for values in kinds.values()]
