"""A step that promises no more than the loss has: what keeps all layers together from moving too far.

To first order a step takes ``μ ⟨U, G⟩`` off the loss by each weight: U is its new gradient, G the old one, μ the
learning rate. Each layer is corrected as if it moved alone, and all move at once: together they may promise many times
the loss, of which nothing is left below zero, and the outputs fly past their targets. So all are shortened alike, until
they promise at most a fraction π of the loss L:

    ``Σ μ ⟨U, G⟩ ≤ π L``

With π = 1 and no other limit that is Polyak's step size, for mini-batches (Loizou et al., AISTATS 2021), in the
correction's own metric. It has a meaning for losses alone whose least value is about zero.

As for :mod:`consequent.maths.bound`, μ is ``μ / (1 − m)`` with SGD's momentum m.
"""

import torch
from torch import Tensor


def shortening(promised: Tensor, allowed: Tensor) -> Tensor:
    """What all new gradients are multiplied by: 1 unless they promise more than is allowed.

    >>> [float(shortening(torch.tensor(promised), torch.tensor(1.0))) for promised in (4.0, 0.5, float("nan"))]
    [0.25, 1.0, 1.0]
    """
    return torch.where(promised > allowed, allowed / promised, 1.0)
