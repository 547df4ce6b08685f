"""Shortening all new gradients of a step alike, so that it promises no more than the loss has."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from consequent.capture.loss_values import LossValues
from consequent.maths.promise import shortening

_REMEDY = "leave promise= out, and lower the learning rate where it is too high"


class Promise:
    """What a step promises: made before its gradients are corrected, asked when they are.

    Args:
        parameters: whose gradients are corrected.
        rate_of: how far a gradient moves a parameter in all, momentum included; None where that is not known.
        losses: of the backward passes.
        loss: all of these together.
        most: π: how much of it may be promised.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        rate_of: Callable[[Tensor], float | None],
        losses: LossValues,
        loss: float | Tensor | None,
        most: float,
    ) -> None:
        if loss is None:
            raise RuntimeError(
                f"promise={most:g} asks how large the loss is, and it was not seen: call loss.backward() on it, or "
                f"torch.autograd.backward(), in one thread at a time. Or {_REMEDY}"
            )
        if isinstance(loss, float) and loss < 0:
            raise ValueError(
                f"promise={most:g} is for losses that are never below zero, and this one is {loss:g}: {_REMEDY}"
            )
        known = [(p, p.grad.clone()) for p in parameters if p.grad is not None and not p.grad.is_sparse]
        rates = [rate_of(p) for p, _ in known]
        if any(rate is None for rate in rates):
            raise RuntimeError(
                f"promise={most:g} asks how far the optimiser's step goes, and that cannot be known: its momentum is "
                "1 or more, its learning rate is a tensor on a GPU, or it is fused and a GradScaler's. Use a plain "
                f"number, foreach instead of fused; or {_REMEDY}"
            )
        self._parameters = parameters
        self._before = known
        self._rates = rates
        self._factors = losses.scaled_since([p for p, _ in known])
        self._allowed = loss * most
        self._place = loss.device if isinstance(loss, Tensor) else torch.device("cpu")

    def keep(self) -> bool | Tensor:
        """Shorten the gradients that are there now; whether they were, a tensor on a device that is not waited for.

        What the passes left is the gradient of the loss. It may have been multiplied since, and the new gradient with
        it: ``⟨U, G⟩`` is of the latter as it is applied, and of the former as it was.
        """
        promised: float | Tensor = 0.0
        for (parameter, old), rate, factor in zip(self._before, self._rates, self._factors, strict=True):
            assert parameter.grad is not None
            assert rate is not None
            product = torch.sum(old * parameter.grad, dtype=torch.promote_types(old.dtype, torch.float32))
            promised = promised + (rate * product / factor).to(self._place)
        if self._place.type == "cpu":
            promised = float(promised)
        shorter = shortening(promised, self._allowed)
        if isinstance(shorter, float) and shorter == 1:
            return False
        for parameter in self._parameters:
            if (grad := parameter.grad) is not None:
                factor = shorter.to(grad.device) if isinstance(shorter, Tensor) else shorter
                grad.data.mul_(factor)  # without a trace: nobody is to take it for an edit
        return shorter < 1
