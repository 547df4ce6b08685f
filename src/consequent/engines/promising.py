"""Shortening all new gradients of a step alike, so that it promises no more than the loss has."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from consequent.capture.loss_values import LossValues
from consequent.maths.promise import shortening

ROUNDING = 1e-6  # by which a loss may be below zero

_REMEDY = "leave promise= out, and lower the learning rate where it is too high"


class Promise:
    """What a step promises: made before its gradients are corrected, kept when they are.

    Attributes:
        is_finite: whether the loss is; otherwise there is nothing to keep.

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
        loss: float | None,
        most: float,
    ) -> None:
        if any(p.grad is not None and not p.grad.is_cpu for p in parameters):
            raise RuntimeError(f"promise={most:g} is for models on a CPU so far: {_REMEDY}")
        if loss is None:
            raise RuntimeError(
                f"promise={most:g} asks how large the loss is, and it was not seen: call loss.backward() on it, or "
                f"torch.autograd.backward(), in one thread at a time. Or {_REMEDY}"
            )
        if loss < -ROUNDING and math.isfinite(loss):
            raise ValueError(
                f"promise={most:g} is for losses that are never below zero, and this one is {loss:g}: {_REMEDY}"
            )
        self._before = [(p, p.grad.clone()) for p in parameters if p.grad is not None]
        self._rates = [rate for p, _ in self._before if (rate := rate_of(p)) is not None]
        if len(self._rates) < len(self._before):
            raise RuntimeError(
                f"promise={most:g} asks how far the optimiser's step goes, and that it goes down: its momentum must be "
                f"below 1, maximize=False, and it must not be fused with a GradScaler. Or {_REMEDY}"
            )
        self.is_finite = math.isfinite(loss)
        self._factors = losses.scaled_since([p for p, _ in self._before])
        self._allowed = max(loss, 0.0) * most

    def keep(self) -> bool:
        """Shorten the gradients that are there now, if they promise too much; whether they did.

        What the passes left is the gradient of the loss. It may have been multiplied since, and the new gradient with
        it: ``⟨U, G⟩`` is of the latter as it is applied, and of the former as it was.
        """
        products = [_product(old, parameter.grad) for parameter, old in self._before]
        terms = zip(products, self._rates, self._factors, strict=True)
        promised = sum(rate * product / factor for product, rate, factor in terms)
        shorter = shortening(promised, self._allowed)
        if shorter == 1:
            return False
        for parameter, _ in self._before:
            assert parameter.grad is not None
            grad = parameter.grad._values() if parameter.grad.is_sparse else parameter.grad.data
            grad.mul_(shorter)  # without a trace: nobody is to take it for an edit
        return True


def _product(old: Tensor, new: Tensor | None) -> float:
    """``⟨U, G⟩``; in half precision squares of gradients would be nothing, or infinite."""
    assert new is not None
    dtype = torch.promote_types(old.dtype, torch.float32)
    old, new = old.to(dtype), new.to(dtype)
    if old.is_sparse and new.is_sparse:
        return float((old * new).coalesce().values().sum())
    old, new = (grad.to_dense() if grad.is_sparse else grad for grad in (old, new))
    return float(torch.dot(old.reshape(-1), new.reshape(-1)))  # without a third matrix
