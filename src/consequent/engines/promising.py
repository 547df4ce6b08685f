"""Shortening the gradients of a step, so that it promises no more than the loss has."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from consequent.capture.loss_values import LossNow
from consequent.capture.torch_internals import answers_at_once
from consequent.maths.promise import shortenings
from consequent.ranks.process_group import Ranks
from consequent.ranks.sharded_tensors import holders_of, local

ROUNDING = 1e-3  # by which a loss may be below zero: one that is meant to be so will soon be further
SCALED = 1 / 128  # gradients that are multiplied by less than this were scaled before, and are not only clipped

REMEDY = "leave promise= out, and lower the learning rate where it is too high"


class Promise:
    """What a step promises: made before its gradients are corrected, kept when they are.

    Attributes:
        is_sound: whether the loss is a number, and none below zero; otherwise the step must not be taken.
        is_nothing: whether nothing is left of the step, as far as the host knows: the loss is zero, its gradient not.

    Args:
        rates: how far a gradient moves each of the optimiser's parameters in all, momentum included.
        corrected: those whose gradients may be corrected.
        loss: whose gradients they are.
        most: π: how much of it may be promised.
        may_wait: whether the host may wait for a device to look at the loss.
        ranks: that train together, where there are several; each may have a part of a gradient alone.
    """

    def __init__(
        self,
        rates: Mapping[Tensor, float],
        corrected: Iterable[Tensor],
        loss: LossNow,
        most: float,
        *,
        may_wait: bool,
        ranks: Ranks | None,
    ) -> None:
        value = loss.value
        if ranks is None:  # of several each may have a part of the gradients alone, and all must see the same
            value = value * torch.where(loss.usual_factor < SCALED, loss.usual_factor, 1.0)  # without a scaler's
        is_negative = (value < -ROUNDING) & value.isfinite()
        if (may_wait or answers_at_once(value)) and is_negative:
            raise ValueError(
                f"promise={most:g} is for losses that are never below zero, and this one is {float(value):g}: {REMEDY}"
            )
        self.is_sound = value.isfinite() & ~is_negative
        grads = {p: local(p.grad) for p in corrected if p.grad is not None}
        self._before = dict(zip(grads, _copies(list(grads.values())), strict=True))
        self._rates = rates
        self._factors, self._usual_factor = loss.factors, loss.usual_factor
        self._ranks = ranks
        self._allowed = loss.value.clamp(min=0) * most
        self.is_nothing = False

    def keep(self, parameters: Iterable[Tensor]) -> bool | Tensor:
        """Shorten the gradients that there are now, if they promise too much; whether they did.

        Args:
            parameters: whose gradients were corrected.
        """
        corrected = [parameter for parameter in parameters if parameter in self._before]
        known = set(corrected)
        plain = [p for p in self._rates if p.grad is not None and p not in known]
        promised = torch.stack([self._promised(corrected), self._promised(plain)])
        if self._ranks is not None:
            self._ranks.add_up(promised)
        shorter = torch.stack(shortenings(promised[0], promised[1], self._allowed))
        is_shortened = (shorter < 1).any()
        if answers_at_once(shorter) and not is_shortened:
            return False
        self.is_nothing = answers_at_once(shorter) and bool((shorter == 0).any())
        for its, factor in zip((corrected, plain), shorter.unbind(), strict=True):
            _shorten(its, factor)
        return True if answers_at_once(shorter) else is_shortened

    def _promised(self, parameters: Iterable[Tensor]) -> Tensor:
        """What a step with their gradients promises.

        What the passes left is the gradient of the loss. It may have been multiplied since, and the new gradient with
        it: ``⟨U, G⟩`` is of the latter as it is applied, and of the former as it was.
        """
        by_rate: dict[float, list[Tensor]] = {}
        for parameter in parameters:
            by_rate.setdefault(self._rates[parameter], []).append(parameter)
        promised, usual = torch.zeros_like(self._allowed), self._usual_factor
        for rate, its in by_rate.items():
            products = torch.stack([self._product(p).to(promised) for p in its])
            factors = torch.stack([self._factors.get(p, usual).to(promised) for p in its])
            promised += rate * (products / factors).sum()
        return promised

    def _product(self, parameter: Tensor) -> Tensor:
        """A parameter's ``⟨U, G⟩``; of several ranks, this one's share in it."""
        assert parameter.grad is not None
        now = local(parameter.grad)
        product = _product(self._before.get(parameter, now), now)
        return product if self._ranks is None else product / holders_of(parameter, self._ranks.size)


def _product(old: Tensor, new: Tensor) -> Tensor:
    """``⟨U, G⟩``; in half precision squares of gradients would be nothing, or infinite."""
    dtype = torch.promote_types(old.dtype, torch.float32)
    old, new = old.to(dtype), new.to(dtype)
    if old.is_sparse and new.is_sparse:
        return (old * new).coalesce().values().sum()
    old, new = (grad.to_dense() if grad.is_sparse else grad for grad in (old, new))
    return torch.dot(old.reshape(-1), new.reshape(-1))  # without a third matrix


def _copies(grads: list[Tensor]) -> list[Tensor]:
    """Copies of gradients; the dense ones in one call, as a GPU has them soonest."""
    dense = [grad for grad in grads if not grad.is_sparse]
    copies = iter(torch._foreach_add(dense, 0.0) if dense else ())
    return [grad.clone() if grad.is_sparse else next(copies) for grad in grads]


def _shorten(parameters: Iterable[Tensor], shorter: Tensor) -> None:
    """Multiply gradients without a trace: nobody is to take it for an edit."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            grad = local(parameter.grad)
            by_device.setdefault(grad.device, []).append(grad._values() if grad.is_sparse else grad.data)
    for device, grads in by_device.items():
        factor = shorter.to(device)
        for grad in grads:
            if grad.dtype.itemsize < 4:  # the factor would be rounded as well, to nothing if it is small
                grad.copy_(grad.float() * factor)
        full = [grad for grad in grads if grad.dtype.itemsize >= 4]
        if full:
            torch._foreach_mul_(full, factor)
