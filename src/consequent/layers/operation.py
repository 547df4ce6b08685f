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
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn


class Canonical(NamedTuple):
    """A call in the one form that all else is written for."""

    operation: "Operation"
    inputs: Tensor  # of the operation
    samples: int  # the layer's inputs have, by their leading dimension
    output_shape: tuple[int, ...] | None  # what the outputs are reshaped to; None: they are as they should be


@dataclass(frozen=True)
class Operation(ABC):
    """A layer's matrix product, with its geometry as it was when the layer was called.

    Its inputs and outputs are *canonical*: a layer's inputs are brought to that form by :meth:`canonical`, before
    autograd's node of the product.

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

    corrected_by_default: ClassVar[bool] = True  # otherwise only where ``include=`` names the layer
    module_types: ClassVar[tuple[type[nn.Module], ...]] = ()
    spatial_dims: ClassVar[int] = 0
    is_dense: ClassVar[bool] = False  # X and Z are matrices as they are, and the weight is W
    is_transposed: ClassVar[bool] = False  # the weight is Wᵀ: [features, out_features]
    has_rows_of_outputs: ClassVar[bool] = True  # the weight is [out_features, …], a row of numbers for each output
    is_diagonal: ClassVar[bool] = False  # rows are one-hot: the second moment is the diagonal matrix of `counts`
    is_sparse: ClassVar[bool] = False  # rows are sparse, and never made dense
    follows_autocast: ClassVar[bool] = True

    # ---- from a layer ---------------------------------------------------------------------------------------------

    @classmethod
    def kind_of(cls, module: nn.Module) -> type[nn.Module] | None:
        """The class of torch that the module is of, if this operation is what that class computes."""
        return next((kind for kind in type(module).__mro__ if kind in cls.module_types), None)

    @classmethod
    @abstractmethod
    def of(cls, layer: Any) -> Self:
        """The operation that the layer would do now."""

    @abstractmethod
    def is_current(self, layer: Any) -> bool:
        """Whether the layer has the geometry still."""

    @classmethod
    def why_not(cls, layer: Any) -> str | None:
        """Why this layer, although of the kind, is no matrix product; None if it is one."""
        return None

    def inputs_in(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The inputs among the arguments of ``forward``; None where there are others that change what is computed."""
        given = (*args, *kwargs.values())
        return given[0] if len(given) == 1 else None

    @property
    def canonical_form(self) -> "Operation":
        """The operation on canonical inputs."""
        return self

    @abstractmethod
    def canonical(self, inputs: Tensor) -> Canonical | None:
        """The call of the layer with these inputs; None where they are none of this operation's."""

    def product_called(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Canonical | None:
        """The call of a torch function, if that is what the class of torch itself would do with these arguments.

        For layers with a ``forward`` of their own, whose calls of torch are looked at.
        """
        return None

    def prepare(self, weight: Tensor, inputs: Tensor) -> None:  # noqa: B027
        """What the layer does to its weight before the product; asked of sparse operations only."""

    # ---- the product, on canonical tensors --------------------------------------------------------------------------

    @abstractmethod
    def apply(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``Z``: the outputs."""

    @abstractmethod
    def input_gradient(self, output_grad: Tensor, weight: Tensor, inputs: Tensor) -> Tensor:
        """``Wᵀ ΔZ`` in the shape of the inputs, of which only the shape is looked at."""

    @abstractmethod
    def weight_gradient(self, inputs: Tensor, output_grad: Tensor) -> Tensor:
        """``ΔZ Xᵀ`` in the shape of the weight: what backpropagation computes."""

    def gradients(
        self, output_grad: Tensor, inputs: Tensor, weight: Tensor, with_bias: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """:meth:`input_gradient`, :meth:`weight_gradient` and :meth:`bias_gradient`, which may be cheaper together."""
        bias_grad = self.bias_gradient(output_grad) if with_bias else None
        input_grad = self.input_gradient(output_grad, weight, inputs)
        return input_grad, self.weight_gradient(inputs, output_grad), bias_grad

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

    def weight_matrix(self, weight: Tensor) -> Tensor:
        """The weight, or its gradient, as ``[groups, out_features, features]``."""
        return weight.reshape(self.groups, -1, self.features)

    def shaped_like_weight(self, matrix: Tensor) -> Tensor:
        """The inverse of :meth:`weight_matrix`, also for some rows of the weight only."""
        return matrix.reshape(matrix.shape[0] * matrix.shape[1], *self.weight_shape[1:])

    @abstractmethod
    def second_moment(self, inputs: Tensor, *, ones: bool) -> Tensor:
        """``Σ x xᵀ`` over the rows of the inputs: ``X Xᵀ`` in the paper's orientation.

        Args:
            inputs: canonical ones.
            ones: whether every row gets a last entry 1, whose weight is the bias.

        Returns:
            ``[groups, D, D]``, or ``[groups, D + 1, D + 1]`` with ``ones``, in float32 or better.
        """

    @abstractmethod
    def interference(self, inputs: Tensor, samples: int, *, ones: bool) -> Tensor:
        r"""The samples' correlation matrix ``XᵀX``, ``[samples, samples]``.

        For convolutions and sequences, entry ``(a, b)`` is the sum over positions of ``x_a · x_b`` at the same
        position: ``Σₚ x_{a,p} · x_{b,p}``.

        Args:
            inputs: canonical ones.
            samples: how many there are.
            ones: whether the layer has a trained bias, the weight of a constant input 1.
        """

    # ---- for all kinds ----------------------------------------------------------------------------------------------

    @property
    def inputs_per_row(self) -> int:
        """About how many numbers of the inputs there are for each row."""
        return self.features * self.groups

    @property
    def taps(self) -> int:
        """Features that one channel of the inputs is: 1, unless a window meets it in several places."""
        return 1

    def of_channels(self, inputs: Tensor, start: int, stop: int) -> "tuple[Operation, Tensor]":
        """As if each group had only some channels of its inputs: the operation, and these inputs.

        For second moments: the weight is not cut.

        Args:
            inputs: canonical ones.
            start: the first channel.
            stop: the one behind the last.
        """
        raise NotImplementedError(f"the inputs of {type(self).__name__} are not cut")

    def rows(self, outputs: Tensor) -> int:
        """How many rows the outputs are."""
        return outputs.numel() // self.outputs if self.outputs else 0

    def second_moments(self, inputs: list[Tensor], *, ones: bool) -> Tensor:
        """:meth:`second_moment` of several inputs of one shape, each its own layer's: ``[layers, groups, D, D]``."""
        moments = [self.second_moment(tensor, ones=ones) for tensor in inputs]
        return moments[0][None] if len(moments) == 1 else torch.stack(moments)

    def transposed_norm(self, output_grad: Tensor) -> Tensor:
        """A bound of what ``U ↦ Uᵀ ΔZ`` does to any change U of the weight: ``‖Uᵀ ΔZ‖² ≤ bound · ‖U‖²``."""
        return at_least_float32(output_grad).square().sum()

    @property
    def shape(self) -> tuple[type["Operation"], int, int, bool]:
        """What operations must have in common to share a weight."""
        return type(self), self.groups, self.features, self.is_transposed


def with_ones(moment: Tensor, sums: Tensor, rows: int) -> Tensor:
    """``[groups, D, D]`` with a last row and column for a constant 1."""
    groups, size = sums.shape
    whole = moment.new_empty(groups, size + 1, size + 1)
    whole[:, :size, :size] = moment
    fill_ones(whole, sums, rows)
    return whole


def fill_ones(whole: Tensor, sums: Tensor, rows: int) -> None:
    """Write the last row and column, those of a constant 1, of a second moment ``[groups, D + 1, D + 1]``.

    Args:
        whole: the moment.
        sums: of all rows of inputs, ``[groups, D]``.
        rows: how many there are.
    """
    whole[:, :-1, -1] = sums
    whole[:, -1, :-1] = sums
    whole[:, -1, -1] = rows


def at_least_float32(tensor: Tensor) -> Tensor:
    """The tensor in float32, or as it is if that is better."""
    return tensor if tensor.dtype.itemsize >= 4 else tensor.float()
