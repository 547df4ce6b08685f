"""Optimisers by name, and several that step as one."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

import consequent
from consequent import Correction


class Optimizers:
    """Optimisers that step together as if they were one, with or without a correction of them all.

    The learning rates that they have now are the peaks of a schedule. A decay takes that fraction off every weight in a
    step at the peak, beside whatever the optimisers do, so that it means the same for all of them.
    """

    def __init__(self, model: nn.Module, parts: list[Optimizer], decay: float = 0.0) -> None:
        self.parts = parts
        self._decay = decay
        self._factor = 1.0
        self.correction: Correction | None = None
        self._model = model
        self._peaks = [float(group["lr"]) for group in self.param_groups]

    def attach(self, **options: Any) -> None:
        """Makes them their C- versions, anew if they were, with options of `consequent.attach`."""
        if self.correction is not None:
            self.correction.detach()
        self.correction = consequent.attach(self.parts, self._model, **options)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all."""
        return [group for part in self.parts for group in part.param_groups]

    @property
    def states(self) -> list[dict[str, Any]]:
        """What they keep of each parameter."""
        return [part.state[one] for part in self.parts for group in part.param_groups for one in group["params"]]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets all gradients of the model."""
        self._model.zero_grad(set_to_none=set_to_none)

    def step(self) -> None:
        """Takes one step of each."""
        if self._decay:
            with torch.no_grad():
                torch._foreach_mul_(list(self._model.parameters()), 1 - self._decay * self._factor)
        for part in self.parts:
            part.step()

    def schedule(self, factor: float) -> None:
        """Sets all learning rates to a fraction of their peaks."""
        self._factor = factor
        for group, peak in zip(self.param_groups, self._peaks, strict=True):
            group["lr"] = factor * peak


def plain_optimizer(
    name: str,
    parameters: Iterable[Tensor] | Iterable[dict[str, Any]],
    lr: float,
    weight_decay: float = 0.0,
    *,
    momentum: float = 0.9,
    betas: tuple[float, float] = (0.9, 0.999),
    capturable: bool = False,
) -> Optimizer:
    """Returns one of torch's: sgd, momentum, nesterov, adam, adamw or rmsprop, with what of the options is its own."""
    if name in ("adam", "adamw"):
        kind = Adam if name == "adam" else AdamW
        return kind(parameters, lr=lr, betas=betas, weight_decay=weight_decay, capturable=capturable)
    if name == "rmsprop":
        return RMSprop(parameters, lr=lr, weight_decay=weight_decay, capturable=capturable)
    momentum = 0.0 if name == "sgd" else momentum
    return SGD(parameters, lr=lr, momentum=momentum, nesterov=name == "nesterov", weight_decay=weight_decay)
