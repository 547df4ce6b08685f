"""How a call of a layer is the matrix product ``Z = W X``: what every kind of layer has to say of itself.

Everything is laid out per group (``groups`` of a convolution; 1 otherwise), since each group is a product of its own:

=============  ===============================  =============================================================
inputs         ``[groups, rows, features]``     a row per sample (times position, times token); ``Xᵀ`` in the paper
outputs        ``[groups, rows, out_features]`` in the same order of rows; ``Zᵀ``
weight         ``[groups, out_features, features]``; ``W``
=============  ===============================  =============================================================

To add a kind of layer, write a subclass of :class:`Operation` in a file of its own and name it in
:data:`consequent.layers.KINDS`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from consequent.gpu.moments import Window
from consequent.maths.products import moment_of_rows, sum_of_rows, with_ones


@dataclass(frozen=True)
class Operation(ABC):
    """A layer's matrix product, with its geometry as it is when the layer is called.

    Attributes:
        groups: independent matrix products in it.
        features: columns of X per group (D in the paper), the bias's constant 1 not counted.
        outputs: columns of Z, of all groups together.
        weight_shape: of the layer's weight.
    """

    groups: int
    features: int
    outputs: int
    weight_shape: tuple[int, ...]

    module_types: ClassVar[tuple[type[nn.Module], ...]] = ()
    has_rows_of_outputs: ClassVar[bool] = True  # the weight's first dimension counts outputs

    # ---- from a layer ---------------------------------------------------------------------------------------------

    @classmethod
    def class_of(cls, module: nn.Module) -> type[nn.Module] | None:
        """The class whose ``forward`` this operation is, if the module is of it."""
        return next((kind for kind in type(module).__mro__ if kind in cls.module_types), None)

    @classmethod
    @abstractmethod
    def of(cls, layer: Any) -> "Operation":
        """The operation that the layer would do now."""

    @classmethod
    def of_call(cls, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "tuple[Operation, Any] | None":
        """The operation of a call, and its inputs; None where it is none of this kind's, and for torch to judge."""
        given = (*args, *kwargs.values())
        return (cls.of(layer), given[0]) if len(given) == 1 else None

    def accepts(self, inputs: Tensor) -> bool:
        """Whether these inputs are this operation's."""
        return inputs.ndim > 0 and inputs.shape[-1] == self.features

    def samples_in(self, inputs: Tensor) -> int:
        """How many samples the inputs of a layer have, by their leading dimension."""
        return inputs.shape[0] if inputs.ndim > 1 else 1

    def call_product(self, inputs: Tensor, product: "Callable[[Operation, Tensor], Tensor]") -> Tensor:
        """Bring the inputs to the form that the product takes, and its outputs back; autograd sees both."""
        return product(self, inputs)

    # ---- the product ------------------------------------------------------------------------------------------------

    @abstractmethod
    def apply(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``Z``: the outputs."""

    @abstractmethod
    def input_gradient(self, output_grad: Tensor, weight: Tensor, inputs: Tensor) -> Tensor:
        """``Wᵀ ΔZ`` in the shape of the inputs, of which only the shape is looked at."""

    def weight_gradient(self, inputs: Tensor, output_grad: Tensor) -> Tensor:
        """``ΔZ Xᵀ`` in the shape of the weight: what backpropagation computes."""
        return self.shaped_like_weight(self.output_rows(output_grad).mT @ self.input_rows(inputs))

    def bias_gradient(self, output_grad: Tensor) -> Tensor:
        """The sum of ``ΔZ`` over all rows: what backpropagation computes."""
        return self.output_rows(output_grad).sum(1).flatten()

    # ---- as matrices ------------------------------------------------------------------------------------------------

    @abstractmethod
    def input_rows(self, inputs: Tensor) -> Tensor:
        """The inputs as ``[groups, rows, features]``; for convolutions the rows are patches."""

    @abstractmethod
    def output_rows(self, outputs: Tensor) -> Tensor:
        """The outputs, or their gradients, as ``[groups, rows, out_features]``."""

    def rows(self, outputs: Tensor) -> int:
        """How many rows the outputs are."""
        return outputs.numel() // self.outputs

    def weight_matrix(self, weight: Tensor) -> Tensor:
        """The weight, or its gradient, as ``[groups, out_features, features]``."""
        return weight.reshape(self.groups, -1, self.features)

    def shaped_like_weight(self, matrix: Tensor) -> Tensor:
        """The inverse of :meth:`weight_matrix`."""
        return matrix.reshape(self.weight_shape)

    def second_moment(self, inputs: Tensor, *, ones: bool) -> Tensor:
        """``Σ x xᵀ`` over the rows of the inputs: ``X Xᵀ`` in the paper's orientation.

        Args:
            inputs: in the form that the product takes.
            ones: whether every row gets a last entry 1, whose weight is the bias.

        Returns:
            ``[groups, D, D]``, or ``[groups, D + 1, D + 1]`` with ``ones``, in float32 or better.
        """
        moment, sums, rows = self.moments(inputs, sums=ones)
        return moment if sums is None else with_ones(moment, sums, rows)

    def as_images(self, inputs: Tensor) -> tuple[Tensor, Window] | None:
        """The inputs as images of which X's rows are patches, ``[images, channels, height, width]``; None if not so."""
        return None

    def moments(self, inputs: Tensor, *, sums: bool = True) -> tuple[Tensor, Tensor | None, int]:
        """``Σ x xᵀ`` of the inputs without the entry 1; ``Σ x``, ``[groups, D]``, if asked for; and their rows."""
        rows = self.input_rows(inputs)
        return moment_of_rows(rows), sum_of_rows(rows) if sums else None, rows.shape[1]
