"""From a record of a weight's inputs, and the gradient in ``.grad``, to its consequentialist gradient."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from consequent import layers
from consequent.record import Record
from consequent.ridge import correct_any_gradient, damped_solve_or_fall_back
from consequent.settings import Damping


@dataclass
class Update:
    """New gradients for a weight and its biases, not yet multiplied by the number of samples."""

    gradients: list[tuple[Tensor, Tensor]]
    side: str
    finite: Tensor  # whether no NaN or inf was met
    rescued: int | Tensor = 0  # factorisations that needed float64
    fallen_back: int | Tensor = 0  # factorisations that failed: a shortened plain gradient instead
    edited: bool = False  # the gradient in .grad is no multiple of ΔZᵀX


def consequentialist_update(record: Record, damping: Damping, *, may_wait: bool) -> Update:
    """The consequentialist gradient for what is in ``.grad`` of the record's parameters now.

    Args:
        record: what was captured for that gradient.
        damping: λ.
        may_wait: whether the host may wait for the device to look at a result.
    """
    if record.moment is None:
        return _on_sample_side(record, damping, may_wait=may_wait)
    if record.uses:
        record.reduce(keep_rows=True)
    return _on_feature_side(record, damping, may_wait=may_wait)


def _on_feature_side(record: Record, damping: Damping, *, may_wait: bool) -> Update:
    """``G (XᵀX + λI)⁻¹``: takes the gradient as it is, scaled, clipped or averaged over ranks."""
    moment = record.moment
    assert moment is not None
    columns = _columns_with_gradient(record)
    if len(columns) < record.columns:
        index = torch.tensor(columns, device=moment.device)
        moment = moment[:, index[:, None], index]
    gradient = gradient_matrix(record).to(moment.dtype)
    trace = moment.diagonal(dim1=-2, dim2=-1).sum(-1)
    finite = (trace.sum() + gradient.sum()).isfinite()
    if may_wait and not finite:
        return Update([], "features", finite)
    if damping.value == 0:  # λ was set to 0 after the rows were reduced
        pseudo_inverse = torch.linalg.pinv(moment.double(), hermitian=True)
        return Update(_split(record, (gradient.double() @ pseudo_inverse).to(gradient.dtype)), "features", finite)
    level = damping.absolute(trace, record.rows)
    solved = damped_solve_or_fall_back(moment, gradient.mT, level, may_wait=may_wait)
    return Update(_split(record, solved.solution.mT), "features", finite, solved.rescued, solved.fallen_back)


def _on_sample_side(record: Record, damping: Damping, *, may_wait: bool) -> Update:
    """``ΔZᵀ (X Xᵀ + λI)⁻¹ X``, times the factor by which the gradient in ``.grad`` differs from ``ΔZᵀX``."""
    X, dZ = input_matrix(record), output_grad_matrix(record)
    gram = X @ X.mT
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    finite = (trace.sum() + dZ.sum()).isfinite()
    level = damping.absolute(trace, record.rows)
    if may_wait and not finite:
        return Update([], "samples", finite)
    factor = _factor(record, X, dZ, may_wait=may_wait)
    if factor is None:
        gradient = correct_any_gradient(gradient_matrix(record).to(X.dtype), X, level)
        return Update(_split(record, gradient), "samples", gradient.sum().isfinite(), edited=True)
    finite = finite & torch.as_tensor(factor, device=finite.device).isfinite()
    if damping.value == 0:
        return Update(_split(record, (torch.linalg.pinv(X) @ dZ).mT * factor), "samples", finite)
    solved = damped_solve_or_fall_back(gram, dZ, level, may_wait=may_wait)
    if not isinstance(solved.fallen_back, Tensor) and solved.failed and X.dtype != torch.float64:
        # The rows are still there: the float64 answer can do without float32's rounding altogether.
        failed, X, dZ = solved.failed, X.double(), dZ.double()
        solved = damped_solve_or_fall_back(X @ X.mT, dZ, level, may_wait=True)
        solved.rescued = failed - solved.fallen_back
    gradient = (solved.solution.mT * factor) @ X
    return Update(_split(record, gradient), "samples", finite, solved.rescued, solved.fallen_back)


def input_matrix(record: Record) -> Tensor:
    """``[groups, rows, columns]``: the inputs of all uses and the constant 1 of their biases."""
    blocks = []
    for use in record.uses:
        assert use.output_grad is not None
        dtype = torch.promote_types(use.output_grad.dtype, torch.float32)
        block = use.output_grad.new_zeros(layers.groups(use.layer), use.rows, record.columns, dtype=dtype)
        if use.inputs is not None:
            block[:, :, : record.features] = layers.input_rows(use.layer, use.inputs)
        block[:, :, record.columns_of(use)[record.features :]] = 1
        blocks.append(block)
    matrix = torch.cat(blocks, dim=1)
    columns = _columns_with_gradient(record)
    return matrix if len(columns) == record.columns else matrix[:, :, columns]


def output_grad_matrix(record: Record) -> Tensor:
    """``[groups, rows, out_features]``: ΔZ of all uses."""
    blocks = [layers.output_rows(use.layer, use.output_grad) for use in record.uses if use.output_grad is not None]
    matrix = torch.cat(blocks, dim=1)
    return matrix.to(torch.promote_types(matrix.dtype, torch.float32))


def gradient_matrix(record: Record) -> Tensor:
    """``[groups, out_features, columns]``: what is in ``.grad`` of the weight and the biases."""
    parts = []
    if record.features and record.weight.grad is not None:
        parts.append(layers.weight_matrix(record.layer, record.weight.grad))
    for bias in record.biases:
        if bias.grad is not None:
            parts.append(bias.grad.view(layers.groups(record.layer), -1, 1))
    return torch.cat(parts, dim=-1)


def _split(record: Record, matrix: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The inverse of :func:`gradient_matrix`."""
    gradients: list[tuple[Tensor, Tensor]] = []
    place = 0
    if record.features and record.weight.grad is not None:
        place = record.features
        gradients.append((record.weight, matrix[..., :place].reshape(record.weight.shape)))
    for bias in record.biases:
        if bias.grad is not None:
            gradients.append((bias, matrix[..., place].reshape(bias.shape)))
            place += 1
    return gradients


