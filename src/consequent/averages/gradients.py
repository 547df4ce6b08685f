"""The gradients of averaged layers at a step: multiplied by the inverses, shortened by the bound, written back."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from consequent.averages.average import AveragedLayer
from consequent.averages.ranks import add_up_shards, is_sharded, local
from consequent.gpu.multiply import Multiplication, Problem, accepts
from consequent.layers import Operation
from consequent.maths.bound import shortening
from consequent.maths.inverse import Inverse, multiplied, parts_of


class Corrected:
    """A layer whose gradients are multiplied by the same inverse for some steps.

    Args:
        layer: the layer, which was observed.
        inverse: of its inputs.
        with_bias: whether the inverse is for a bias, too.
    """

    def __init__(self, layer: AveragedLayer, inverse: Inverse, *, with_bias: bool) -> None:
        assert layer.average is not None
        self.weight: Any = layer.weight
        self.bias: Any = layer.bias if with_bias else None
        self.inverse, self.scale = inverse, layer.average.divisor / layer.average.rows
        self.operation: Operation = layer.operation
        self.problem: Problem | None = None
        self._strides: tuple[int, ...] = ()
        is_one_matrix = layer.kind.has_rows_of_outputs and not is_sharded(self.weight) and len(inverse.unit) == 1
        if is_one_matrix and accepts(self.weight):
            self.problem = Problem(self.weight, self.bias is not None, *parts_of(inverse), self.scale)
            self._strides = self.weight.stride()

    @property
    def has_gradient(self) -> bool:
        """Whether there is anything to multiply."""
        return self.weight.grad is not None and self.weight.requires_grad

    @property
    def has_bias(self) -> bool:
        """Whether the bias has a gradient that is corrected with the weight's."""
        return self.bias is not None and self.bias.grad is not None

    @property
    def is_with_others(self) -> bool:
        """Whether it is multiplied together with other layers."""
        if self.problem is None or self.weight.grad.stride() != self._strides:
            return False
        return self.bias is None or self.bias.grad is not None

    @property
    def parameters(self) -> list[Tensor]:
        """Whose gradients these are."""
        return [self.weight, self.bias] if self.has_bias else [self.weight]


class Multiplications:
    """Those of many layers together; kept as long as the layers and the inverses are the same."""

    def __init__(self) -> None:
        self._known: tuple[Corrected, ...] = ()
        self._multiplication: Multiplication | None = None

    def multiply(
        self, layers: Sequence[Corrected], bound: float | None, rate_of: Callable[[Sequence[Tensor]], Any]
    ) -> None:
        """Multiply gradients by the inverses, and replace them.

        Args:
            layers: of which some may have no gradient.
            bound: β of the bound; None: there is none.
            rate_of: how far a step moves parameters along their gradients, for the bound.
        """
        moving = [layer for layer in layers if layer.has_gradient]
        rates = [0.0 if bound is None else rate_of(layer.parameters) for layer in moving]
        pairs = list(zip(moving, rates, strict=True))
        together = [layer for layer, rate in pairs if layer.is_with_others and not isinstance(rate, Tensor)]
        if len(together) < len(moving):
            chosen = set(together)
            _multiply_each([pair for pair in pairs if pair[0] not in chosen], bound)
        if not together:
            return
        if tuple(together) != self._known or self._multiplication is None:
            problems = [layer.problem for layer in together if layer.problem is not None]
            self._known, self._multiplication = tuple(together), Multiplication(problems)
        gradients = [(layer.weight.grad, None if layer.bias is None else layer.bias.grad) for layer in together]
        rate_of_layer = dict(pairs)
        self._multiplication(
            gradients, None if bound is None else [rate_of_layer[one] for one in together], bound or 0.0
        )


class _Update(NamedTuple):
    weight: Tensor
    bias: Tensor | None


def _multiply_each(pairs: Sequence[tuple[Corrected, Any]], bound: float | None) -> None:
    """Layer by layer. All energies come first, as several ranks add them up at once."""
    updates, energies = [], []
    for one, _ in pairs:
        dtype = one.inverse.matrix.dtype
        plain = one.operation.weight_matrix(local(one.weight.grad)).to(dtype)
        its_bias = local(one.bias.grad).view(one.operation.groups, -1).to(dtype) if one.has_bias else None
        matrix, bias, energy = multiplied(plain, its_bias, one.inverse)
        updates.append(_Update(matrix, bias))
        energies.append(energy)
    if bound is not None:
        energies = add_up_shards(energies, [one.weight for one, _ in pairs])
    for (one, rate), update, energy in zip(pairs, updates, energies, strict=True):
        factor: Any = one.scale
        if bound is not None:
            factor = factor * shortening(bound, rate**2 * _squared_change(one, energy))
        _write(one, update, factor)


def _squared_change(one: Corrected, energy: Tensor) -> Tensor:
    """Of the outputs, relative to the inputs, by a step of rate 1 (:mod:`consequent.maths.bound`)."""
    trace, columns = one.inverse.trace.sum(), (one.operation.features + one.has_bias) * one.operation.groups
    return torch.where(trace > 0, one.scale**2 * energy / trace * (columns / one.operation.outputs), 0)


def _write(one: Corrected, update: _Update, factor: Any) -> None:
    weight_grad, matrix = local(one.weight.grad), update.weight * factor
    whole = weight_grad is one.weight.grad
    weight_grad.copy_(one.operation.shaped_like_weight(matrix) if whole else matrix.reshape(weight_grad.shape))
    if update.bias is not None:
        bias_grad = local(one.bias.grad)
        bias_grad.copy_((update.bias * factor).reshape(bias_grad.shape))
