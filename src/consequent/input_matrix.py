"""The matrices of one weight: its inputs with a constant 1 for each bias, its output gradients, its gradient."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from consequent import layers
from consequent.record import Record


def trained(record: Record) -> list[Tensor]:
    """The record's parameters that have a gradient now: the weight first, then the biases."""
    members = [record.weight] if record.features else []
    return [parameter for parameter in (*members, *record.biases) if parameter.grad is not None]


def gradient_matrix(record: Record) -> Tensor:
    """``[groups, out_features, columns]``: what is in ``.grad`` of the weight and the biases."""
    parts = []
    if record.features and record.weight.grad is not None:
        parts.append(layers.weight_matrix(record.layer, record.weight.grad))
    groups = layers.groups(record.layer)
    parts += [bias.grad.view(groups, -1, 1) for bias in record.biases if bias.grad is not None]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def split(record: Record, matrix: Tensor) -> list[Tensor]:
    """The inverse of :func:`gradient_matrix`, for a matrix of new gradients."""
    parameters = trained(record)
    widths = [record.features if parameter is record.weight and record.features else 1 for parameter in parameters]
    parts = matrix.split(widths, dim=-1)
    return [
        layers.shaped_like_weight(record.layer, part) if parameter is record.weight else part.reshape(parameter.shape)
        for part, parameter in zip(parts, parameters, strict=True)
    ]


def columns_with_gradient(record: Record) -> list[int]:
    """Which columns of the whole input matrix (features, then a 1 for each bias) belong to a gradient."""
    columns = list(range(record.features)) if record.weight.grad is not None else []
    return columns + [record.features + place for place, bias in enumerate(record.biases) if bias.grad is not None]


@dataclass
class InputMatrix:
    """The rows of all uses of a weight, the constant 1 of its biases kept apart: it need not be multiplied."""

    record: Record
    captured: Tensor | None  # [groups, rows, D], as they met the weight; None where that has no gradient
    output_grads: Tensor  # [groups, rows, out_features]

    @classmethod
    def of(cls, record: Record) -> "InputMatrix":
        """The rows that the record has kept, in float32 or better."""
        for use in record.uses:
            use.refuse_overwritten_inputs()
        dZ = _in_float32(
            _concatenated(
                [layers.output_rows(use.layer, use.output_grad) for use in record.uses if use.output_grad is not None]
            )
        )
        X = None
        if record.features and record.weight.grad is not None:
            X = _concatenated([layers.input_rows(u.layer, u.inputs) for u in record.uses if u.inputs is not None])
        return cls(record, X, dZ)

    @cached_property
    def features(self) -> Tensor | None:
        """``[groups, rows, D]``, in float32 or better; None where the weight has no gradient."""
        return None if self.captured is None else _in_float32(self.captured)

    @cached_property
    def biases(self) -> list[Tensor]:
        """The biases that have a gradient."""
        return [bias for bias in self.record.biases if bias.grad is not None]

    @cached_property
    def ones(self) -> Tensor | None:
        """``[rows, biases]``: 1 where a row's use has that bias; None if there are no biases with a gradient."""
        if not self.biases:
            return None
        uses = self.record.uses
        columns = [
            torch.cat([self.output_grads.new_full((use.rows,), float(use.bias is bias)) for use in uses])
            for bias in self.biases
        ]
        return torch.stack(columns, dim=-1)

    def bias_columns(self) -> list[tuple[Tensor, float | Tensor]]:
        """The biases that have a gradient, each with its column: 1 where that is all, otherwise ``[rows, 1]``."""
        if self.has_one_bias_everywhere:
            return [(self.biases[0], 1.0)]
        return [] if self.ones is None else list(zip(self.biases, self.ones.split(1, dim=-1), strict=True))

    @cached_property
    def has_one_bias_everywhere(self) -> bool:
        """The usual case: every row ends in the same constant 1."""
        return len(self.biases) == 1 and all(use.bias is self.biases[0] for use in self.record.uses)

    def bring_to_usual_size(self) -> None:
        """Divide the output gradients by their largest entry."""
        if self.output_grads.numel() == 0:
            return
        largest = self.output_grads.abs().amax()
        self.output_grads = self.output_grads / largest.clamp(min=torch.finfo(largest.dtype).tiny)

    def gram(self) -> Tensor:
        """``[groups, rows, rows]``: the inner products of all rows."""
        dZ = self.output_grads
        if self.captured is None:
            gram = dZ.new_zeros(dZ.shape[0], dZ.shape[1], dZ.shape[1])
        elif self.captured.is_cuda and self.captured.dtype.itemsize < 4 and len(self.captured) == 1:
            X = self.captured[0]
            gram = torch.mm(X, X.mT, out_dtype=torch.float32)[None]  # exact products, summed in float32
        else:
            assert self.features is not None
            gram = torch.bmm(self.features, self.features.mT)
        if self.has_one_bias_everywhere:
            return gram.add_(1)
        return gram if self.ones is None else gram.add_(self.ones @ self.ones.mT)

    def whole(self) -> Tensor:
        """``[groups, rows, columns]``: the features and the ones together."""
        groups, rows = self.output_grads.shape[:2]
        parts = [] if self.features is None else [self.features]
        if self.ones is not None:
            parts.append(self.ones.expand(groups, rows, len(self.biases)))
        return torch.cat(parts, dim=-1)

    def double(self) -> "InputMatrix":
        """The same in float64."""
        features = None if self.features is None else self.features.double()
        return InputMatrix(self.record, features, self.output_grads.double())

    def combine_into_gradients(self, coefficients: Tensor, kept: Tensor | None = None) -> None:
        """Write ``coefficientsᵀ X`` to the gradients, in place; with ``kept``, plus ``kept`` times what is there.

        Args:
            coefficients: ``[groups, rows, out_features]``.
            kept: ``[groups]``; a gradient that is kept 0 times may hold anything.
        """
        grad = self.record.weight.grad
        if self.features is not None and grad is not None:
            layer = self.record.layer
            if kept is not None:
                old = _times(layers.weight_matrix(layer, grad).to(coefficients.dtype), kept)
                grad.copy_(layers.shaped_like_weight(layer, torch.baddbmm(old, coefficients.mT, self.features)))
            elif layers.is_dense(layer) and grad.is_contiguous() and grad.dtype == coefficients.dtype:
                left, right = coefficients[0], self.features[0]
                if layers.is_transposed(layer):
                    left, right = right, left
                torch.mm(left.mT, right, out=grad)
            else:
                grad.copy_(layers.shaped_like_weight(layer, coefficients.mT @ self.features))
        sums: tuple[Tensor, ...] = ()
        if self.has_one_bias_everywhere:
            sums = (coefficients.sum(-2),)
        elif self.ones is not None:
            sums = (coefficients.mT @ self.ones).unbind(-1)
        for bias, gradient in zip(self.biases, sums, strict=True):
            assert bias.grad is not None
            if kept is not None:
                gradient = gradient + _times(bias.grad.view(*gradient.shape).to(gradient.dtype), kept)
            bias.grad.copy_(gradient.reshape(bias.shape))


def _times(gradient: Tensor, kept: Tensor) -> Tensor:
    """The gradient, ``[groups, ...]``, times a number for each group; 0 times infinity is 0."""
    factors = kept.view(-1, *[1] * (gradient.ndim - 1))
    return torch.where(factors > 0, gradient * factors, 0)


def _concatenated(blocks: list[Tensor]) -> Tensor:
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)


def _in_float32(matrix: Tensor) -> Tensor:
    """The matrix in float32, or as it is if that is better."""
    return matrix if matrix.dtype.itemsize >= 4 else matrix.float()
