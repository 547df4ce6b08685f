"""Dense layers on the sample side that have more rows than the dense kernel takes, those of one shape together."""

from collections.abc import Hashable, Sequence
from functools import cached_property
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from consequent.capture.use import Use
from consequent.engines.gpu.streams import Fork, factor_streams, side_stream, switched_to
from consequent.engines.inverse_factor import InverseFactor, inverse_factor
from consequent.maths.damping import Damping, Level
from consequent.maths.precision import in_full_precision, tf32_is_allowed, tf32_products, without_autocast
from consequent.maths.triangular_products import by_lower, by_transposed, lower_square


class RowLayer(NamedTuple):
    """One layer, float32.

    Attributes:
        inputs: X, ``[N, D]``.
        output_grads: ΔZ, ``[N, O]``.
        has_bias: whether a constant 1 is the last feature.
        level: λ.
        scale: s, what the loss was divided by.
        limit: of the change of its outputs (:mod:`consequent.maths.bound`).
    """

    inputs: Tensor
    output_grads: Tensor
    has_bias: bool
    level: Level
    scale: float
    limit: float = inf

    @classmethod
    def of(cls, use: Use, damping: Damping, scale: float, limit: float = inf) -> "RowLayer":
        """That of a use whose inputs and output gradients are known."""
        assert use.inputs is not None
        assert use.output_grad is not None
        inputs, output_grads = (t.reshape(-1, t.shape[-1]) for t in (use.inputs, use.output_grad))
        has_bias = use.bias is not None
        return cls(inputs, output_grads, has_bias, damping.level(use.rows, use.features + has_bias), scale, limit)

    @property
    def kind(self) -> Hashable:
        """What layers must have in common to be multiplied together."""
        return self.inputs.shape, self.output_grads.shape, *self[2:]


class RowGroup:
    """Layers of one kind.

    Args:
        layers: at least one.

    Attributes:
        factors: of ``X Xᵀ + λI``, once they are known.
    """

    def __init__(self, layers: Sequence[RowLayer]) -> None:
        self.layers = layers
        self.factors: InverseFactor | None = None

    @property
    def has_bias(self) -> bool:
        """Whether the layers have one."""
        return self.layers[0].has_bias

    @property
    def columns(self) -> int:
        """Of X, that of a bias included."""
        return self.layers[0].inputs.shape[1] + self.has_bias

    @property
    def status(self) -> Tensor:
        """``[layers, 4]``, of the factors."""
        assert self.factors is not None
        return self.factors.status

    @cached_property
    def _rows(self) -> Tensor:
        """X of all layers, with ones and zeros behind the features."""
        from consequent.engines.gpu.kernels.padded_rows import padded_rows

        return padded_rows([layer.inputs for layer in self.layers], ones=self.has_bias)

    @property
    def inputs(self) -> Tensor:
        """``[layers, N, D]``."""
        return self._rows[..., : self.layers[0].inputs.shape[1]]

    @cached_property
    def wanted(self) -> Tensor:
        """ΔZᵀ, ``[layers, O, N]``."""
        return torch.stack([layer.output_grads for layer in self.layers]).mT

    def used_on(self, stream: torch.cuda.Stream) -> None:
        """This stream, too, uses what was allocated so far: nobody else gets it before that is over."""
        assert self.factors is not None
        for tensor in (self._rows, self.factors.inverse, self.factors.status):
            tensor.record_stream(stream)

    def gram(self) -> Tensor:
        """``X Xᵀ`` of each layer, ``[layers, N, N]``; the part above the diagonal is not to be used."""
        return lower_square(self._rows)

    @cached_property
    def transposed_coefficients(self) -> Tensor:
        """``ΔZᵀ (X Xᵀ + λI)⁻¹``, ``[layers, O, N]``; without a factor ``ΔZᵀ / (trace + λ)``."""
        return self._solve()

    @in_full_precision
    def _solve(self) -> Tensor:
        assert self.factors is not None
        trace, level, is_good, _ = self.status[..., None, None].unbind(-3)
        values = by_lower(by_transposed(self.wanted, self.factors.inverse), self.factors.inverse)
        shortened = 1 / (trace + level) + (trace - trace)  # NaN where the trace is infinite
        return torch.where(is_good > 0, values, self.wanted * shortened)

    @without_autocast
    def combined(self, numbers: float | Tensor) -> tuple[Tensor, Tensor]:
        """``ΔZᵀ (X Xᵀ + λI)⁻¹ X``, times a number for each layer: ``[layers, O, D]``, and for biases ``[layers, O]``.

        This last product, like that of a plain gradient, is of the precision that the user allows.

        Args:
            numbers: ``[layers]``, or one for all.
        """
        factors = numbers[:, None, None] if isinstance(numbers, Tensor) else numbers
        coefficients = self.transposed_coefficients * factors
        if not tf32_is_allowed():
            return torch.bmm(coefficients, self.inputs), coefficients.sum(-1)
        with tf32_products():
            return torch.bmm(coefficients, self.inputs), coefficients.sum(-1)


def groups_of(layers: Sequence[RowLayer]) -> list[list[int]]:
    """Which layers are of one kind."""
    kinds: dict[Hashable, list[int]] = {}
    for place, layer in enumerate(layers):
        kinds.setdefault(layer.kind, []).append(place)
    return list(kinds.values())


def factorise_rows_beside(
    layers: Sequence[RowLayer], groups: list[list[int]], events: Sequence["torch.cuda.Event | None"]
) -> list[RowGroup]:
    """:func:`factorise_rows` in a CUDA graph of the user's: beside the backward pass, from where the inputs are there.

    Args:
        layers: all on one device.
        groups: which of them are of one kind.
        events: when the inputs of each are there.
    """
    device = layers[0].inputs.device
    aside = Fork(side_stream(device, "many rows"), events, factor_streams(device, "many rows"))
    with switched_to(aside.stream):
        found = factorise_rows(layers, groups)
        for group in found:
            group.used_on(aside.origin)
    aside.join()
    return found


@in_full_precision
def factorise_rows(layers: Sequence[RowLayer], groups: list[list[int]]) -> list[RowGroup]:
    """The Gram matrices ``X Xᵀ + λI`` of all layers, factorised, those of one size together. Reads the inputs alone.

    Args:
        layers: all on one device.
        groups: which of them are of one kind.
    """
    found = [RowGroup([layers[place] for place in places]) for places in groups]
    sizes: dict[tuple[int, Level], list[RowGroup]] = {}
    for group in found:
        first = group.layers[0]
        sizes.setdefault((len(first.inputs), first.level), []).append(group)
    for (_, level), alike in sizes.items():
        grams = [group.gram() for group in alike]
        together = inverse_factor(grams[0] if len(grams) == 1 else torch.cat(grams), level, overwrite=True)
        counts = [len(gram) for gram in grams]
        parts = zip(alike, together.inverse.split(counts), together.status.split(counts), strict=True)
        for group, inverse, status in parts:
            group.factors = InverseFactor(inverse, status)
    return found
