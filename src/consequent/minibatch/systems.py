"""The system that a call of a layer asks to be solved: the smaller one, by samples or by features."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from consequent.layers import Operation
from consequent.maths.damping import Damping
from consequent.maths.precision import at_least_float32
from consequent.maths.ridge import Update, update_from_moment, update_from_samples


class System(NamedTuple):
    """A system by samples, X and ΔZ; or by features, XXᵀ and ΔZ Xᵀ. Many of one shape are solved as one.

    Attributes:
        by_samples: which of the two.
        left: X, ``[groups, rows, features]``; or XXᵀ, ``[groups, columns, columns]``.
        right: ΔZ, ``[groups, rows, outputs]``; or ΔZ Xᵀ, ``[groups, outputs, columns]``.
        rows: N.
        ones: whether there is a bias.
    """

    by_samples: bool
    left: Tensor
    right: Tensor
    rows: int
    ones: bool

    @property
    def shape(self) -> tuple[object, ...]:
        """What systems have in common that can be solved together."""
        sizes = (self.left.shape[1:], self.right.shape[1:], self.left.dtype, self.left.device)
        return self.by_samples, self.rows, self.ones, *sizes

    def solved(self, damping: Damping, *, measured: bool) -> Update:
        """The update that it asks for.

        Args:
            damping: λ.
            measured: whether the change that it makes is asked for.
        """
        if self.by_samples:
            return update_from_samples(self.left, self.right, damping, ones=self.ones, measured=measured)
        return update_from_moment(self.left, self.right, damping, self.rows, ones=self.ones, measured=measured)


def system_of(operation: Operation, inputs: Tensor, output_grad: Tensor, *, ones: bool) -> System:
    """The smaller of the two systems of a call.

    Args:
        operation: the product.
        inputs: X, in the form that it takes.
        output_grad: ΔZ, likewise.
        ones: whether a bias is trained.
    """
    rows = operation.rows(output_grad)
    if 0 < rows <= operation.features + ones:
        inputs, output_grad = at_least_float32(inputs), at_least_float32(output_grad)
        return System(True, operation.input_rows(inputs), operation.output_rows(output_grad), rows, ones)
    plain = at_least_float32(operation.weight_matrix(operation.weight_gradient(inputs, output_grad)))
    if ones:
        bias = at_least_float32(operation.bias_gradient(output_grad))
        plain = torch.cat([plain, bias.view(operation.groups, -1, 1)], dim=-1)
    return System(False, operation.second_moment(inputs, ones=ones), plain, rows, ones)


def together(systems: Sequence[System]) -> System:
    """Systems of one shape as one, each with groups of its own."""
    if len(systems) == 1:
        return systems[0]
    left, right = (torch.cat(parts) for parts in zip(*((one.left, one.right) for one in systems), strict=True))
    first = systems[0]
    return System(first.by_samples, left, right, first.rows, first.ones)
