"""Consequentialism: the object that is attached to an optimiser and rewrites the gradients before each step."""

import math
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from consequent.capture.at_backward import BackwardCorrector, Gathered
from consequent.capture.at_step import StepCorrector
from consequent.capture.capture import Capture, Corrector
from consequent.capture.separate_scales import in_one_unit
from consequent.capture.torch_internals import backward_pass_id
from consequent.capture.use import Entry, Use
from consequent.engines.gpu.after_pass import AfterPass
from consequent.engines.in_backward import corrected_in_backward
from consequent.engines.step import Rewriter
from consequent.foresight import Foresight
from consequent.layers import joint_of, kind_of
from consequent.maths.bound import DEFAULT as BOUND
from consequent.maths.checks import check_damping, check_positive
from consequent.maths.damping import DEFAULT, Damping
from consequent.maths.precision import in_full_precision
from consequent.options.arguments import refusing_unknown
from consequent.options.loss_divisor import LossDivisor, named, sum_over_ranks
from consequent.options.parameter_groups import Groups, damping_in, largest_block_in, parameters_of
from consequent.options.selection import Patterns, Selection, listed, readable_name, select_layers
from consequent.options.settings import (
    LossReduction,
    check_at,
    check_averaging,
    check_largest_block,
    check_loss_reduction,
    loss_divisor,
)
from consequent.ranks.exchange import Exchange
from consequent.ranks.process_group import (
    Ranks,
    check_process_group,
    group_of_model,
    group_of_running_wrapper,
    several_are_running,
)
from consequent.ranks.sharded_tensors import is_sharded
from consequent.ranks.traffic import Traffic
from consequent.reports.counters import Counters
from consequent.reports.describe import describe
from consequent.reports.doubts import doubt_about_samples
from consequent.reports.errors import ConsequentWarning
from consequent.reports.guards import (
    checked_optimizers,
    refuse_parameters_in_two,
    refuse_split_layers,
    refuse_step_in_backward,
    refuse_uncaptured,
)
from consequent.reports.optimizer_gone import warn_at_next_backward_pass
from consequent.reports.reports import Reports, shown
from consequent.statistics.averages import Averages

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Consequentialism", "attach"]

STATE_VERSION = 2  # of state dicts

# All that exist, so that no gradient is corrected by two of them.
_LIVE: "weakref.WeakSet[Consequentialism]" = weakref.WeakSet()


@refusing_unknown
def attach(
    optimizer: Optimizer | Sequence[Optimizer],
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
    check: bool = False,
    foresight: bool = False,
    process_group: "ProcessGroup | None" = None,
    across_ranks: bool = True,
    at: str = "step",
) -> "Consequentialism":
    """Turn an optimiser into its consequentialist version: SGD into C-SGD, Adam into C-Adam.

    From now on ``optimizer.step()`` first replaces the gradient ``ΔZ Xᵀ`` of every Linear, convolutional and recurrent
    layer and of attention by ``ΔZ (XᵀX + λI)⁻¹ Xᵀ``. :class:`Consequentialism` says more of the arguments.

    Args:
        optimizer: any first-order optimiser of torch's kind, or a list of those that train the model together
            (Muon for matrices and AdamW for the rest): a layer's weight may lie in one and its bias in another.
        model: the model whose parameters it holds.
        damping: λ itself, added to the diagonal of the Gram matrix.
        relative_damping: or λ as a fraction of the inputs' mean eigenvalue at full rank.
        loss_reduction: how the loss sums up over samples.
        include: which layers to correct.
        exclude: which to leave out.
        averaging: β of an average of the inputs' second moments over steps.
        refresh: T: every how many steps that average is refreshed.
        largest_block: B: wider layers are solved for in blocks of so many features; None: each as a whole.
        bound: by what fraction of their size a step may change a layer's outputs; None: by any.
        check: raise on NaN, inf or a failed factorisation.
        foresight: keep what :meth:`Consequentialism.foresight` needs.
        process_group: the ranks that train this model together.
        across_ranks: False: each rank corrects with its own inputs only.
        at: ``"step"`` or ``"backward"``: when gradients are replaced.

    Example:
        >>> import torch, consequent
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        >>> correction = consequent.attach(optimizer, model, damping=1e-6)
        >>> X, T = torch.eye(2, 3) + 0.5, torch.tensor([[1.0], [2.0]])
        >>> (0.5 * (model(X) - T) ** 2).mean().backward()
        >>> optimizer.step()
        >>> bool((model(X) - T).abs().max() < 1e-3)  # one step with lr=1 lands on the targets
        True
        >>> correction.detach()  # and it is plain SGD again
    """
    checked_optimizers(optimizer)
    correction = Consequentialism(
        model,
        damping,
        relative_damping=relative_damping,
        loss_reduction=loss_reduction,
        include=include,
        exclude=exclude,
        averaging=averaging,
        refresh=refresh,
        largest_block=largest_block,
        bound=bound,
        check=check,
        foresight=foresight,
        process_group=process_group,
        across_ranks=across_ranks,
        at=at,
    )
    try:
        correction.attach(optimizer)
    except BaseException:
        correction.detach()
        raise
    return correction


