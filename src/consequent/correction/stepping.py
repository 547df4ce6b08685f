"""Around an optimiser's step: gradients are corrected before it, or kept from it where NaN or inf was met."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from consequent.capture.separate_scales import in_one_unit
from consequent.capture.use import Entry
from consequent.correction.first_step import FirstStep
from consequent.correction.parts import Parts
from consequent.correction.promises import Promises
from consequent.correction.together import Together
from consequent.foresight import Foresight
from consequent.maths.precision import in_full_precision
from consequent.options.loss_divisor import sum_over_ranks
from consequent.reports.guards import refuse_step_in_backward, refuse_uncaptured


class Stepping:
    """What a correction does at the steps of its optimisers.

    Args:
        parts: of the correction.
        at: ``"step"``, or ``"backward"``: then gradients are corrected already.
        first_step: what is looked at once.
        together: other ranks.
        notice: called before all else: the model or the groups may have changed.
    """

    def __init__(
        self, parts: Parts, at: str, first_step: FirstStep, together: Together, notice: Callable[[], None]
    ) -> None:
        self._parts = parts
        self._at = at
        self._corrector = parts.corrector
        self._groups = parts.groups
        self._rewriter = parts.rewriter
        self._loss = parts.loss
        self._promises = Promises(parts)
        self._first_step = first_step
        self._together = together
        self._notice = notice
        self._hooks: list[RemovableHandle] = []
        self._withheld: list[tuple[Tensor, Tensor]] = []  # gradients kept from the optimiser while it steps
        self._bad_pass: int | None = None  # the last backward pass of gradients that hold NaN or inf
        self.foresight: Foresight | None = None  # of the last step, where it is kept

    def watch(self, optimizer: Optimizer) -> None:
        """Correct at its steps from now on."""
        self._hooks.append(optimizer.register_step_pre_hook(self._before_step))
        self._hooks.append(optimizer.register_step_post_hook(self._after_step))

    def remove(self) -> None:
        """Take the hooks off the optimisers."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @property
    def has_work(self) -> bool:
        """Whether a backward pass was captured for the gradients now in ``.grad``; all ranks ask this together."""
        return self._rewriter.has_work(self._parts.territory.other_correctors())

    def by_hand(self) -> None:
        """Correct now; the next step will not do so again, and is skipped if NaN or inf was met."""
        if not self._correct(bounded=False):  # what becomes of the gradients before they are applied is not known
            self._bad_pass = self._corrector.last_pass
            for parameter in self._groups.parameters():
                if parameter.grad is not None:
                    parameter.grad.zero_()

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
        for record in self._corrector.records.values():
            record.mark_stepped()
        self.foresight = self._rewriter.foresight_of_the_step()

    def _correct_or_withhold(self) -> None:
        self._notice()
        if self._at == "backward":
            self._rewriter.list_unsolved()
            return
        refuse_step_in_backward(self._corrector)
        if self.has_work:
            must_skip = not self._correct(bounded=True)
        else:
            must_skip = self._bad_pass == self._corrector.last_pass  # until there are new gradients
            if not must_skip:
                refuse_uncaptured(self._parts.capture, self._corrector, self._groups.owns, self._rewriter.uncaptured)
                self._rewriter.list_uncaptured([])
                self._promises.keep_of_plain()
        if must_skip:
            # An optimiser leaves parameters without a gradient alone: no step, no decay, no momentum.
            self._bad_pass = self._corrector.last_pass
            self._withheld = [(p, p.grad) for p in self._groups.parameters() if p.grad is not None]
            for parameter, _ in self._withheld:
                parameter.grad = None

    @in_full_precision
    def _correct(self, *, bounded: bool) -> bool:
        """Rewrite the gradients. False if the step must not be taken; then nothing was rewritten."""
        self._bad_pass = None
        self._together.warn_of_ranks_left_out()
        passes = self._corrector.passes()
        self._first_step.look(passes)

        def seen(samples: int) -> float:
            return self._divisor_on_all_ranks(passes)

        promise = self._promises.before() if bounded else None
        with in_one_unit(self._corrector.records.values()):
            reduction = seen if self._loss.is_seen else self._loss.reduction
            is_sound = True if promise is None else promise.is_sound
            layers = self._rewriter.rewrite(reduction, passes, bounded=bounded, loss_is_sound=is_sound)
        if layers is None:
            return False
        if bounded:
            self._promises.after(promise, layers)
        self._rewriter.note_corrected()
        return True

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
