"""The gradients of a weight and its biases as one matrix, and back."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from consequent.capture.records import Record


def trained(record: "Record") -> list[Tensor]:
    """The record's parameters that have a gradient now: the weight first, then the biases."""
    members = [record.weight] if record.features else []
    return [parameter for parameter in (*members, *record.biases) if parameter.grad is not None]


def gradient_matrix(record: "Record") -> Tensor:
    """``[groups, out_features, columns]``: what is in ``.grad`` of the weight and the biases."""
    return _matrix(record, {p: p.grad for p in trained(record) if p.grad is not None})


def other_matrix(record: "Record") -> Tensor | None:
    """The same of what came to the gradients otherwise than from the layer's uses; None if that is nothing."""
    if not record.others:
        return None
    return _matrix(record, {p: record.others.get(p, torch.zeros_like(p.grad)) for p in trained(record)})  # type: ignore[arg-type]


def transposed_matrix(record: "Record") -> Tensor | None:
    """The same of what the weight got from its action in ``Wᵀ ΔZ``; None if it had none."""
    if record.from_transposed is None or record.weight.grad is None:
        return None
    gradients = {p: torch.zeros_like(p.grad) for p in trained(record)}  # type: ignore[arg-type]
    return _matrix(record, gradients | {record.weight: record.from_transposed})


def _matrix(record: "Record", gradients: dict[Tensor, Tensor]) -> Tensor:
    parts = []
    if record.features and record.weight in gradients:
        parts.append(record.operation.weight_matrix(gradients[record.weight]))
    groups = record.operation.groups
    parts += [gradients[bias].view(groups, -1, 1) for bias in record.biases if bias in gradients]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def split(record: "Record", matrix: Tensor) -> list[Tensor]:
    """The inverse of :func:`gradient_matrix`, for a matrix of new gradients."""
    parameters = trained(record)
    widths = [record.features if parameter is record.weight and record.features else 1 for parameter in parameters]
    parts = matrix.split(widths, dim=-1)
    return [
        record.operation.shaped_like_weight(part) if parameter is record.weight else part.reshape(parameter.shape)
        for part, parameter in zip(parts, parameters, strict=True)
    ]


def columns_with_gradient(record: "Record") -> list[int]:
    """Which columns of the whole input matrix (features, then a 1 for each bias) belong to a gradient."""
    columns = list(range(record.features)) if record.weight.grad is not None else []
    return columns + [record.features + place for place, bias in enumerate(record.biases) if bias.grad is not None]