class Consequentialism:
    """Watches a model's layers and rewrites their gradients before each step of an optimiser.

    Args:
        model: the model, before or after it is wrapped or compiled (what was compiled is then compiled anew).
        damping: λ, added to the diagonal of the un-normalised Gram matrix, as in the paper. 0 is the pseudo-inverse.
            A parameter group of an optimiser may carry its own ``"damping"`` or ``"relative_damping"``; where weight
            and bias of a layer lie in two, the weight's counts.
        relative_damping: instead of ``damping``: ρ of ``λ = ρ · trace(XXᵀ) / min(N, D)``, a fraction of the mean
            eigenvalue of the inputs at full rank, whatever their size and number. Without either it is
            :data:`consequent.maths.damping.DEFAULT`.
        loss_reduction: how the loss sums up over samples, so that the learning rate keeps the paper's meaning:
            ``"mean"`` (over the samples that enter the model) or ``"sum"``. A loss module of torch that you call after
            the model (``criterion = nn.CrossEntropyLoss()``): what its calls divide by, ignored targets and class
            weights seen; on a GPU the step waits for that count. ``"mse"``: half of the elements of the model's
            outputs, for the default ``F.mse_loss``, which has no ½. ``"tokens"``: all positions of outputs
            ``[…, classes]``. A loss function of torch, as it divides the model's outputs by default. Or the loss's own
            divisor: a number, or a function of the number of samples. Where the first step finds ``"mean"``
            implausible, it warns.
        include: which layers to correct: module types, names or compiled regular expressions. None: all that can be,
            embeddings aside.
        exclude: which to leave out, likewise.
        averaging: β of the second moments' average over steps, ``S ← β S + (1 − β) XXᵀ / N``, for layers that are
            solved for by features. 0: each step's own.
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
            left alone, and so are several optimisers that are attached together. What it shortens is counted
            (``counters.bounded``). None: no bound, as in the paper.
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
        check: bool = False,
        foresight: bool = False,
        process_group: "ProcessGroup | None" = None,
        across_ranks: bool = True,
        at: str = "step",
    ) -> None:
        check_at(at)
        if at == "backward" and foresight:
            raise ValueError(
                'foresight=True compares gradients at the step with those before: it needs at="step", the default'
            )
        default = Damping.chosen(damping, relative_damping) or DEFAULT
        check_loss_reduction(loss_reduction)
        _check_bound(bound)
        check_averaging(averaging, refresh, at=at, foresight=foresight)
        check_largest_block(largest_block)
        if process_group is not None:
            check_process_group(process_group)
            if at == "backward":
                raise ValueError(
                    'process_group= is for at="step": with at="backward" each rank corrects with its own inputs, and '
                    "who averages the gradients averages the corrections"
                )
            if not across_ranks:
                raise ValueError("process_group names ranks, and across_ranks=False says to ignore them: give one")
        self.model = model
        self.across_ranks = across_ranks
        self.at = at
        self.include = None if include is None else listed(include, "include")
        self.exclude = listed(exclude, "exclude")
        self.keeps_foresight = foresight
        self._groups = Groups(model, default, largest_block)
        self._hooks: list[RemovableHandle] = []
        self._reports = Reports(check=check, numbers=self._numbers_of_step)
        self._withheld: list[tuple[Tensor, Tensor]] = []  # gradients kept from the optimiser while it steps
        self._has_doubted = False  # whether N was looked at, which is done once
        self._skip_next = False  # the gradients now in .grad hold NaN or inf
        self._foresight: Foresight | None = None
        self._inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        self._leaves_out_joints = False  # whether modules of several products are not corrected
        selection = self._selected()
        self._plain = selection.plain
        averages = Averages(averaging, refresh)
        self._at_step = StepCorrector(
            self._groups.damping_of,
            averages,
            self._largest_block_at_step,
            self._groups.are_apart,
            keep_rows=foresight,
        )
        corrector: Corrector = self._at_step
        if at == "backward":
            corrector = BackwardCorrector(self._groups.damping_of, self._divisor_of_pass, self._corrected_in_backward)
        self._capture = Capture(
            self._inner,
            selection.corrected,
            wants=self._groups.owns,
            listener=corrector,
            before_entry=self._before_entry,
        )
        self._capture.entries.looks_at_tokens = loss_reduction == "mean"
        self._loss = LossDivisor(loss_reduction, self._capture.entries)
        self._rewriter = Rewriter(
            self._capture, self._at_step, self._groups, self._reports, averages, foresight=foresight, bound=bound
        )
        self._refuse_averaged_blocks(largest_block)
        if process_group is not None:
            self._share_out(process_group)
        self._after_pass = AfterPass(self._reports.on_device, self._solved_after_pass)
        _LIVE.add(self)

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
            raise RuntimeError(f"already attached to {_names_of(self.optimizers)}; detach() first")
        mine = self._checked_layer_parameters(optimizers)
        self._refuse_others_on(optimizers, mine)
        for group in [group for one in optimizers for group in one.param_groups]:
            damping_in(group)  # raises now, not at the first step
            self._refuse_averaged_blocks(largest_block_in(group, self.largest_block))
        if not any(parameter.requires_grad for parameter in mine):
            self._reports.all_frozen(_names_of(optimizers))
        self._capture.notice_parameters(self._capture.layers)
        self._groups.take(optimizers, when_gone=self._optimizer_is_gone)
        for one in optimizers:
            self._hooks.append(one.register_step_pre_hook(self._before_step))
            self._hooks.append(one.register_step_post_hook(self._after_step))
        return self

    def _checked_layer_parameters(self, optimizers: Sequence[Optimizer]) -> set[Tensor]:
        """The parameters of layers to correct that the optimisers hold. Raises where these do not fit the model."""
        layers = self._parameters_by_layer()
        mine = {p for optimizer in optimizers for p in parameters_of(optimizer)}
        mine &= {p for parameters in layers.values() for p in parameters}
        whole = set(self._inner.parameters()) | mine
        strange = [one for one in optimizers if not mine or whole.isdisjoint(parameters_of(one))]
        if strange:
            raise ValueError(
                f"{_names_of(strange)} holds no parameter of the {len(layers)} layers to correct; "
                "was the optimiser made for another model, or before the model's parameters were replaced?"
            )
        if len(optimizers) == 1:
            return mine
        self._refuse_parameters_in_two(optimizers)
        if self.keeps_foresight:
            raise ValueError(
                f"foresight=True looks at what one optimiser's step does, and {_names_of(optimizers)} make a step "
                "together: leave it out, or put all parameters in one optimiser"
            )
        for layer, parameters in layers.items():
            holders = {id(one) for one in optimizers if not set(parameters_of(one)).isdisjoint(parameters)}
            if len(holders) > 1 and self.at == "step" and is_sharded(parameters[0]):
                raise ValueError(
                    f"layer {self._capture.names[layer]!r}: its weight and its bias are sharded and lie in two "
                    "optimisers, which is not corrected at the step. Put both in one optimiser, or attach with "
                    'at="backward".'
                )
        return mine

    def _refuse_parameters_in_two(self, optimizers: Sequence[Optimizer]) -> None:
        by_name = {self._capture.names[layer]: its for layer, its in self._parameters_by_layer().items()}
        refuse_parameters_in_two(by_name, optimizers)

    def _refuse_others_on(self, optimizers: Sequence[Optimizer], mine: set[Tensor]) -> None:
        """Raise if another correction would correct the same gradients, or a part of the same layers.

        Args:
            optimizers: to be attached.
            mine: the parameters of layers that they hold.
        """
        for other in _LIVE:
            if other is self or not other._capture.is_installed:
                continue
            is_same = any(one is theirs for one in optimizers for theirs in other.optimizers)
            both = {p for p in mine & other._layer_parameters() if other._groups.owns(p)}
            if both and (is_same or "backward" in (self.at, other.at)):
                raise RuntimeError(
                    f"{_names_of(other.optimizers) or 'another correction'}: attached to these layers already, "
                    "which would be corrected twice. Keep the first correction, or detach() it."
                )
            if other.optimizers:
                held = {layer: mine.intersection(its) for layer, its in self._parameters_by_layer().items()}
                refuse_split_layers(held, other._held_by_layer(), self._capture.names)

    def detach(self) -> None:
        """Take everything off the model and the optimiser, which is plain again."""
        if not self._capture.is_installed:
            raise RuntimeError("this Consequentialism is detached already")
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._groups.take((), when_gone=self._stop_watching)
        self._stop_watching()

    def _optimizer_is_gone(self) -> None:
        """The last of them was thrown away: the hooks on the model go with it, and the next gradient says so."""
        parameters = self._layer_parameters()
        self._stop_watching()
        warn_at_next_backward_pass(parameters, self._reports, _is_corrected)

    def _stop_watching(self) -> None:
        self._capture.remove()
        self._loss.remove()
        self._rewriter.forget_recordings()
        self._after_pass.remove()

    # ---- stepping -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self) -> None:
        """Correct the gradients now, by hand; the next ``optimizer.step()`` will not do so again.

        For those who want to see or clip the corrected gradients, which are not bounded then: they may be a scaler's.
        If NaN or inf is met, all gradients become zero and an attached optimiser's next step is skipped. With
        ``at="backward"`` the gradients are corrected already, and nothing is left to do.
        """
        if not self._capture.is_installed and not self._groups.lost_its_optimizer:
            raise RuntimeError("this Consequentialism is detached: there is nothing that it corrects")
        self._notice_new_parameters()
        if self.at == "backward":
            return
        if self._groups.lost_its_optimizer:
            raise RuntimeError(
                "the optimiser this was attached to no longer exists; keep a reference to it: "
                "optimizer = …; consequent.attach(optimizer, model)"
            )
        if not self._rewriter.has_work(self._other_captures()):
            raise RuntimeError(f"there is nothing to correct: {self._why_no_work()}")
        if not self._correct(bounded=False):  # what becomes of the gradients before they are applied is not known
            self._skip_next = True
            for parameter in self._groups.parameters():
                if parameter.grad is not None:
                    parameter.grad.zero_()

    def _why_no_work(self) -> str:
        plain = self.plain
        causes = [f"{shown(name)}, {plain[name]}" for name in self._capture.layers if name in plain]
        if len(causes) < len(self._capture.layers):
            return "no backward pass went through the model since the last step or zero_grad(). Call loss.backward()."
        more = f"; and {len(causes) - 3} more, see correction.plain" if len(causes) > 3 else ""
        return f"every layer keeps its plain gradient: {'; '.join(causes[:3])}{more}."

    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args[0] is the optimiser
        if closure is None:
            self._correct_or_withhold()
            return None

        def corrected_closure() -> Any:
            loss = closure()
            with torch.no_grad():
                self._correct_or_withhold()
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": corrected_closure}
        return (args[0], corrected_closure, *args[2:]), kwargs

    @torch.no_grad()
    @in_full_precision
    def _after_step(self, *_: Any) -> None:
        for parameter, grad in self._withheld:
            parameter.grad = grad
        self._withheld = []
        for record in self._at_step.records.values():
            record.mark_stepped()
        self._foresight = self._rewriter.foresight_of_the_step()

    def _correct_or_withhold(self) -> None:
        self._notice_new_parameters()
        if self.at == "backward":
            self._rewriter.warn_of_misbehaving()
            return
        refuse_step_in_backward(self._at_step)
        if self._rewriter.has_work(self._other_captures()):
            must_skip = not self._correct(bounded=True)
        else:
            must_skip = self._skip_next
            if not must_skip:
                refuse_uncaptured(self._capture, self._at_step, self._groups.owns, self._rewriter.uncaptured)
                self._rewriter.warn_of_misbehaving()
        if must_skip:
            # An optimiser leaves parameters without a gradient alone: no step, no decay, no momentum.
            self._skip_next = True  # until there are new gradients
            self._withheld = [(p, p.grad) for p in self._groups.parameters() if p.grad is not None]
            for parameter, _ in self._withheld:
                parameter.grad = None

    @in_full_precision
    def _correct(self, *, bounded: bool) -> bool:
        """Rewrite the gradients. False if the step must not be taken; then nothing was rewritten."""
        self._skip_next = False
        self._warn_of_ranks_left_out()
        passes = self._at_step.passes()
        self._doubt_samples(passes)

        def seen(samples: int) -> float:
            return self._divisor_on_all_ranks(passes)

        with in_one_unit(self._at_step.records.values()):
            return self._rewriter.rewrite(seen if self._loss.is_seen else self.loss_reduction, passes, bounded=bounded)

    def _divisor_on_all_ranks(self, passes: list[set[Entry]]) -> float:
        """What was seen of the loss, on all ranks together, who ask this together."""
        failure: Exception | None = None
        divisor = math.nan
        try:
            divisor = self._loss.seen(passes)
        except (RuntimeError, ValueError) as error:
            failure = error  # first tell the others, who would wait
        if self._rewriter.exchange is not None:
            divisor = sum_over_ranks(divisor, self._rewriter.exchange.ranks.gather_numbers)
        if failure is not None:
            raise failure
        if math.isnan(divisor):
            raise RuntimeError("on another rank, what the loss was divided by is not known; the error there says why")
        return divisor or 1.0  # no target counts: the gradient is zero

    def _numbers_of_step(self) -> str:
        """What a message says of the present step: learning rates, λ, N, the loss's divisor."""
        rates = {float(group["lr"]) for group in self._groups.param_groups() if "lr" in group}
        words = [f"lr {' and '.join(f'{rate:g}' for rate in rates)}"] if rates else []
        words += map(str, self._groups.dampings())
        words += [f"N = {self.samples}", f"loss divided by {self._rewriter.divisor:g}"] if self.samples else []
        return "".join(f", {word}" for word in words)

    def _other_captures(self) -> list[StepCorrector]:
        return [correction._at_step for correction in _LIVE if correction is not self]

    # ---- in blocks --------------------------------------------------------------------------------------------------

    def _largest_block_at_step(self, parameter: Tensor) -> int | None:
        """B for a parameter; a group's own may have come since attaching."""
        largest_block = self._groups.largest_block_of(parameter)
        self._refuse_averaged_blocks(largest_block)
        if self._rewriter.exchange is not None:
            self._refuse_shared_blocks(largest_block)
        return largest_block

    def _refuse_averaged_blocks(self, largest_block: int | None) -> None:
        if largest_block is not None and self._rewriter.averages.are_used:
            raise ValueError(
                f"largest_block={largest_block}: blocks are not averaged; leave it out, or averaging= and refresh="
            )

    def _refuse_shared_blocks(self, largest_block: int | None) -> None:
        if largest_block is not None:
            raise RuntimeError(
                f"largest_block={largest_block}: blocks are not exchanged between ranks; leave it out, or attach with "
                'at="backward"'
            )

    # ---- in the backward pass ---------------------------------------------------------------------------------------

    def _divisor_of_pass(self, entries: set[Entry]) -> float:
        samples = self._capture.entries.count([entries])
        self._doubt_samples([entries])
        if self._loss.is_seen:
            divisor = self._loss.seen([entries]) or 1.0  # no target counts: the gradient is zero
        else:
            divisor = loss_divisor(self.loss_reduction, samples)
        self._rewriter.samples, self._rewriter.divisor = samples, divisor
        self._reports.add_step(self._rewriter.device)
        return divisor

    def _doubt_samples(self, passes: list[set[Entry]]) -> None:
        """At the first step: tell of an N that can hardly be what the loss was averaged over."""
        if self._has_doubted:
            return
        self._has_doubted = True
        self._warn_of_halves()
        self._capture.entries.looks_at_tokens = False
        if self.loss_reduction == "mean":
            self._reports.samples_in_doubt(doubt_about_samples(passes, self._inner))

    def _warn_of_halves(self) -> None:
        """At the first step: tell of layers whose weight, or bias, is trained and in none of the optimisers."""
        if not self.optimizers:
            return
        for layer, parameters in self._parameters_by_layer().items():
            trained = [p for p in parameters if p.requires_grad]
            held = [p for p in trained if self._groups.owns(p)]
            if 0 < len(held) < len(trained):
                names = {id(p): name for name, p in layer.named_parameters()}
                missing = [p for p in trained if not self._groups.owns(p)]
                parts = [[names.get(id(p), "weight or bias") for p in some] for some in (held, missing)]
                self._reports.half_held(self._capture.names[layer], _names_of(self.optimizers), *parts)
                return

    def _corrected_in_backward(
        self, gathered: Gathered, damping: Damping, scale: float, accumulators: Sequence[Node | None]
    ) -> dict[Tensor, Tensor]:
        largest_block = self._groups.largest_block_of(gathered.products[0].use.key)
        waits = not self.check and largest_block is None
        if waits and self._after_pass.takes(gathered, damping, accumulators):
            self._after_pass.add(gathered, damping, scale)
            return {}
        corrected = corrected_in_backward(gathered, damping, scale, check=self.check, largest_block=largest_block)
        name = self._capture.names.get(gathered.products[0].use.layer, "")
        self._reports.solved(name, corrected.finite, corrected.rescued, corrected.fallen_back)
        self._rewriter.sides[name] = corrected.side
        return corrected.gradients

    def _solved_after_pass(self, use: Use, side: str) -> None:
        self._rewriter.sides[self._capture.names.get(use.layer, "")] = side

    # ---- ranks --------------------------------------------------------------------------------------------------

    def _before_entry(self) -> None:
        """Samples are about to enter the model."""
        self._notice_new_parameters()
        if self.at == "backward" and backward_pass_id() == -1:
            self._after_pass.forget()
        if self.at == "step" and self._rewriter.exchange is None and several_are_running():
            weight, _ = self._capture.parameters_of(next(iter(self._capture.layers.values())))
            group = group_of_model(self.model, self._layer_parameters()) or group_of_running_wrapper(weight)
            if group is not None:
                self._share_out(group)

    def _share_out(self, group: "ProcessGroup") -> None:
        """Train together with the ranks of this group from now on."""
        ranks = Ranks(group)
        if ranks.size == 1:
            return
        if not self.across_ranks:
            raise RuntimeError(
                f"across_ranks=False, but the model's gradients are averaged over {ranks.size} ranks: corrected with "
                "each rank's own inputs, the ranks' weights would drift apart. Leave across_ranks out; or train the "
                "bare model, and average the gradients between correction.step() and optimizer.step()."
            )
        self._refuse_shared_blocks(self.largest_block)
        sparse = [name for name, layer in self._capture.layers.items() if _is_sparse(layer)]
        if sparse:
            raise RuntimeError(
                f"layer {sparse[0]!r} is a table of embeddings, whose counts are not exchanged between ranks: leave it "
                'out of include=, or attach with at="backward"'
            )
        if self.keeps_foresight:
            raise RuntimeError(
                f"foresight=True looks at the samples of one process, and {ranks.size} ranks train together: "
                "leave it out, or look at a model on one rank"
            )
        self._leaves_out_joints = True
        selection = self._selected()
        self._plain = selection.plain
        for name, layer in self._capture.layers.items():
            if name not in selection.corrected and joint_of(layer) is not None:
                self._reports.left_plain(name, selection.plain[name])
        self._capture.extend(selection.corrected)
        self._at_step.share_out()
        self._rewriter.exchange = Exchange(
            self._capture,
            self._at_step,
            ranks,
            self._groups.damping_of,
            self._rewriter.averages,
            self._agreed_settings,
        )

    def _agreed_settings(self) -> dict[str, str]:
        averages = self._rewriter.averages
        settings = {"loss_reduction": repr(named(self.loss_reduction)), "check": str(self.check)}
        settings |= {"averaging": str(averages.averaging), "refresh": str(averages.refresh)}
        return settings | {"bound": str(self.bound)}

    def _warn_of_ranks_left_out(self) -> None:
        if self.across_ranks and self._rewriter.exchange is None and several_are_running():
            self._reports.ranks_left_out(dist.get_world_size())

    def communication(self) -> Traffic:
        """What crosses ranks: for each layer of the last step what was sent, and what else could have been.

        Printing it shows a table.
        """
        if self._rewriter.exchange is None:
            raise RuntimeError(
                "this process corrects alone: the model was not called inside of a DistributedDataParallel yet, is not "
                "sharded by fully_shard, and no process_group was given"
            )
        return self._rewriter.exchange.ranks.traffic

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
        self._refuse_averaged_blocks(largest_block)
        if self._rewriter.exchange is not None:
            self._refuse_shared_blocks(largest_block)
        self._groups.largest_block = largest_block

    @property
    def bound(self) -> float | None:
        """β: by what fraction of their size one step may change a layer's outputs. May be set."""
        return self._rewriter.bound

    @bound.setter
    def bound(self, bound: float | None) -> None:
        _check_bound(bound)
        self._rewriter.bound = bound

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
        self._loss.remove()
        self._loss = LossDivisor(loss_reduction, self._capture.entries)

    def _parameters_by_layer(self) -> dict[nn.Module, list[Tensor]]:
        layers = self._capture.layers.values()
        return {layer: [p for unit in self._capture.units_of(layer) for p in unit] for layer in layers}

    def _layer_parameters(self) -> set[Tensor]:
        return {p for parameters in self._parameters_by_layer().values() for p in parameters}

    def _held_by_layer(self) -> dict[nn.Module, set[Tensor]]:
        """Of each layer, the parameters that the optimisers hold."""
        return {layer: set(filter(self._groups.owns, its)) for layer, its in self._parameters_by_layer().items()}

    def _selected(self) -> Selection:
        """Which layers of the model are corrected now."""
        selection = select_layers(self._inner, self.include, self.exclude)
        if self._leaves_out_joints:
            joint = [name for name, layer in selection.corrected.items() if joint_of(layer) is not None]
            for name in joint:
                del selection.corrected[name]
                selection.plain[name] = 'its inputs are not exchanged between ranks: at="backward" corrects it'
            if joint and not selection.corrected:
                raise RuntimeError(
                    f"layer {joint[0]!r} has several products inside, whose inputs are not exchanged between ranks, "
                    'and there is no other layer to correct: attach with at="backward"'
                )
        return selection

    def _notice_new_parameters(self) -> None:
        """Before samples enter the model and before a step: a group was added, a layer replaced, a state loaded?"""
        if self._groups.read_again():
            try:
                selection = self._selected()
                self._plain = selection.plain
                self._capture.extend(selection.corrected)
                self._refuse_layers_split_since()
            except BaseException:
                self._groups.forget()  # once the cause is mended, look again
                raise

    def _refuse_layers_split_since(self) -> None:
        """A group was added: weight and bias of a layer may lie in two corrections' optimisers now, or one in both."""
        self._refuse_parameters_in_two(self.optimizers)
        for other in _LIVE:
            if other is not self and other._capture.is_installed and other.optimizers and self.optimizers:
                refuse_split_layers(self._held_by_layer(), other._held_by_layer(), self._capture.names)

    # ---- looking ------------------------------------------------------------------------------------------------

    def foresight(self) -> Foresight:
        """What the last step did to each layer's outputs on its own mini-batch; needs ``foresight=True``."""
        if not self.keeps_foresight:
            raise RuntimeError("foresight is off: attach with foresight=True (it costs memory and time)")
        if self._foresight is None:
            raise RuntimeError(
                "there is no step to look at yet, or the last one was skipped: foresight() looks at the last "
                "optimizer.step()"
            )
        return self._foresight

    @property
    def samples(self) -> int | None:
        """N of the last step: how many samples had entered the model; None before the first one."""
        return self._rewriter.samples

    @property
    def counters(self) -> Counters:
        """What happened so far. On a GPU, reading it waits for the device."""
        return self._reports.read()

    def _replaced(self) -> dict[str, str]:
        """Layers that took the place of others since the optimiser was attached, which does not hold them."""
        reason = (
            "replaced after attaching: add its parameters to the optimiser (add_param_group), or detach() and attach "
            "anew with an optimiser that has them"
        )
        present = {readable_name(name): module for name, module in self._inner.named_modules()}
        known = self._capture.layers
        return {name: reason for name, layer in known.items() if name in present and present[name] is not layer}

    @property
    def corrected(self) -> dict[str, nn.Module]:
        """The layers that are corrected, by name."""
        plain = self.plain
        return {name: layer for name, layer in self._capture.layers.items() if name not in plain}

    @property
    def plain(self) -> dict[str, str]:
        """The modules that keep their plain gradient, by name, and why."""
        reasons = self._plain | self._replaced()
        for name, layer in self._capture.layers.items():
            parameters = [p for unit in self._capture.units_of(layer) for p in unit]
            if layer in self._capture.misbehaving:
                reasons[name] = self._capture.misbehaving[layer]
            elif name in self._rewriter.uncaptured:
                reasons[name] = self._rewriter.uncaptured[name]
            elif not any(parameter.requires_grad for parameter in parameters):
                reasons[name] = "frozen"
            elif not any(self._groups.owns(parameter) for parameter in parameters):
                reasons[name] = "not among the optimiser's parameters"
        return reasons

    def __repr__(self) -> str:
        return describe(self, self._groups, self._rewriter.sides, self._rewriter.divisor, self._loss.source)

    def __reduce__(self) -> Any:
        return type(None), ()  # a copied or pickled model has no correction: attach to the copy

    def state_dict(self) -> dict[str, Any]:
        """Settings, counters and averaged moments; group dampings are in the optimiser's own state dict."""
        reduction = None if callable(self.loss_reduction) else self.loss_reduction
        averages = self._rewriter.averages
        names = {weight: name for name, (weight, *_) in reversed(self._weights_of_layers().items())}
        kept = {"averages": averages.state_dict(names)} if averages.are_used else {}
        return {
            **kept,
            "version": STATE_VERSION,
            "damping": self.damping,
            "relative_damping": self.relative_damping,
            "bound": self.bound,
            "largest_block": self.largest_block,
            "loss_reduction": reduction,
            "counters": asdict(self.counters),
        }

    def _weights_of_layers(self) -> dict[str, tuple[Tensor, int, int]]:
        """The weight of each layer, its groups, and the columns of its inputs; none where only its bias is trained."""
        found = {}
        for name, layer in self._capture.layers.items():
            weight, kind = self._capture.parameters_of(layer)[0], kind_of(layer)
            if kind is None:
                continue  # several products, which have no averages
            operation = kind.of(layer)
            found[name] = weight, operation.groups, operation.features if weight.requires_grad else 0
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over settings, counters and averaged moments, if moments are averaged here and there.

        What is not saved stays as it is: ``averaging``, ``refresh``, and a ``loss_reduction`` that is a function.
        """
        missing = {"damping", "relative_damping", "loss_reduction", "counters"} - set(state)
        if missing:
            raise ValueError(f"not a state dict of Consequentialism: {sorted(missing)} missing")
        version = state.get("version", 1)
        if version not in range(1, STATE_VERSION + 1):
            raise ValueError(f"a state dict of version {version!r}: this library knows versions up to {STATE_VERSION}")
        damping = _damping_of_state(state)  # raises before anything is changed
        bound = state.get("bound")  # in the first version there was none
        _check_bound(bound)
        largest_block = state.get("largest_block", self.largest_block)  # not in older states
        check_largest_block(largest_block)
        self._refuse_averaged_blocks(largest_block)
        counters = Counters(**state["counters"])
        if "averages" in state and self._rewriter.averages.are_used:
            self._rewriter.averages.load_state_dict(state["averages"], self._weights_of_layers())
        if state["loss_reduction"] is not None:
            self.loss_reduction = state["loss_reduction"]
        self._groups.change_default(damping)
        self.bound = bound
        self.largest_block = largest_block
        self._reports.restore(counters)


def _is_corrected(parameter: Tensor) -> bool:
    """Whether somebody does now."""
    return any(
        other._capture.is_installed and other._groups.owns(parameter) and parameter in other._layer_parameters()
        for other in _LIVE
    )


def _names_of(optimizers: Sequence[Optimizer]) -> str:
    return " and ".join(type(optimizer).__name__ for optimizer in optimizers)


def _check_bound(bound: float | None) -> None:
    if bound is not None:
        check_positive("bound", bound, "0.2 is usual, None is no bound")


def _is_sparse(layer: nn.Module) -> bool:
    kind = kind_of(layer)
    return kind is not None and kind.is_sparse


def _damping_of_state(state: dict[str, Any]) -> Damping:
    """λ of a state dict. The first version had a relative one beside an absolute one, and in another unit."""
    damping, relative = state["damping"], state["relative_damping"]
    if state.get("version", 1) == 1 and relative is not None:
        warnings.warn(
            f"this state's relative_damping={relative!r} was meant as a fraction of the inputs' mean squared norm, "
            "trace(XXᵀ)/N; now it is one of trace(XXᵀ)/min(N, D), which is more where a layer has more rows than "
            "columns. It is taken as it is: set correction.relative_damping to what you want",
            ConsequentWarning,
            stacklevel=3,
        )
        damping = None
    chosen = Damping.chosen(damping, relative)
    if chosen is None:
        raise ValueError("a state dict of Consequentialism has a damping or a relative_damping, this one has neither")
    return chosen
