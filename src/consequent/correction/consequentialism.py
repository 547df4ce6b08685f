"""``Consequentialism``: watches a model's layers, and rewrites their gradients before each step of an optimiser."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from consequent.capture.at_backward import BackwardCorrector
from consequent.capture.at_step import StepCorrector
from consequent.capture.capture import Capture, Corrector
from consequent.capture.loss_values import LossValues
from consequent.capture.loss_watch import LossWatch
from consequent.capture.torch_internals import backward_pass_id
from consequent.correction.backward_passes import BackwardPasses
from consequent.correction.first_step import FirstStep
from consequent.correction.layers import Layers
from consequent.correction.parts import Parts
from consequent.correction.state import load, state_of
from consequent.correction.stepping import Stepping
from consequent.correction.territory import Territory, is_corrected, names_of
from consequent.correction.together import Together
from consequent.engines.step import Rewriter
from consequent.foresight import Foresight
from consequent.maths.bound import DEFAULT as BOUND
from consequent.maths.checks import check_damping
from consequent.maths.damping import Damping
from consequent.options.arguments import refuse_unknown_attribute, refusing_unknown
from consequent.options.loss_divisor import LossDivisor, named
from consequent.options.parameter_groups import Groups, damping_in, largest_block_in
from consequent.options.selection import Patterns, listed
from consequent.options.settings import (
    LossReduction,
    check_at,
    check_averaging,
    check_bound,
    check_largest_block,
    check_loss_reduction,
    check_promise,
    check_what_needs_the_step,
    refuse_averaged_blocks,
    refuse_bound_in_vain,
    refuse_promise_in_vain,
    refuse_shared_blocks,
)
from consequent.ranks.traffic import Traffic
from consequent.reports.counters import Counters
from consequent.reports.describe import describe
from consequent.reports.guards import checked_optimizers, refuse_promise_by_hand
from consequent.reports.optimizer_gone import warn_at_next_backward_pass
from consequent.reports.reports import Reports, shown
from consequent.statistics.averages import Averages

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Consequentialism:
    """Watches a model's layers and rewrites their gradients before each step of an optimiser.

    Args:
        model: the model, before or after it is wrapped or compiled (what was compiled is then compiled anew).
        damping: λ, added to the diagonal of the un-normalised Gram matrix, as in the paper. 0 is the pseudo-inverse.
            A parameter group of an optimiser may carry its own ``"damping"`` or ``"relative_damping"``; where weight
            and bias of a layer lie in two, the weight's counts.
        relative_damping: instead of ``damping``: ρ of ``λ = ρ · trace(XXᵀ) / min(N, D)``, a fraction of the mean
            eigenvalue of the inputs at full rank, whatever their size and number. Without either it is 0.1 for
            :class:`torch.optim.SGD`, and 1 for others, whose steps have a length of their own.
        loss_reduction: how the loss sums up over samples, so that the learning rate keeps the paper's meaning:
            ``"mean"`` (over the samples that enter the model) or ``"sum"``. A loss module of torch that you call after
            the model (``criterion = nn.CrossEntropyLoss()``): what its calls divide by, ignored targets and class
            weights seen; on a GPU the step waits for that count. ``"mse"``: half of the elements of the model's
            outputs, for the default ``F.mse_loss``, which has no ½. ``"tokens"``: all positions of outputs
            ``[…, classes]``. A loss function of torch, as it divides the model's outputs by default. Or the loss's own
            divisor: a number, or a function of the number of samples. Where the first step finds ``"mean"`` or
            ``"tokens"`` implausible, it warns.
        include: which layers to correct: module types, names or compiled regular expressions. None: all that can be,
            embeddings aside.
        exclude: which to leave out, likewise.
        averaging: β of the second moments' average over steps: in the mean of xxᵀ over all samples so far those of a
            step weigh β times those of the next, 1/(1 − β) steps in all. 0: each step's own.
        refresh: T: their average is refreshed and factorised anew at every T-th step only; the steps in between cost
            little more than plain ones. Both need ``at="step"`` and cannot be in a CUDA graph.
        largest_block: B: a layer with more than B features and more than B rows (samples × positions) is not solved
            for as a whole: its features are cut into m blocks of at most B, each of which is asked for an m-th of the
            wanted change, exactly. That costs a fraction of time and memory and is another update, a shorter one
            (docs/speed.md); other layers are untouched. For convolutions whole input channels are counted. A parameter
            group may carry its own ``"largest_block"``. Not with averages or across ranks. None: no blocks.
        bound: by what fraction of their size one step may change a layer's outputs on its own mini-batch, so that too
            high a learning rate ends in a slow run and not in NaN. For :class:`torch.optim.SGD`, whose steps are
            proportional to the gradient, with ``at="step"``, and where more than one layer is corrected; others are
            left alone, and so are several optimisers that are attached together: a bound of your own is refused there.
            What it shortens is counted (``counters.bounded``). None: no bound, as in the paper.
        promise: π: how much of the loss one step may promise to take away, to first order; 1 is all of it. A step that
            promises more is shortened, all layers alike, and by itself what is not corrected, so that the learning
            rate may be far too high: 1 for SGD without momentum. For losses that can come close to zero and never
            below it, as mean squares and cross-entropies, that ``backward()`` is called on; where ``bound`` is, and
            not with :meth:`step` by hand. Counted (``counters.promised``). None: no limit.
        check: raise on NaN, inf or a failed factorisation instead of counting it. On a GPU this waits for the device.
        foresight: keep what :meth:`foresight` needs. Costs memory and time.
        process_group: the ranks that train this model together, whose inputs are all taken into account. None: those
            of the ``DistributedDataParallel`` around the model (it may be attached before or after it is wrapped, with
            either object) or of ``fully_shard``; without such a wrapper this process is alone.
        across_ranks: False is another algorithm, whose result depends on the number of ranks: this process corrects
            with its own inputs only. For a model that is not wrapped (docs/distributed.md).
        at: ``"step"``: the gradients in ``.grad`` are replaced at ``optimizer.step()``, for all micro-batches and ranks
            together. ``"backward"``: each weight's gradient is replaced where autograd computes it, so that ``.grad``
            is the consequentialist gradient after ``backward()``; every pass, micro-batch and rank is corrected with
            its own inputs, and costs less.
    """

    _is_made = False  # whether attributes are set by users now

    @refusing_unknown
    def __init__(
        self,
        model: nn.Module,
        damping: float | None = None,  # λ in the paper
        *,
        relative_damping: float | None = None,
        loss_reduction: LossReduction = "mean",
        include: Patterns | None = None,
        exclude: Patterns = (),
        averaging: float = 0.0,
        refresh: int = 1,
        largest_block: int | None = None,
        bound: float | None = BOUND,
        promise: float | None = None,
        check: bool = False,
        foresight: bool = False,
        process_group: "ProcessGroup | None" = None,
        across_ranks: bool = True,
        at: str = "step",
    ) -> None:
        check_at(at)
        chosen = Damping.chosen(damping, relative_damping)
        check_loss_reduction(loss_reduction)
        check_bound(bound)
        check_promise(promise)
        check_averaging(averaging, refresh, at=at, foresight=foresight)
        check_largest_block(largest_block)
        check_what_needs_the_step(at, foresight=foresight, process_group=process_group, across_ranks=across_ranks)
        self.model = model
        self.across_ranks = across_ranks
        self.at = at
        self.include = None if include is None else listed(include, "include")
        self.exclude = listed(exclude, "exclude")
        self.keeps_foresight = foresight
        inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        averages = Averages(averaging, refresh)
        refuse_averaged_blocks(largest_block, averages)
        groups = self._groups = Groups(model, chosen, largest_block)
        reports = self._reports = Reports(check=check, numbers=self._numbers_of_step)
        layers = self._layers = Layers(inner, self.include, self.exclude)
        at_step = StepCorrector(
            groups.damping_of, averages, self._largest_block_at_step, groups.are_apart, keep_rows=foresight
        )
        corrector: Corrector = at_step
        if at == "backward":
            corrector = BackwardCorrector(
                groups.damping_of,
                lambda entries: self._passes.divisor(entries),
                lambda *gathered: self._passes.solve(*gathered),
            )
        capture = self._capture = Capture(
            inner, layers.selection.corrected, wants=groups.owns, listener=corrector, before_entry=self._before_entry
        )
        loss = self._loss = LossDivisor(loss_reduction, capture.entries)
        capture.entries.loss_watch = LossWatch(lambda: loss.taken_over)
        rewriter = self._rewriter = Rewriter(
            capture, at_step, groups, reports, averages, foresight=foresight, bound=bound
        )
        territory = self._territory = Territory(capture, groups, at_step, at)
        parts = self._parts = Parts(layers, capture, at_step, groups, territory, rewriter, loss, reports)
        first_step = FirstStep(parts)
        self._passes = BackwardPasses(parts, first_step)
        self._together = Together(
            parts, model, across_ranks=across_ranks, foresight=foresight, settings=self._agreed_settings
        )
        self._stepping = Stepping(parts, at, first_step, self._together, self._notice_new_parameters)
        self._limit_promise(promise)
        self._tell_no_more: Callable[[], object] = bool  # that the optimiser is gone, if it is
        if process_group is not None:
            try:
                self._together.join(process_group, by_hand=True)
            except BaseException:
                self._stop_watching()
                raise
        self._is_made = True

    if not TYPE_CHECKING:  # for whom a class with this method would have any attribute

        def __setattr__(self, name: str, value: object) -> None:
            """Set what may be set; a subclass may have attributes of its own."""
            if self._is_made and type(self) is Consequentialism:
                refuse_unknown_attribute(Consequentialism, name)
            super().__setattr__(name, value)

    # ---- attaching ----------------------------------------------------------------------------------------------

    def attach(self, optimizer: Optimizer | Sequence[Optimizer]) -> "Consequentialism":
        """Correct the gradients at every ``optimizer.step()`` from now on.

        Args:
            optimizer: an optimiser, or a list of those that train the model together. All gradients are then corrected
                once, with ``at="step"`` when the first of them steps, and the others step with what is in ``.grad``.
        """
        optimizers = checked_optimizers(optimizer)
        if not self._capture.is_installed:
            raise RuntimeError("this Consequentialism was detached for good; make a new one with consequent.attach()")
        if self.optimizer is not None:
            raise RuntimeError(f"already attached to {names_of(self.optimizers)}; detach() first")
        refuse_bound_in_vain(self.bound, self.at, optimizers)
        refuse_promise_in_vain(self.promise, self.at, optimizers)
        mine = self._territory.checked(optimizers, foresight=self.keeps_foresight)
        for group in [group for one in optimizers for group in one.param_groups]:
            damping_in(group)  # raises now, not at the first step
            refuse_averaged_blocks(largest_block_in(group, self.largest_block), self._rewriter.averages)
        if not any(parameter.requires_grad for parameter in mine):
            self._reports.all_frozen(names_of(optimizers))
        self._capture.notice_parameters(self._capture.layers)
        self._groups.take(optimizers, when_gone=self._optimizer_is_gone)
        for one in optimizers:
            self._stepping.watch(one)
        self._parts.corrector.watch_plain()
        return self

    def detach(self) -> None:
        """Take everything off the model and the optimiser, which is plain again."""
        if self._groups.lost_its_optimizer:  # everything went with it
            self._tell_no_more()
            return
        if not self._capture.is_installed:
            raise RuntimeError("this Consequentialism is detached already")
        self._stepping.remove()
        self._groups.take((), when_gone=self._stop_watching)
        self._stop_watching()

    def _optimizer_is_gone(self) -> None:
        """The last of them was thrown away: the hooks on the model go with it, and the next gradient says so."""
        parameters = self._territory.parameters()
        self._stop_watching()
        self._tell_no_more = warn_at_next_backward_pass(parameters, self._reports, is_corrected)

    def _stop_watching(self) -> None:
        self._capture.remove()
        self._loss.remove()
        self._rewriter.forget_recordings()
        self._passes.after_pass.remove()

    # ---- stepping -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self) -> None:
        """Correct the gradients now, by hand; the next ``optimizer.step()`` will not do so again.

        For those who want to see or clip the corrected gradients, which are not bounded then: they may be a scaler's.
        With ``promise=`` that is an error.
        If NaN or inf is met, all gradients become zero and an attached optimiser's next step is skipped. With
        ``at="backward"`` the gradients are corrected already, and nothing is left to do.
        """
        if not self._capture.is_installed and not self._groups.lost_its_optimizer:
            raise RuntimeError("this Consequentialism is detached: there is nothing that it corrects")
        self._notice_new_parameters()
        if self.at == "backward":
            return
        refuse_promise_by_hand(self.promise)
        if self._groups.lost_its_optimizer:
            raise RuntimeError(
                "the optimiser this was attached to no longer exists; keep a reference to it: "
                "optimizer = …; consequent.attach(optimizer, model)"
            )
        if not self._stepping.has_work:
            raise RuntimeError(f"there is nothing to correct: {self._why_no_work()}")
        self._stepping.by_hand()

    def _why_no_work(self) -> str:
        plain = self.plain
        causes = [f"{shown(name)}, {plain[name]}" for name in self._capture.layers if name in plain]
        if len(causes) < len(self._capture.layers):
            return "no backward pass went through the model since the last step or zero_grad(). Call loss.backward()."
        more = f"; and {len(causes) - 3} more, see correction.plain" if len(causes) > 3 else ""
        return f"every layer keeps its plain gradient: {'; '.join(causes[:3])}{more}."

    def _before_entry(self) -> None:
        """Samples are about to enter the model."""
        self._notice_new_parameters()
        if self.at == "step":
            self._together.look_for_others()
        elif backward_pass_id() == -1:
            self._passes.after_pass.forget()

    def _notice_new_parameters(self) -> None:
        """Before samples enter the model and before a step: a group was added, a layer replaced, a state loaded?"""
        if self._groups.read_again():
            try:
                self._layers.select_again(self._capture)
                self._territory.refuse_layers_split_since()
            except BaseException:
                self._groups.forget()  # once the cause is mended, look again
                raise

    def _numbers_of_step(self) -> str:
        """What a message says of the present step: learning rates, λ, N, the loss's divisor."""
        rates = {float(group["lr"]) for group in self._groups.param_groups() if "lr" in group}
        words = [f"lr {' and '.join(f'{rate:g}' for rate in rates)}"] if rates else []
        words += map(str, self._groups.dampings())
        words += [f"N = {self.samples}", f"loss divided by {self._rewriter.divisor:g}"] if self.samples else []
        return "".join(f", {word}" for word in words)

    # ---- settings -----------------------------------------------------------------------------------------------

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimiser this is attached to; of several, the first."""
        return next(iter(self._groups.optimizers), None)

    @property
    def optimizers(self) -> list[Optimizer]:
        """All optimisers this is attached to."""
        return self._groups.optimizers

    @property
    def damping(self) -> float | None:
        """λ; None if it is relative. Setting it changes all parameter groups that have no damping of their own."""
        default = self._groups.default
        return None if default.relative else default.value

    @damping.setter
    def damping(self, damping: float) -> None:
        check_damping(damping)
        self._groups.change_default(Damping(float(damping)))

    @property
    def relative_damping(self) -> float | None:
        """ρ of ``λ = ρ · trace(XXᵀ) / min(N, D)``; None if λ is absolute. May be set, like ``damping``."""
        default = self._groups.default
        return default.value if default.relative else None

    @relative_damping.setter
    def relative_damping(self, relative_damping: float) -> None:
        check_damping(relative_damping, "relative_damping")
        self._groups.change_default(Damping(float(relative_damping), relative=True))

    @property
    def averaging(self) -> float:
        """β of the second moments' average over steps."""
        return self._rewriter.averages.averaging

    @property
    def refresh(self) -> int:
        """T: every how many steps that average is refreshed."""
        return self._rewriter.averages.refresh

    @property
    def largest_block(self) -> int | None:
        """B: wider layers are solved for in blocks. May be set, for parameter groups that have none of their own."""
        return self._groups.largest_block

    @largest_block.setter
    def largest_block(self, largest_block: int | None) -> None:
        check_largest_block(largest_block)
        self._refuse_blocks(largest_block)
        self._groups.largest_block = largest_block

    @property
    def bound(self) -> float | None:
        """β: by what fraction of their size one step may change a layer's outputs. May be set."""
        return self._rewriter.bound

    @bound.setter
    def bound(self, bound: float | None) -> None:
        check_bound(bound)
        refuse_bound_in_vain(bound, self.at, self.optimizers)
        self._rewriter.bound = bound

    @property
    def promise(self) -> float | None:
        """π: how much of the loss one step may promise to take away; None: any. May be set."""
        return self._rewriter.promise

    @promise.setter
    def promise(self, promise: float | None) -> None:
        check_promise(promise)
        refuse_promise_in_vain(promise, self.at, self.optimizers)
        self._limit_promise(promise)

    def _limit_promise(self, promise: float | None) -> None:
        losses = self._parts.corrector.losses
        self._rewriter.promise = promise
        self._parts.corrector.losses = None if promise is None else losses or LossValues(self._parts.groups.parameters)
        self._reports.causes = "NaN or inf" + ("" if promise is None else ", or a loss below zero (promise=),")

    @property
    def check(self) -> bool:
        """Whether NaN, inf and failed factorisations raise. May be set."""
        return self._reports.check

    @check.setter
    def check(self, check: bool) -> None:
        self._reports.check = check

    @property
    def loss_reduction(self) -> LossReduction:
        """How the loss sums up over samples. May be set."""
        return self._loss.reduction

    @loss_reduction.setter
    def loss_reduction(self, loss_reduction: LossReduction) -> None:
        check_loss_reduction(loss_reduction)
        self._loss.change(loss_reduction)

    def _largest_block_at_step(self, parameter: Tensor) -> int | None:
        """B for a parameter; a group's own may have come since attaching."""
        largest_block = self._groups.largest_block_of(parameter)
        self._refuse_blocks(largest_block)
        return largest_block

    def _refuse_blocks(self, largest_block: int | None) -> None:
        refuse_averaged_blocks(largest_block, self._rewriter.averages)
        if self._rewriter.exchange is not None:
            refuse_shared_blocks(largest_block)

    def _agreed_settings(self) -> dict[str, str]:
        averages = self._rewriter.averages
        settings = {"loss_reduction": repr(named(self.loss_reduction)), "check": str(self.check)}
        settings |= {"averaging": str(averages.averaging), "refresh": str(averages.refresh)}
        return settings | {"bound": str(self.bound), "promise": str(self.promise)}

    # ---- looking ------------------------------------------------------------------------------------------------

    def communication(self) -> Traffic:
        """What crosses ranks: for each layer of the last step what was sent, and what else could have been.

        Printing it shows a table.
        """
        return self._together.traffic

    def foresight(self) -> Foresight:
        """What the last step did to each layer's outputs on its own mini-batch; needs ``foresight=True``."""
        if not self.keeps_foresight:
            raise RuntimeError("foresight is off: attach with foresight=True (it costs memory and time)")
        if self._stepping.foresight is None:
            raise RuntimeError(
                "there is no step to look at yet, or the last one was skipped: foresight() looks at the last "
                "optimizer.step()"
            )
        return self._stepping.foresight

    @property
    def samples(self) -> int | None:
        """N of the last step: how many samples had entered the model; None before the first one."""
        return self._rewriter.samples

    @property
    def counters(self) -> Counters:
        """What happened so far. On a GPU, reading it waits for the device."""
        return self._reports.read()

    @property
    def corrected(self) -> dict[str, nn.Module]:
        """The layers that are corrected, by name."""
        plain = self.plain
        return {name: layer for name, layer in self._capture.layers.items() if name not in plain}

    @property
    def plain(self) -> dict[str, str]:
        """The modules that keep their plain gradient, by name, and why."""
        return self._layers.plain(self._capture, self._groups, self._rewriter.uncaptured)

    def __repr__(self) -> str:
        rewriter = self._rewriter
        return describe(self, self._groups, rewriter.sides, rewriter.averages, rewriter.divisor, self._loss.source)

    def __reduce__(self) -> Any:
        self._reports.copied()
        return type(None), ()  # a copied or pickled model has no correction: attach to the copy

    def state_dict(self) -> dict[str, Any]:
        """Settings, counters and averaged moments; group dampings are in the optimiser's own state dict."""
        return state_of(self, self._parts)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over settings, counters and averaged moments, if moments are averaged here and there.

        What is not saved stays as it is: ``averaging``, ``refresh``, and a ``loss_reduction`` that is a function.
        """
        load(state, self, self._parts)
