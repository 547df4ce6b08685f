"""``nn.Linear``, and the ``Conv1D`` of transformers (GPT-2), a Linear layer whose weight lies the other way round."""

from dataclasses import dataclass, replace
from math import prod
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from consequent.engines.gpu.kernels.choice import row_moments_by_products
from consequent.layers.operation import Canonical, Operation, at_least_float32, with_ones
from consequent.maths.triangular_products import square


@dataclass(frozen=True)
class Linear(Operation):
    """``Z = W X``: canonical inputs are ``[rows, features]``, outputs ``[rows, out_features]``.

    Example:
        >>> import torch
        >>> operation = Linear.of(torch.nn.Linear(2, 1))
        >>> operation.second_moment(torch.tensor([[1.0, 2.0], [0.0, 3.0]]), ones=True)
        tensor([[[ 1.,  2.,  1.],
                 [ 2., 13.,  5.],
                 [ 1.,  5.,  2.]]])
    """

    module_types: ClassVar[tuple[type[nn.Module], ...]] = (nn.Linear,)
    is_dense: ClassVar[bool] = True

    @classmethod
    def of(cls, layer: Any) -> Self:
        """The operation that the layer would do now."""
        outputs, features = layer.weight.shape
        return cls(1, features, outputs, tuple(layer.weight.shape))

    def is_current(self, layer: Any) -> bool:
        """Whether the weight has the same shape still."""
        return bool(layer._parameters["weight"].shape == self.weight_shape)

    def canonical(self, inputs: Tensor) -> Canonical | None:
        """The call with these inputs, of any leading shape."""
        shape = inputs.shape
        if not shape or shape[-1] != self.features:
            return None
        if len(shape) == 2:
            return Canonical(self, inputs, shape[0], None)
        samples = 1 if len(shape) == 1 else shape[0]
        rows = inputs.reshape(prod(shape[:-1]), self.features)
        return Canonical(self, rows, samples, (*shape[:-1], self.outputs))

    def product_called(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Canonical | None:
        """A call of ``F.linear``."""
        inputs = args[0] if args else kwargs.get("input")
        return self.canonical(inputs) if function is F.linear and isinstance(inputs, Tensor) else None

    def apply(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``Z``."""
        return F.linear(inputs, weight, bias)

    def input_gradient(self, output_grad: Tensor, weight: Tensor, inputs: Tensor) -> Tensor:
        """``Wᵀ ΔZ``."""
        return output_grad @ weight

    def weight_gradient(self, inputs: Tensor, output_grad: Tensor) -> Tensor:
        """``ΔZ Xᵀ``."""
        return output_grad.mT @ inputs

    def bias_gradient(self, output_grad: Tensor) -> Tensor:
        """The sum of ``ΔZ`` over all rows."""
        return output_grad.sum(0)

    def input_rows(self, inputs: Tensor) -> Tensor:
        """``[1, rows, features]``."""
        return inputs[None]

    def output_rows(self, outputs: Tensor) -> Tensor:
        """``[1, rows, out_features]``."""
        return outputs[None]

    def second_moment(self, inputs: Tensor, *, ones: bool) -> Tensor:
        """``[1, D, D]``, or one larger with ``ones``."""
        return self.second_moments([inputs], ones=ones)[0]

    def second_moments(self, inputs: list[Tensor], *, ones: bool) -> Tensor:
        """``[layers, 1, D, D]``, or one larger with ``ones``."""
        by_products = row_moments_by_products(inputs, ones=ones)
        if by_products is not None:
            return by_products
        moments = []
        for tensor in inputs:
            rows = at_least_float32(tensor)[None]
            moments.append(with_ones(square(rows), rows.sum(-2), rows.shape[-2]) if ones else square(rows))
        return moments[0][None] if len(moments) == 1 else torch.stack(moments)

    def of_channels(self, inputs: Tensor, start: int, stop: int) -> tuple[Operation, Tensor]:
        """Some features only."""
        return replace(self, features=stop - start), inputs[:, start:stop]

    def interference(self, inputs: Tensor, samples: int, *, ones: bool) -> Tensor:
        """``[samples, samples]``: summed over tokens."""
        per_sample = inputs.reshape(samples, -1)
        correlations = per_sample @ per_sample.T
        return correlations + inputs.shape[0] // max(samples, 1) if ones else correlations


@dataclass(frozen=True)
class TransposedLinear(Linear):
    """The ``Conv1D`` of transformers: its weight is ``[features, out_features]``."""

    module_types: ClassVar[tuple[type[nn.Module], ...]] = ()  # known by its name
    is_transposed: ClassVar[bool] = True
    has_rows_of_outputs: ClassVar[bool] = False

    @classmethod
    def kind_of(cls, module: nn.Module) -> type[nn.Module] | None:
        """``Conv1D``, without importing transformers."""
        names = ("Conv1D", "transformers.pytorch_utils")
        kinds = [kind for kind in type(module).__mro__ if (kind.__name__, kind.__module__) == names]
        return kinds[-1] if kinds else None  # a watched class has the name of its base

    @classmethod
    def of(cls, layer: Any) -> Self:
        """The operation that the layer would do now."""
        features, outputs = layer.weight.shape
        return cls(1, features, outputs, tuple(layer.weight.shape))

    def product_called(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Canonical | None:
        """Not looked for: a subclass with a forward of its own stays plain."""
        return None

    def apply(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``Z``."""
        return F.linear(inputs, weight.mT, bias)

    def input_gradient(self, output_grad: Tensor, weight: Tensor, inputs: Tensor) -> Tensor:
        """``Wᵀ ΔZ``."""
        return output_grad @ weight.mT

    def weight_gradient(self, inputs: Tensor, output_grad: Tensor) -> Tensor:
        """``X ΔZᵀ``."""
        return inputs.mT @ output_grad

    def weight_matrix(self, weight: Tensor) -> Tensor:
        """``[1, out_features, features]``."""
        return weight.mT.unsqueeze(0)

    def shaped_like_weight(self, matrix: Tensor) -> Tensor:
        """``[features, out_features]``."""
        return matrix.squeeze(0).mT
