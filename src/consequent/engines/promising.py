"""Shortening all new gradients of a step alike, so that it promises no more than the loss has."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from consequent.capture.loss_values import LossNow
from consequent.capture.torch_internals import answers_at_once
from consequent.maths.promise import shortening
from consequent.ranks.process_group import Ranks
from consequent.ranks.sharded_tensors import holders_of, local

ROUNDING = 1e-6  # by which a loss may be below zero

_REMEDY = "leave promise= out, and lower the learning rate where it is too high"


class Promise:
    """What a step promises: made before its gradients are corrected, kept when they are.

    Attributes:
        is_sound: whether the loss is a number, and none below zero; otherwise the step must not be taken.

    Args:
        parameters: whose gradients are corrected.
        rate_of: how far a gradient moves a parameter in all, momentum included; None where that is not known.
        loss: whose gradients they are; None where it was not seen.
        most: π: how much of it may be promised.
        may_wait: whether the host may wait for a device to look at the loss.
        ranks: that train together, where there are several; each may have a part of a gradient alone.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        rate_of: Callable[[Tensor], float | None],
        loss: LossNow | None,
        most: float,
        *,
        may_wait: bool,
        ranks: Ranks | None,
    ) -> None:
        if loss is None:
            raise RuntimeError(
                f"promise={most:g} asks how large the loss is, and it was not seen: call loss.backward() on it, or "
                f"torch.autograd.backward(), in one thread at a time. Or {_REMEDY}"
            )
        is_negative = (loss.value < -ROUNDING) & loss.value.isfinite()
        if (may_wait or answers_at_once(loss.value)) and is_negative:
            raise ValueError(
                f"promise={most:g} is for losses that are never below zero, and this one is {float(loss.value):g}: "
                f"{_REMEDY}"
            )
        grads = {p: local(p.grad) for p in parameters if p.grad is not None}
        self._before = dict(zip(grads, _copies(list(grads.values())), strict=True))
        self._rates: dict[Tensor, float] = {}
        for parameter in self._before:
            rate = rate_of(parameter)
            if rate is None:
                raise RuntimeError(
                    f"promise={most:g} asks how far the optimiser's step goes, and that it goes down: its momentum "
                    "must be below 1, maximize=False, its learning rate no tensor on a GPU, and it must not be fused "
                    f"with a GradScaler. Or {_REMEDY}"
                )
            self._rates[parameter] = rate
        self.is_sound = loss.value.isfinite() & ~is_negative
        self._factors = loss.factors
        self._ranks = ranks
        self._allowed = loss.value.clamp(min=0) * most

    def keep(self, parameters: Iterable[Tensor]) -> bool | Tensor:
        """Shorten the gradients that these parameters have now, if they promise too much; whether they did.

        What the passes left is the gradient of the loss. It may have been multiplied since, and the new gradient with
        it: ``⟨U, G⟩`` is of the latter as it is applied, and of the former as it was.
        """
        corrected = [parameter for parameter in parameters if parameter in self._before]
        by_rate: dict[float, list[Tensor]] = {}
        for parameter in corrected:
            by_rate.setdefault(self._rates[parameter], []).append(parameter)
        promised, one = torch.zeros_like(self._allowed), torch.ones_like(self._allowed)
        for rate, its in by_rate.items():
            products = torch.stack([self._product(p).to(promised) for p in its])
            factors = torch.stack([self._factors.get(p, one).to(promised) for p in its])
            promised += rate * (products / factors).sum()
        if self._ranks is not None:
            self._ranks.add_up(promised)
        shorter = shortening(promised, self._allowed)
        is_shortened = shorter < 1
        if answers_at_once(shorter) and not is_shortened:
            return False
        _shorten([local(parameter.grad) for parameter in corrected if parameter.grad is not None], shorter)
        return True if answers_at_once(shorter) else is_shortened

    def _product(self, parameter: Tensor) -> Tensor:
        """A parameter's ``⟨U, G⟩``; of several ranks, this one's share in it."""
        assert parameter.grad is not None
        product = _product(self._before[parameter], local(parameter.grad))
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


def _shorten(grads: list[Tensor], shorter: Tensor) -> None:
    """Multiply gradients without a trace: nobody is to take it for an edit."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for grad in grads:
        values = grad._values() if grad.is_sparse else grad.data
        if values.dtype.itemsize < 4:  # what it is multiplied by would be rounded as well, to nothing if it is small
            values.copy_(values.to(shorter.dtype) * shorter.to(values.device))
        else:
            by_device.setdefault(values.device, []).append(values)
    for device, its in by_device.items():
        torch._foreach_mul_(its, shorter.to(device))
