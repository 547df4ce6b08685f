"""The damped inverse of a second moment with the entry 1 of a bias, as three parts, and the product with it.

For inputs with second moment S, mean s and an entry 1, eliminating that entry leaves

    ``K = (S + λI − s sᵀ / (1 + λ))⁻¹``,    ``m = s / (1 + λ)``,    ``κ = 1 / (1 + λ)``

and a gradient G of the weight with the gradient g of the bias becomes ``U = (G − g mᵀ) K`` with ``u = κ g − U m``.
So weights and biases need not be put together in memory. All are means over rows, and λ counts in these units.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from consequent.maths.damping import Damping
from consequent.maths.factorisation import damped_inverse, improved_inverse

NEAR_ENOUGH = 0.2  # of an inverse before the last step that improves it, which squares the distance
MOST_STEPS = 4


class Inverse(NamedTuple):
    """K, m and κ of many groups.

    Attributes:
        matrix: K, ``[groups, D, D]``.
        shift: m, ``[groups, D]``; zeros where there is no bias.
        unit: κ, ``[groups]``.
        trace: of S, and of the entry 1.
        failed: how many factorisations failed.
    """

    matrix: Tensor
    shift: Tensor
    unit: Tensor
    trace: Tensor
    failed: int | Tensor = 0

    def of(self, place: slice) -> "Inverse":
        """That of some of the groups."""
        return Inverse(self.matrix[place], self.shift[place], self.unit[place], self.trace[place])


def parts_of(inverse: Inverse) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """K, m, κ and the trace."""
    return inverse.matrix, inverse.shift, inverse.unit, inverse.trace


class Counts(NamedTuple):
    """Numbers of each group.

    Attributes:
        rows: N, by which a second moment's sum was divided,
        rank: and what relative damping divides the trace by.
        ones: 1 where there is a bias.
    """

    rows: Tensor
    rank: Tensor
    ones: Tensor


@dataclass
class Known:
    """An inverse of moments that were much the same, which is improved if it is near enough.

    The host does not wait to learn whether it was. If not, the inverse stays as it is until the next one is asked for.

    Attributes:
        matrix: K.
        steps: in which it is improved; below 0: not for so many times.
        distance: how far the last one was; None: it was not improved.
    """

    matrix: Tensor
    steps: int = 2
    distance: Tensor | None = None

    def improved(self, moment: Tensor, level: Tensor) -> Tensor | None:
        """The inverse of another moment; None if this one is known to be too far from it."""
        if self.distance is not None and not float(self.distance) < NEAR_ENOUGH:
            self.steps, self.distance = self.steps + 1 if self.steps < MOST_STEPS else -MOST_STEPS, None
            return None
        if self.steps < 0:
            self.steps += 1
            return None
        self.steps = max(self.steps, 2)
        matrix, self.distance = improved_inverse(moment, level, self.matrix, self.steps)
        return torch.where(self.distance < NEAR_ENOUGH, matrix, self.matrix)


def inverse_of(
    moment: Tensor, mean: Tensor, counts: Counts, damping: Damping, *, is_large: bool, known: Known | None = None
) -> Inverse:
    """K, m and κ.

    Args:
        moment: S, ``[groups, D, D]``.
        mean: s, ``[groups, D]``.
        counts: numbers of each group.
        damping: λ.
        is_large: whether λ is above all rounding.
        known: the last one.
    """
    diagonal = moment.diagonal(dim1=-2, dim2=-1)
    trace = diagonal.sum(-1) + counts.ones
    level = damping.level_of_mean(trace, counts.rows, counts.rank)
    unit = counts.ones / (1 + level)
    shift = mean * unit[:, None]
    centred = torch.baddbmm(moment, shift[:, :, None], mean[:, None, :], alpha=-1)
    improved = None if known is None else known.improved(centred, level)
    if improved is not None:
        return Inverse(improved, shift, unit, trace)
    matrix, failed = damped_inverse(centred, level, is_large=is_large, whole=diagonal)
    return Inverse(matrix, shift, unit, trace, failed)


def multiplied(
    gradient: Tensor, bias_gradient: Tensor | None, inverse: Inverse
) -> tuple[Tensor, Tensor | None, Tensor]:
    """``U``, ``u`` and the energy ``⟨U, G⟩ + ⟨u, g⟩``, of all groups together.

    Args:
        gradient: G, ``[groups, outputs, D]``.
        bias_gradient: g, ``[groups, outputs]``; None without a bias.
        inverse: K, m and κ.
    """
    if bias_gradient is None:
        update = gradient @ inverse.matrix
        return update, None, (update * gradient).sum()
    centred = torch.baddbmm(gradient, bias_gradient[:, :, None], inverse.shift[:, None, :], alpha=-1)
    update = centred @ inverse.matrix
    own = inverse.unit[:, None] * bias_gradient
    energy = (update * centred).sum() + (own * bias_gradient).sum()
    return update, own - (update @ inverse.shift[:, :, None]).squeeze(-1), energy
