"""A step that cannot explode: how much one step may change a layer's outputs.

All layers move at once, and each is corrected as if it moved alone: at too high a learning rate that feeds on itself.
So the change that a step makes to a layer's outputs on its own mini-batch is held below a fraction β of the size of its
inputs, number for number (root mean squares):

    ``μ √(⟨U, G⟩ / O) ≤ β √(trace(XXᵀ) / D)``

``⟨U, G⟩ = ‖U X‖² + λ‖U‖²`` is the size of the change, and nearly free: U is the new gradient, G the old one. Tables of
embeddings, each of whose rows is looked up by few samples, are not bounded.

The learning rate counts in this only where the step is proportional to the gradient: SGD with its momentum m, of which
``μ / (1 − m)`` is the length in the long run. Adam and its like make steps of their own length, whatever the gradient.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

DEFAULT = 0.2  # β, chosen by benchmarks/defaults


class Change(NamedTuple):
    """What the bound asks of a new gradient.

    Attributes:
        energy: ``⟨U, G⟩``, of all groups together.
        trace: of ``XXᵀ``, likewise.
        outputs_per_column: O, divided by D times the groups.
    """

    energy: float | Tensor
    trace: float | Tensor
    outputs_per_column: float

    def is_within(self, limit: float) -> bool:
        """Whether it need not be shortened. Looks at the numbers."""
        return not float(self.energy) > limit**2 * float(self.trace) * self.outputs_per_column


def shortening(change: Change, limit: float) -> float:
    """What the new gradient is multiplied by: 1 unless it would change the outputs too much. Looks at the numbers.

    Args:
        change: of one layer.
        limit: ``β / μ``, μ with the loss's divisor in it.
    """
    energy = float(change.energy)
    allowed = limit**2 * float(change.trace) * change.outputs_per_column
    return math.sqrt(allowed / energy) if energy > allowed else 1.0


def shortenings_on_device(changes: Sequence[Change], limits: Sequence[float]) -> Tensor:
    """The same for several layers, all on one device that is not waited for: ``[layers]``."""
    energies, allowed = [], []
    for (energy, trace, outputs_per_column), limit in zip(changes, limits, strict=True):
        assert isinstance(energy, Tensor)
        assert isinstance(trace, Tensor)
        energies.append(energy.float())
        allowed.append(trace.float() * (limit**2 * outputs_per_column))  # a tensor of these numbers would be waited for
    return shortenings_of(torch.stack(energies), torch.stack(allowed))


def shortenings_of(energies: Tensor, allowed: Tensor) -> Tensor:
    """What gradients of these energies are multiplied by, where so much is allowed: ``[layers]``."""
    ratios = allowed / energies
    return torch.where(ratios < 1, ratios.sqrt(), 1)
