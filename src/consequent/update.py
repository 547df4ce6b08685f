"""From a record of a weight's inputs, and the gradient in ``.grad``, to its consequentialist gradient."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from consequent import layers
from consequent.record import Record, Use
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
    edited: bool | Tensor = False  # the gradient in .grad is no multiple of ΔZᵀX
    foreign: bool = False  # and never was, in a layer whose class has a forward of its own


def consequentialist_update(record: Record, damping: Damping, *, may_wait: bool) -> Update:
    """The consequentialist gradient for what is in ``.grad`` of the record's parameters now.

    Args:
        record: what was captured for that gradient.
        damping: λ.
        may_wait: whether the host may wait for the device to look at a result.
    """
    known = record.verified
    if record.moment is None:
        update = _on_sample_side(record, damping, may_wait=may_wait)
    else:
        if record.uses:
            record.reduce(keep_rows=True)
        update = _on_feature_side(record, damping, may_wait=may_wait)
    update.foreign = update.edited is True and not known and layers.overrides_forward(record.layer)
    return update


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
    finite = finite & solved.solution.sum().isfinite()
    edited = not _is_explained(record)
    return Update(_split(record, solved.solution.mT), "features", finite, solved.rescued, solved.fallen_back, edited)


def _on_sample_side(record: Record, damping: Damping, *, may_wait: bool) -> Update:
    """``ΔZᵀ (X Xᵀ + λI)⁻¹ X``, times the factor by which the gradient in ``.grad`` differs from ``ΔZᵀX``."""
    X, dZ = input_matrix(record), output_grad_matrix(record)
    gram = X @ X.mT
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    level = damping.absolute(trace, record.rows)
    if record.verified and not may_wait and damping.value > 0:
        return _on_sample_side_of_device(record, X, dZ, gram, trace, level)
    factor = _factor(record, X, dZ)
    if factor is None:
        gradient = correct_any_gradient(gradient_matrix(record).to(X.dtype), X, level)
        return Update(_split(record, gradient), "samples", gradient.sum().isfinite(), edited=True)
    if damping.value == 0:
        finite = (trace.sum() + dZ.sum() + factor).isfinite()
        gradient = (torch.linalg.pinv(X) @ dZ).mT * factor if finite else torch.zeros_like(dZ.mT @ X)
        return Update(_split(record, gradient), "samples", finite)
    solved = damped_solve_or_fall_back(gram, dZ, level, may_wait=may_wait)
    if may_wait and X.dtype != torch.float64:
        unsafe = solved.doubtful + solved.rescued + solved.fallen_back
        if unsafe:  # the rows are still there: in float64 the answer is free of float32's rounding
            X, dZ = X.double(), dZ.double()
            solved = damped_solve_or_fall_back(X @ X.mT, dZ, level, may_wait=True)
            solved.rescued = unsafe - solved.fallen_back
    coefficients = solved.solution * factor
    finite = (trace.sum() + coefficients.sum()).isfinite()
    return Update(_split(record, coefficients.mT @ X), "samples", finite, solved.rescued, solved.fallen_back)


def _on_sample_side_of_device(
    record: Record, X: Tensor, dZ: Tensor, gram: Tensor, trace: Tensor, level: float | Tensor
) -> Update:
    """The same without looking: every choice is made on the device.

    For an edited gradient there is no float64 solve here: it is used as it is, shortened until it cannot overshoot.
    """
    gradient = gradient_matrix(record).to(X.dtype)
    expected, found, sizes = _probe(gradient, X, dZ)
    squared = expected.square().sum()
    factor = torch.where(squared > 0, (found * expected).sum() / squared, 1.0).to(X.dtype)
    edited = ((found - factor * expected).abs() > _rounding(record) * factor.abs() * sizes).float().mean() > 0.5
    solved = damped_solve_or_fall_back(gram, dZ, level, may_wait=False)
    coefficients = solved.solution * factor
    chosen = torch.where(edited, gradient / (trace[:, None, None] + level), coefficients.mT @ X)
    finite = (trace.sum() + coefficients.sum() + found.sum()).isfinite()
    return Update(_split(record, chosen), "samples", finite, 0, solved.fallen_back, edited.long())


def input_matrix(record: Record) -> Tensor:
    """``[groups, rows, columns]``: the inputs of all uses and the constant 1 of their biases."""
    matrix = _concatenated([_input_block(record, use) for use in record.uses])
    columns = _columns_with_gradient(record)
    return matrix if len(columns) == record.columns else matrix[:, :, columns]


def _input_block(record: Record, use: Use) -> Tensor:
    assert use.output_grad is not None
    shape = (layers.groups(use.layer), use.rows, 0)
    empty = use.output_grad.new_empty(shape)  # where only the bias is trained
    block = empty if use.inputs is None else layers.input_rows(use.layer, use.inputs)
    block = block.to(torch.promote_types(block.dtype, torch.float32))
    for bias in record.biases:
        block = pad(block, (0, 1), value=1.0 if bias is use.bias else 0.0)
    return block


def output_grad_matrix(record: Record) -> Tensor:
    """``[groups, rows, out_features]``: ΔZ of all uses."""
    blocks = [layers.output_rows(use.layer, use.output_grad) for use in record.uses if use.output_grad is not None]
    matrix = _concatenated(blocks)
    return matrix.to(torch.promote_types(matrix.dtype, torch.float32))


def _concatenated(blocks: list[Tensor]) -> Tensor:
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)


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


def _factor(record: Record, X: Tensor, dZ: Tensor) -> float | Tensor | None:
    """The scalar c with ``.grad = c ΔZᵀX``; None if there is none.

    c is 1 straight after ``backward()``. The scale of a GradScaler, the average over ranks and norm clipping change it;
    value clipping, a penalty on the weights or a user's edit leave no such c.
    """
    gradient = gradient_matrix(record).to(X.dtype)
    expected, found, sizes = _probe(gradient, X, dZ)
    tolerance = _rounding(record)
    if bool(((found - expected).abs() <= tolerance * sizes).all()):
        record.verified = True
        return 1.0
    factor = _multiple(gradient, dZ.mT @ X, tolerance * X.norm() * dZ.norm())
    if factor is not None:
        record.verified = True
    return factor


def _is_explained(record: Record) -> bool:
    """Whether the weight's ``.grad`` is a multiple of ΔZᵀX; on the feature side asked once, since nothing hangs on it.

    A weight that is also used outside of its layer, say, has a gradient that its captured inputs do not explain.
    """
    plain, squared_output_grads, gradient = record.plain_gradient, record.squared_output_grads, record.weight.grad
    if record.verified or plain is None or squared_output_grads is None or gradient is None or record.moment is None:
        return True
    record.verified = True
    squared_inputs = record.moment.diagonal(dim1=-2, dim2=-1)[:, : record.features].sum()
    rounding = _rounding(record) * (squared_inputs * squared_output_grads).sqrt()
    return _multiple(gradient.to(plain.dtype), plain, rounding) is not None


def _multiple(gradient: Tensor, plain: Tensor, rounding: Tensor) -> Tensor | None:
    """The c with ``gradient = c · plain`` up to rounding, if there is one."""
    squared = plain.square().sum()
    factor = torch.where(squared > 0, (gradient * plain).sum() / squared, torch.ones_like(squared))
    residual = (gradient - factor * plain).norm()
    return None if residual > rounding * factor.abs() else factor


def _probe(gradient: Tensor, X: Tensor, dZ: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``(ΔZ u) · (X v)`` and ``u G v`` for a few random u and v, and the sizes that bound the first.

    They agree if ``G = ΔZᵀX``; G is read once, while computing ``ΔZᵀX`` again would cost as much as backpropagation.
    """
    u, v = _signs(dZ.shape[-1], dZ.dtype, dZ.device), _signs(X.shape[-1], X.dtype, X.device)
    left, right = dZ @ u, X @ v
    return (left * right).sum(-2), ((gradient @ v) * u).sum(-2), left.norm(dim=-2) * right.norm(dim=-2)


@lru_cache(maxsize=256)
def _signs(size: int, dtype: torch.dtype, device: torch.device, probes: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(size)  # not the user's random numbers
    return (torch.randint(0, 2, (size, probes), generator=generator) * 2 - 1).to(device, dtype)


def _rounding(record: Record) -> float:
    """How far ``.grad`` may be from ``ΔZᵀX`` by rounding, in units of ``‖ΔZ‖ ‖X‖``."""
    dtype = record.first_use.dtype
    if dtype == torch.float32 and record.weight.is_cuda:
        return 2e-3  # TF32
    return 32 * torch.finfo(dtype).eps if dtype.itemsize >= 4 else 2 * torch.finfo(dtype).eps
