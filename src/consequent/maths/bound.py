"""A step that cannot explode: how much one step may change a layer's outputs.

All layers move at once, and each is corrected as if it moved alone: at too high a learning rate that feeds on itself.
So the change that a step makes to a layer's outputs on its own mini-batch is held below a fraction β of their size,

    ``μ √⟨U, G⟩ ≤ β √(trace(XXᵀ) / D · max(O, ‖W‖²))``

``⟨U, G⟩ = ‖U X‖² + λ‖U‖²`` is the size of the change, and nearly free: U is the new gradient, G the old one. On the
right is ``‖W X‖`` for inputs without structure, or what it would be for O outputs and weights of the usual size.

The learning rate counts in this only where the step is proportional to the gradient: SGD with its momentum m, of which
``μ / (1 − m)`` is the length in the long run. Adam and its like make steps of their own length, whatever the gradient.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

DEFAULT = 0.2  # β


class Change(NamedTuple):
    """What the bound asks of a new gradient.

    Attributes:
        energy: ``⟨U, G⟩``, of all groups together.
        trace: of ``XXᵀ``, likewise.
        columns: of X, D times the groups.
        outputs: O.
        parameters: W and its biases.
    """

    energy: float | Tensor
    trace: float | Tensor
    columns: int
    outputs: int
    parameters: Sequence[Tensor]


def shortening(change: Change, limit: float) -> float:
    """What the new gradient is multiplied by: 1 unless it would change the outputs too much. Looks at the numbers.

    Args:
        change: of one layer.
        limit: ``β / μ``, μ with the loss's divisor in it.
    """
    energy, trace, columns, outputs, parameters = change
    energy, allowed = float(energy), limit**2 * float(trace) / columns
    if not energy > allowed * outputs:
        return 1.0
    squared = sum(float(parameter.detach().float().square().sum()) for parameter in parameters)
    return math.sqrt(min(1.0, allowed * max(outputs, squared) / energy))


def shortenings_on_device(changes: Sequence[Change], limits: Sequence[float]) -> Tensor:
    """The same for several layers, all on one device that is not waited for: ``[layers]``."""
    energies = torch.stack([torch.as_tensor(change.energy) for change in changes]).float()
    traces = torch.stack([torch.as_tensor(change.trace) for change in changes]).float()
    flat = [parameter.detach() for change in changes for parameter in change.parameters]
    norms = torch.stack([norm.float() for norm in torch._foreach_norm(flat)]).square()
    squared = torch.stack([part.sum() for part in norms.split([len(change.parameters) for change in changes])])
    known = [(limit**2 / change.columns, change.outputs) for change, limit in zip(changes, limits, strict=True)]
    shares, outputs = torch.tensor(known, dtype=torch.float32, device=energies.device).unbind(-1)
    allowed = shares * traces * torch.maximum(outputs, squared)
    return torch.where(energies > allowed, (allowed / energies).sqrt(), 1)
