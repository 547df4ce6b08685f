"""Dense layers on the sample side that have more rows than the dense kernel takes, those of one shape together."""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from consequent.engines.inverse_factor import InverseFactor, inverse_factor
from consequent.maths.damping import Level
from consequent.maths.precision import in_full_precision, without_autocast


class RowLayer(NamedTuple):
    """One layer, float32.

    Attributes:
        inputs: X, ``[N, D]``.
        output_grads: ΔZ, ``[N, O]``.
        has_bias: whether a constant 1 is the last feature.
        level: λ.
        scale: s, what the loss was divided by.
    """

    inputs: Tensor
    output_grads: Tensor
    has_bias: bool
    level: Level
    scale: float

    @property
    def kind(self) -> Hashable:
        """What layers must have in common to be solved together."""
        return self.inputs.shape, self.output_grads.shape, self.has_bias, self.level, self.scale


class FactorisedRows(NamedTuple):
    """Layers of one kind and the factors of their Gram matrices."""

    layers: Sequence[RowLayer]
    factors: InverseFactor


@in_full_precision
def factorise_rows(layers: Sequence[RowLayer]) -> FactorisedRows:
    """The Gram matrices ``X Xᵀ + λI`` of layers of one kind, factorised. Reads the inputs alone."""
    from consequent.engines.gpu.kernels.row_products import gram_matrices

    first = layers[0]
    grams = gram_matrices([layer.inputs for layer in layers], ones=first.has_bias)
    return FactorisedRows(layers, inverse_factor(grams, first.level, overwrite=True))


def solve_rows(factorised: FactorisedRows) -> tuple[Tensor, Tensor]:
    """``s ΔZᵀ (X Xᵀ + λI)⁻¹ X`` for each layer, and its last column; without a factor ``s ΔZᵀ X / (trace + λ)``.

    The last product, like that of a plain gradient, is of the precision that the user allows.

    Returns:
        ``[layers, O, D]``, and for biases ``[layers, O]``.
    """
    coefficients = _coefficients(factorised)
    return _combined(coefficients, [layer.inputs for layer in factorised.layers])


@in_full_precision
def _coefficients(factorised: FactorisedRows) -> Tensor:
    layers, factors = factorised
    wanted = torch.stack([layer.output_grads for layer in layers])
    trace, level, is_good, _ = factors.status[..., None, None].unbind(-3)
    values = torch.bmm(factors.inverse.mT, torch.bmm(factors.inverse, wanted))
    return torch.where(is_good > 0, values, wanted / (trace + level)).mul_(layers[0].scale)


@without_autocast
def _combined(coefficients: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    return torch.bmm(coefficients.mT, torch.stack(list(inputs))), coefficients.sum(1)
