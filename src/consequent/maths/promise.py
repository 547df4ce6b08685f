"""A step that promises no more than the loss has: what keeps all layers together from moving too far.

To first order a step takes ``μ ⟨U, G⟩`` off the loss by each weight: U is its new gradient, G the old one, μ the
learning rate. Each layer is corrected as if it moved alone, and all move at once: together they may promise many times
the loss, of which nothing is left below zero, and the outputs fly past their targets. So all are shortened alike, until
they promise at most a fraction π of the loss L:

    ``Σ μ ⟨U, G⟩ ≤ π L``

Parameters that are not corrected promise as well, ``μ ⟨G, G⟩``, at a rate that may be far too high for them. They are
shortened by themselves: both sides share ``π L``, and neither gets less than half of it for the other's sake.

With π = 1 and no other limit that is Polyak's step size, for mini-batches (Loizou et al., AISTATS 2021), in the
correction's own metric. It has a meaning for losses alone whose least value is about zero.

As for :mod:`consequent.maths.bound`, μ is ``μ / (1 − m)`` with SGD's momentum m.
"""

import torch
from torch import Tensor


def shortenings(corrected: Tensor, plain: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """What gradients are multiplied by, so that they promise no more than is allowed together.

    Args:
        corrected: what those that were corrected promise.
        plain: what the others do.
        allowed: how much they may.

    Returns:
        a number for each of the two sides, 1 where it is not shortened.

    >>> for promised in ([4.0, 0.0], [4.0, 0.25], [4.0, 8.0]):
    ...     print([float(one) for one in shortenings(*torch.tensor(promised), torch.tensor(1.0))])
    [0.25, 1.0]
    [0.1875, 1.0]
    [0.125, 0.0625]
    """
    left = [allowed - promised.clamp(min=0) for promised in (plain, corrected)]
    return _shortening(corrected, left[0], allowed), _shortening(plain, left[1], allowed)


def _shortening(promised: Tensor, left: Tensor, allowed: Tensor) -> Tensor:
    """Of one side, when the other has taken what it wants."""
    share = torch.maximum(left, allowed / 2)
    return torch.where(promised > share, share / promised, 1.0)
