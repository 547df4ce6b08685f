"""The gradients of a weight and its biases as one matrix, and back."""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from consequent.maths.bound import Change
from consequent.maths.damping import Damping

if TYPE_CHECKING:
    from consequent.capture.records import Record

SAME_MULTIPLE = 1e3  # in units of eps: how far rounding may take the signature of a scaled gradient


def trained(record: "Record") -> list[Tensor]:
    """The record's parameters that have a gradient now: the weight first, then the biases."""
    statistic = record.captured
    members = (record.weight, *statistic.biases) if statistic.features else statistic.biases
    return [parameter for parameter in members if parameter.grad is not None]


def gradient_matrix(record: "Record") -> Tensor:
    """``[groups, out_features, columns]``: what is in ``.grad`` of the weight and the biases."""
    return _matrix(record, {p: p.grad for p in trained(record) if p.grad is not None})


def other_matrix(record: "Record") -> Tensor | None:
    """The same of what came to the gradients otherwise than from the layer's uses; None if that is nothing."""
    if not record.beside.others:
        return None
    return _matrix(record, {p: record.beside.others.get(p, torch.zeros_like(p.grad)) for p in trained(record)})  # type: ignore[arg-type]


def transposed_matrix(record: "Record") -> Tensor | None:
    """The same of what the weight got from its action in ``Wᵀ ΔZ``; None if it had none."""
    if record.beside.from_transposed is None or record.weight.grad is None:
        return None
    gradients = {p: torch.zeros_like(p.grad) for p in trained(record)}  # type: ignore[arg-type]
    return _matrix(record, gradients | {record.weight: record.beside.from_transposed})


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


def has_all_gradients(record: "Record") -> bool:
    """Whether every column of the whole input matrix belongs to a gradient."""
    statistic = record.captured
    members = (record.weight, *statistic.biases) if statistic.features else statistic.biases
    return all(parameter.grad is not None for parameter in members)


class Apart(NamedTuple):
    """Parts of a gradient that do not come from the layer's rows, ``[groups, out_features, columns]`` each.

    Attributes:
        all: all of them, as they are in ``.grad`` now.
        others: those that stay as they are: penalties on the weight, uses of it outside of the layer.
        shortened: those from ``Wᵀ ΔZ``, which the weight acted in, too, made so short that they cannot overshoot.
    """

    all: Tensor
    others: Tensor | None
    shortened: Tensor | None


def apart_from_rows(record: "Record", damping: Damping, trace: Tensor, *, may_wait: bool) -> Apart | None:
    """What is not solved for; None also where the gradient was edited since, so that it is not to be told apart.

    The consequences of a change U of a weight that also acted in ``Wᵀ ΔZ`` (a penalty on gradients) are ``U X`` and
    ``Uᵀ ΔZ``, and the exact answer would be that of a Sylvester equation, ``(Σ ΔZ ΔZᵀ) U + U (XXᵀ + λI) = G``, for
    which windows of several taps and biases have no closed form. So what comes from there is not solved for: it is
    divided by λ and bounds of both actions' eigenvalues, a step that is too short and not too long.

    Args:
        record: of the gradient.
        damping: λ.
        trace: of the inputs' moment or Gram matrix, ``[groups]``.
        may_wait: whether numbers may be looked at.
    """
    others, transposed = other_matrix(record), transposed_matrix(record)
    factor = factor_since(record, may_wait=may_wait) if others is not None or transposed is not None else None
    if factor is None:
        return None
    dtype, shortened = trace.dtype, None
    if others is not None:
        others = others.to(dtype) * factor
    if transposed is not None and record.beside.transposed is not None:
        transposed = transposed.to(dtype) * factor
        level = damping.level(record.rows, record.columns).at(trace)
        bound = ((trace + level)[:, None, None] + record.beside.transposed).clamp(min=torch.finfo(dtype).tiny)
        shortened = transposed / bound
    parts = [part for part in (others, transposed) if part is not None]
    return Apart(parts[0] if len(parts) == 1 else parts[0] + parts[1], others, shortened)


def factor_since(record: "Record", *, may_wait: bool) -> Tensor | None:
    """By what the gradient was scaled since the backward pass; None where it was edited, as far as one may look."""
    scaled = record.beside.scaled_by(record.grads)
    if scaled is None or (may_wait and bool(scaled[1] > SAME_MULTIPLE)):
        return None
    return scaled[0]


def trace_of(matrix: Tensor) -> Tensor:
    """``[...]`` of ``[..., n, n]``."""
    return matrix.diagonal(dim1=-2, dim2=-1).sum(-1)


def change_of(record: "Record", energy: float | Tensor, trace: float | Tensor) -> Change:
    """What the bound asks of a new gradient.

    Args:
        record: whose it is.
        energy: ``⟨U, G⟩``.
        trace: of ``XXᵀ``, of all groups together.
    """
    statistic = record.captured
    operation = statistic.operation
    columns = statistic.features if record.weight.grad is not None else 0
    columns += sum([bias.grad is not None for bias in statistic.biases])
    outputs = record.weight.numel() / max(operation.features, 1)
    return Change(energy, trace, outputs / max(columns * operation.groups, 1))


def dot(one: Tensor, other: Tensor) -> Tensor:
    """``⟨one, other⟩``, in float32 or better."""
    return torch.dot(one.reshape(-1), other.reshape(-1).to(one.dtype))
