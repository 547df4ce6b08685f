"""What the steps of a correction may promise: the loss and the rates are found, and all ranks agree on them."""

from collections.abc import Sequence

from torch import Tensor

from consequent.correction.parts import Parts
from consequent.engines.promising import REMEDY, Promise

_NOT_SEEN = (
    "asks how large the loss is, and it was not seen: call loss.backward() on it, or torch.autograd.backward(), in one "
    "thread at a time, on every rank"
)
_NOT_DOWN = (
    "asks how far the optimiser's step goes, and that it goes down: its momentum must be below 1, maximize=False, its "
    "learning rate no tensor on a GPU, and it must not be fused with a GradScaler"
)

WITHOUT_A_STEP = 10  # as the loss is zero: then it is told


class Promises:
    """Limits what steps promise, where π is set.

    Args:
        parts: of the correction.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._without_a_step = 0  # in a row

    def before(self) -> Promise | None:
        """Before gradients are corrected: what the step will promise. None without a limit."""
        rewriter, exchange = self._parts.rewriter, self._parts.rewriter.exchange
        most = rewriter.promise
        if most is None:
            return None
        loss = self._parts.corrector.loss()
        rates = self._rates()
        why = _NOT_SEEN if loss is None else _NOT_DOWN if rates is None else ""
        if exchange is not None and not exchange.ranks.is_true_everywhere(not why):
            why = why or "cannot be kept on another rank; the error there says why"
        if why or loss is None or rates is None:
            raise RuntimeError(f"promise={most:g} {why}. Or {REMEDY}")
        if exchange is not None:
            loss = loss._replace(value=exchange.mean(loss.value.to(rewriter.device)))
        ranks = None if exchange is None else exchange.ranks
        corrected = [parameter for layer in rewriter.to_be_rewritten() for parameter in layer]
        return Promise(rates, corrected, loss, most, may_wait=rewriter.looks, ranks=ranks)

    def after(self, promise: Promise | None, layers: Sequence[Sequence[Tensor]]) -> None:
        """When they are corrected: keep it.

        Args:
            promise: what :meth:`before` has returned.
            layers: each layer's parameters, of all whose gradients were corrected.
        """
        if promise is not None:
            parameters = [parameter for layer in layers for parameter in layer]
            self._parts.reports.add("promised", promise.keep(parameters))
            self._without_a_step = self._without_a_step + 1 if promise.is_nothing else 0
            if self._without_a_step == WITHOUT_A_STEP:
                self._parts.reports.nothing_promised(WITHOUT_A_STEP)

    def keep_of_plain(self) -> None:
        """Nothing is corrected at this step; what there is promises as well, if the loss was seen."""
        if self._parts.rewriter.promise is not None and self._parts.rewriter.exchange is None:
            if self._parts.corrector.loss() is not None:
                self.after(self.before(), ())
            self._parts.corrector.clear()  # a step was taken for all that there was

    def _rates(self) -> dict[Tensor, float] | None:
        """How far a gradient moves each of the optimiser's parameters; None where that is not known, or upwards."""
        parameters = self._parts.groups.parameters()
        rates = {parameter: self._rate_of(parameter) for parameter in parameters if parameter.grad is not None}
        known = {parameter: rate for parameter, rate in rates.items() if rate is not None}
        return known if len(known) == len(rates) else None

    def _rate_of(self, parameter: Tensor) -> float | None:
        groups = self._parts.groups
        group = groups.group_of(parameter)
        if group is None:
            return 0.0
        return None if group.get("maximize") else groups.rate_in_the_long_run(parameter)
