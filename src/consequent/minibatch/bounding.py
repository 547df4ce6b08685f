"""The bound at the step of SGD, for layers that are corrected with their own inputs (:mod:`consequent.maths.bound`)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from consequent.maths.bound import rate_in_the_long_run, shortening
from consequent.maths.precision import may_sync
from consequent.minibatch.layer import OwnInputs
from consequent.minibatch.product import CHANGE, FAILED, PASSES


@torch.no_grad()
def shorten(layers: Sequence[OwnInputs], groups: dict[Tensor, dict[str, Any]], bound: float, scale: Any) -> None:
    """Shorten the gradients of those layers whose outputs would change too much.

    Args:
        layers: one for each weight.
        groups: the optimiser's group of each parameter.
        bound: β.
        scale: by which a scaler has multiplied the gradients, where a fused optimiser divides by it.
    """
    for layer in layers:
        told, layer.probe.grad = layer.probe.grad, None
        layer.failed = layer.failed if told is None else layer.failed + told[FAILED]
        weight, gradients = layer.module.weight, [p.grad for p in layer.parameters if p.grad is not None]
        if told is None or not gradients or weight not in groups:
            continue
        squares = torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients]).square().sum()
        rate = rate_in_the_long_run(groups[weight]) / scale
        factor = shortening(bound, rate**2 * squares * told[CHANGE] / told[PASSES])
        if not may_sync(factor) or factor < 1:
            for gradient in gradients:
                gradient.mul_(factor)
