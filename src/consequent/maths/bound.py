"""A step that cannot explode: how much one step may change a layer's outputs.

All layers move at once, and each is corrected as if it moved alone: at too high a learning rate that feeds on itself.
So the change that a step makes to a layer's outputs on its own mini-batch is held below a fraction β of the size of its
inputs, number for number (root mean squares):

    ``μ ‖G X‖ / √(rows · outputs) ≤ β ‖X‖ / √(rows · columns)``

G is the gradient that the step is about to apply. It is known only at the step, after unscaling and clipping; how much
a gradient of this direction changes the outputs is known in the backward pass, and does not depend on its length:
:func:`relative_change`. So the bound is the product of the two, and needs no pass of its own. For the corrected
gradient U of a plain one P, ``⟨U, P⟩ = ‖U X‖² + λ‖U‖²`` is the squared change, and a little more.

The learning rate counts in this only where the step is proportional to the gradient: SGD with its momentum m, of which
``μ / (1 − m)`` is the length in the long run. Adam and its like make steps of their own length, whatever the gradient.
Where weight and bias have different rates, the higher one counts.
"""

from typing import Any

import torch
from torch import Tensor

DEFAULT = 0.2  # β, chosen by benchmarks/defaults


def relative_change(energy: Tensor, size: Tensor, trace: Tensor, columns: int, outputs: int) -> Tensor:
    """The squared change of the outputs by a gradient of length 1, relative to the inputs; 0 for a gradient of zeros.

    Args:
        energy: ``⟨U, P⟩``, the squared change by the gradient as it is.
        size: its squared length.
        trace: of ``XXᵀ``.
        columns: of X, of each group.
        outputs: of each group.
    """
    return torch.where(size == 0, 0, energy / size / trace * (columns / outputs))


def shortening(limit: float, squared_change: Tensor) -> Tensor:
    """What gradients are multiplied by: 1 unless their step would change the outputs too much.

    Args:
        limit: β.
        squared_change: of the outputs by the step, relative to the inputs: ``(μ ‖G‖)²`` times the
            :func:`relative_change`.
    """
    return (limit / squared_change.clamp(min=0).sqrt()).nan_to_num(nan=1, posinf=1).clamp(max=1)


def rate_in_the_long_run(group: dict[str, Any], *, is_first: bool = False) -> Any:
    """How far a gradient moves a parameter in all, for a parameter group of SGD; 0 where that has no end.

    Args:
        group: the parameter group.
        is_first: whether it is the parameter's first gradient, which SGD does not dampen.

    Example:
        >>> round(rate_in_the_long_run({"lr": 0.01, "momentum": 0.9, "dampening": 0}), 6)
        0.1
    """
    momentum, rate = float(group["momentum"]), abs(group["lr"])
    if momentum == 0:
        return rate
    dampening = 0.0 if is_first else float(group["dampening"])
    return rate * (1 - dampening) / (1 - momentum) if 0 < momentum < 1 else 0.0
