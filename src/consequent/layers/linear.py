"""``nn.Linear``, and the ``Conv1D`` of transformers (GPT-2), a Linear layer whose weight lies the other way round."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from consequent.gpu.moments import Window
from consequent.layers.operation import Operation


@dataclass(frozen=True)
class Linear(Operation):
    """``Z = W X``: inputs are ``[..., features]``, outputs ``[..., out_features]``; a row for each leading index.

    Example:
        >>> import torch
        >>> operation = Linear.of(torch.nn.Linear(2, 1))
        >>> operation.second_moment(torch.tensor([[1.0, 2.0], [0.0, 3.0]]), ones=True)
        tensor([[[ 1.,  2.,  1.],
                 [ 2., 13.,  5.],
                 [ 1.,  5.,  2.]]])
    """

    module_types: ClassVar[tuple[type[nn.Module], ...]] = (nn.Linear,)

    @classmethod
    def of(cls, layer: Any) -> "Linear":
        """The operation that the layer would do now."""
        outputs, features = shape = layer.weight.shape
        return cls(1, features, outputs, shape)

    def call_product(self, inputs: Tensor, product: Callable[[Operation, Tensor], Tensor]) -> Tensor:
        """The product takes rows: then what comes out of it is no view, and may be changed in place."""
        if inputs.ndim == 2:
            return product(self, inputs)
        rows = product(self, inputs.reshape(-1, self.features))
        return rows.view(*inputs.shape[:-1], rows.shape[-1])

    def apply(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``Z``."""
        return F.linear(inputs, weight, bias)

    def input_gradient(self, output_grad: Tensor, weight: Tensor, inputs: Tensor) -> Tensor:
        """``Wᵀ ΔZ``."""
        return output_grad @ weight

    def as_images(self, inputs: Tensor) -> tuple[Tensor, Window]:
        """Images of one pixel."""
        return inputs.reshape(-1, self.features, 1, 1), Window()

    def input_rows(self, inputs: Tensor) -> Tensor:
        """``[1, rows, features]``."""
        return inputs.reshape(1, -1, self.features)

    def output_rows(self, outputs: Tensor) -> Tensor:
        """``[1, rows, out_features]``."""
        return outputs.reshape(1, -1, self.outputs)


@dataclass(frozen=True)
class TransposedLinear(Linear):
    """The ``Conv1D`` of transformers: its weight is ``[features, out_features]``."""

    module_types: ClassVar[tuple[type[nn.Module], ...]] = ()  # known by its name
    has_rows_of_outputs: ClassVar[bool] = False

    @classmethod
    def class_of(cls, module: nn.Module) -> type[nn.Module] | None:
        """``Conv1D``, without importing transformers."""
        names = ("Conv1D", "transformers.pytorch_utils")
        return next((kind for kind in type(module).__mro__ if (kind.__name__, kind.__module__) == names), None)

    @classmethod
    def of(cls, layer: Any) -> "TransposedLinear":
        """The operation that the layer would do now."""
        features, outputs = shape = layer.weight.shape
        return cls(1, features, outputs, shape)

    def apply(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``Z``."""
        return F.linear(inputs, weight.mT, bias)

    def input_gradient(self, output_grad: Tensor, weight: Tensor, inputs: Tensor) -> Tensor:
        """``Wᵀ ΔZ``."""
        return output_grad @ weight.mT

    def weight_matrix(self, weight: Tensor) -> Tensor:
        """``[1, out_features, features]``."""
        return weight.mT.unsqueeze(0)

    def shaped_like_weight(self, matrix: Tensor) -> Tensor:
        """``[features, out_features]``."""
        return matrix.squeeze(0).mT
