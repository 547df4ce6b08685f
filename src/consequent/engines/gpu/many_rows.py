"""Dense layers on the sample side that have more rows than the dense kernel takes, those of one shape together."""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from consequent.engines.inverse_factor import InverseFactor, inverse_factor
from consequent.maths.damping import Level
from consequent.maths.precision import in_full_precision, without_autocast
from consequent.maths.triangular_products import by_lower, by_transposed, lower_square


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
        """What layers must have in common to be multiplied together."""
        return self.inputs.shape, self.output_grads.shape, self.has_bias, self.level, self.scale


class RowGroup:
    """Layers of one kind.

    Args:
        layers: at least one.
    """

    def __init__(self, layers: Sequence[RowLayer]) -> None:
        self._layers = layers
        self._rows: Tensor | None = None  # X of all layers, with ones and zeros behind the features
        self.factors: InverseFactor | None = None

    def gram(self) -> Tensor:
        """``X Xᵀ`` of each layer, ``[layers, N, N]``; the part above the diagonal is not to be used."""
        from consequent.engines.gpu.kernels.padded_rows import padded_rows

        self._rows = padded_rows([layer.inputs for layer in self._layers], ones=self._layers[0].has_bias)
        return lower_square(self._rows)

    def solve(self) -> tuple[Tensor, Tensor]:
        """``s ΔZᵀ (X Xᵀ + λI)⁻¹ X`` for each layer, and its last column; without a factor ``s ΔZᵀ X / (trace + λ)``.

        The last product, like that of a plain gradient, is of the precision that the user allows.

        Returns:
            ``[layers, O, D]``, and for biases ``[layers, O]``.
        """
        assert self._rows is not None
        transposed = self._transposed_coefficients()
        return _combined(transposed, self._rows[..., : self._layers[0].inputs.shape[1]])

    @in_full_precision
    def _transposed_coefficients(self) -> Tensor:
        """``s ΔZᵀ (X Xᵀ + λI)⁻¹``, ``[layers, O, N]``."""
        assert self.factors is not None
        wanted = torch.stack([layer.output_grads for layer in self._layers]).mT
        trace, level, is_good, _ = self.factors.status[..., None, None].unbind(-3)
        values = by_lower(by_transposed(wanted, self.factors.inverse), self.factors.inverse)
        shortened = 1 / (trace + level) + (trace - trace)  # NaN where the trace is infinite
        return torch.where(is_good > 0, values, wanted * shortened).mul_(self._layers[0].scale)


@in_full_precision
def factorise_rows(layers: Sequence[RowLayer]) -> list[tuple[RowGroup, list[int]]]:
    """The Gram matrices ``X Xᵀ + λI`` of all layers, factorised, those of one size together. Reads the inputs alone.

    Returns:
        the layers in groups, and for each group which layers are in it.
    """
    kinds: dict[Hashable, list[int]] = {}
    for place, layer in enumerate(layers):
        kinds.setdefault(layer.kind, []).append(place)
    groups = [(RowGroup([layers[place] for place in places]), places) for places in kinds.values()]
    sizes: dict[tuple[int, Level], list[RowGroup]] = {}
    for group, places in groups:
        first = layers[places[0]]
        sizes.setdefault((len(first.inputs), first.level), []).append(group)
    for (_, level), alike in sizes.items():
        grams = [group.gram() for group in alike]
        together = inverse_factor(grams[0] if len(grams) == 1 else torch.cat(grams), level, overwrite=True)
        counts = [len(gram) for gram in grams]
        parts = zip(alike, together.inverse.split(counts), together.status.split(counts), strict=True)
        for group, inverse, status in parts:
            group.factors = InverseFactor(inverse, status)
    return groups


@without_autocast
def _combined(transposed: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
    return torch.bmm(transposed, inputs), transposed.sum(-1)