def _columns_with_gradient(record: Record) -> list[int]:
    columns = list(range(record.features)) if record.weight.grad is not None else []
    return columns + [record.features + place for place, bias in enumerate(record.biases) if bias.grad is not None]


def _factor(record: Record, X: Tensor, dZ: Tensor, *, may_wait: bool) -> float | Tensor | None:
    """The scalar c with ``.grad = c ΔZᵀX``; None if there is none.

    c is 1 straight after ``backward()``. The scale of a GradScaler, the average over ranks and norm clipping change it;
    value clipping, a penalty on the weights or a user's edit leave no such c.
    """
    untouched = record.is_untouched()
    if untouched and record.verified and not may_wait:
        return 1.0
    gradient = gradient_matrix(record).to(X.dtype)
    tolerance = _rounding(record)
    if untouched and _agrees_on_probes(gradient, X, dZ, tolerance):
        record.verified = True
        return 1.0
    plain = dZ.mT @ X
    squared = plain.square().sum()
    factor = torch.where(squared > 0, (gradient * plain).sum() / squared, torch.ones_like(squared))
    residual = (gradient - factor * plain).norm()
    if residual > tolerance * factor.abs() * X.norm() * dZ.norm():
        return None
    record.verified = True
    return 1.0 if untouched else factor


def _agrees_on_probes(gradient: Tensor, X: Tensor, dZ: Tensor, tolerance: float) -> bool:
    """Whether ``u G v = (ΔZ u) · (X v)`` for a few random u, v: reads G once instead of computing ``ΔZᵀX`` again."""
    u, v = _signs(dZ.shape[-1], dZ.device), _signs(X.shape[-1], X.device)
    left, right = dZ @ u.to(dZ.dtype), X @ v.to(X.dtype)
    expected = (left * right).sum(-2)
    found = ((gradient @ v.to(X.dtype)) * u.to(X.dtype)).sum(-2)
    return bool(((found - expected).abs() <= tolerance * left.norm(dim=-2) * right.norm(dim=-2)).all())


@lru_cache(maxsize=256)
def _signs(size: int, device: torch.device, probes: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(size)  # not the user's random numbers
    return (torch.randint(0, 2, (size, probes), generator=generator) * 2 - 1).to(device, torch.int8)


def _rounding(record: Record) -> float:
    """How far ``.grad`` may be from ``ΔZᵀX`` by rounding, in units of ``‖ΔZ‖ ‖X‖``."""
    dtype = record.first_use.output_grad.dtype if record.first_use.output_grad is not None else torch.float32
    if dtype == torch.float32 and record.weight.is_cuda:
        return 2e-3  # TF32
    return 32 * torch.finfo(dtype).eps if dtype.itemsize >= 4 else 2 * torch.finfo(dtype).eps
