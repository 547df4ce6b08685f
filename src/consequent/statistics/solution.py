"""New gradients of a weight and its biases, not yet written."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from consequent.maths.bound import Change
from consequent.statistics.gradients import split, trained
from consequent.statistics.row_matrices import RowMatrices

if TYPE_CHECKING:
    from consequent.capture.records import Record


@dataclass
class Solution:
    """New gradients for a weight and its biases, not yet written.

    Attributes:
        record: whose they are.
        side: on which they were solved, "samples", "features" or, of the latter, "blocks".
        finite: whether no NaN or inf was met.
        gradient: ``[groups, out_features, columns]``; None where the next two stand for it, on the sample side.
        coefficients: A, ``[groups, rows, out_features]``, of which the gradient is ``Aᵀ X``.
        rows: X.
        kept: ``[groups]``: what the old gradient is multiplied by and added; None: it is dropped.
        others: a part of the old gradient that stays as it is, ``[groups, out_features, columns]``.
        rescued: factorisations that needed float64, or more damping.
        fallen_back: factorisations that failed: a shortened plain gradient instead.
        edited: whether the gradient in ``.grad`` was no multiple of ``ΔZ Xᵀ``.
        scale: what the gradient is multiplied by when it is written, ``others`` aside.
        change: what the bound asks of it.
    """

    record: "Record"
    side: str
    finite: bool | Tensor
    gradient: Tensor | None = None
    coefficients: Tensor | None = None
    rows: RowMatrices | None = None
    kept: Tensor | None = None
    others: Tensor | None = None
    rescued: int | Tensor = 0
    fallen_back: int | Tensor = 0
    edited: bool | Tensor = False
    scale: float | Tensor = 1.0
    change: Change | None = None

    def write(self, finite: bool | Tensor) -> None:
        """Put the new gradients in the place of the old ones; zeros unless finite."""
        parameters = trained(self.record)
        if self.coefficients is not None and self.rows is not None:
            kept = None if self.kept is None else self.kept * self.scale
            _combine_into_gradients(self.record, self.rows, self.coefficients.mul_(self.scale), kept)
            if self.others is not None:
                for parameter, other in zip(parameters, split(self.record, self.others), strict=True):
                    assert parameter.grad is not None
                    parameter.grad.add_(other.to(parameter.grad.dtype))
            if finite is not True:
                for parameter in parameters:
                    assert parameter.grad is not None
                    parameter.grad.masked_fill_(~_on(finite, parameter.grad), 0)
            return
        assert self.gradient is not None
        matrix = self.gradient * self.scale
        if self.others is not None:
            matrix = matrix + self.others
        for parameter, gradient in zip(parameters, split(self.record, matrix), strict=True):
            assert parameter.grad is not None
            parameter.grad.copy_(gradient if finite is True else torch.where(_on(finite, gradient), gradient, 0))


def _combine_into_gradients(record: "Record", rows: RowMatrices, coefficients: Tensor, kept: Tensor | None) -> None:
    """Write ``coefficientsᵀ X`` to the gradients, in place; with ``kept``, plus ``kept`` times what is there.

    Args:
        record: whose gradients.
        rows: X.
        coefficients: ``[groups, rows, out_features]``.
        kept: ``[groups]``; a gradient that is kept 0 times may hold anything.
    """
    grad, operation = record.weight.grad, record.operation
    if rows.features is not None and grad is not None:
        if kept is not None:
            old = _times(operation.weight_matrix(grad).to(coefficients.dtype), kept)
            grad.copy_(operation.shaped_like_weight(torch.baddbmm(old, coefficients.mT, rows.features)))
        elif operation.is_dense and grad.is_contiguous() and grad.dtype == coefficients.dtype:
            left, right = coefficients[0], rows.features[0]
            if operation.is_transposed:
                left, right = right, left
            torch.mm(left.mT, right, out=grad)
        else:
            grad.copy_(operation.shaped_like_weight(coefficients.mT @ rows.features))
    for bias, gradient in zip(rows.biases, rows.bias_sums(coefficients), strict=True):
        assert bias.grad is not None
        if kept is not None:
            gradient = gradient + _times(bias.grad.view(*gradient.shape).to(gradient.dtype), kept)
        bias.grad.copy_(gradient.reshape(bias.shape))


def _times(gradient: Tensor, kept: Tensor) -> Tensor:
    """The gradient, ``[groups, ...]``, times a number for each group; 0 times infinity is 0."""
    factors = kept.view(-1, *[1] * (gradient.ndim - 1))
    return torch.where(factors > 0, gradient * factors, 0)


def _on(flag: bool | Tensor, like: Tensor) -> Tensor:
    assert isinstance(flag, Tensor)
    return flag.to(like.device)
