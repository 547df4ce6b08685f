"""Whether the gradient in ``.grad`` is the one that the captured inputs explain, up to a factor.

The factor c with ``.grad = c ΔZᵀX`` is 1 straight after ``backward()``. The scale of a GradScaler, the average over
ranks and norm clipping change it; value clipping, a penalty on the weights or a user's edit leave no such c.
"""

from functools import lru_cache

import torch
from torch import Tensor

from consequent.input_matrix import InputMatrix, gradient_matrix
from consequent.record import Record


def factor_of_gradient(record: Record, rows: InputMatrix) -> float | Tensor | None:
    """The scalar c with ``.grad = c ΔZᵀX``; None if there is none. Looks at the numbers, so not for a busy GPU."""
    if record.verified and _is_plain(record, rows):
        return 1.0
    X, dZ = rows.whole(), rows.output_grads
    gradient = gradient_matrix(record).to(X.dtype)
    expected, found, sizes = _probe(gradient, X, dZ)
    tolerance = rounding(record)
    if bool(((found - expected).abs() <= tolerance * sizes).all()):
        record.verified = True
        return 1.0
    factor = multiple(gradient, dZ.mT @ X, tolerance * X.norm() * dZ.norm())
    if factor is not None:
        record.verified = True
    return factor


def factor_on_device(record: Record, rows: InputMatrix) -> tuple[Tensor, Tensor, Tensor]:
    """The same without looking: the factor, whether there is none, and a number that is NaN or inf if any was met."""
    X, dZ = rows.whole(), rows.output_grads
    expected, found, sizes = _probe(gradient_matrix(record).to(X.dtype), X, dZ)
    squared = expected.square().sum()
    factor = torch.where(squared > 0, (found * expected).sum() / squared, 1.0).to(X.dtype)
    edited = ((found - factor * expected).abs() > rounding(record) * factor.abs() * sizes).float().mean() > 0.5
    return factor, edited, found.sum()


def is_explained(record: Record) -> bool:
    """Whether the weight's ``.grad`` is a multiple of ΔZᵀX; on the feature side asked once, since nothing hangs on it.

    A weight that is also used outside of its layer, say, has a gradient that its captured inputs do not explain.
    """
    plain, squared_output_grads, gradient = record.plain_gradient, record.squared_output_grads, record.weight.grad
    if record.verified or plain is None or squared_output_grads is None or gradient is None or record.moment is None:
        return True
    record.verified = True
    squared_inputs = record.moment.diagonal(dim1=-2, dim2=-1)[:, : record.features].sum()
    level = rounding(record) * (squared_inputs * squared_output_grads).sqrt()
    return multiple(gradient.to(plain.dtype), plain, level) is not None


def multiple(gradient: Tensor, plain: Tensor, level: float | Tensor) -> Tensor | None:
    """The c with ``gradient = c · plain`` up to rounding, if there is one."""
    squared = plain.square().sum()
    factor = torch.where(squared > 0, (gradient * plain).sum() / squared, torch.ones_like(squared))
    residual = (gradient - factor * plain).norm()
    return None if residual > level * factor.abs() else factor


def rounding(record: Record) -> float:
    """How far ``.grad`` may be from ``ΔZᵀX`` by rounding, in units of ``‖ΔZ‖ ‖X‖``."""
    dtype = record.first_use.dtype
    if dtype == torch.float32 and record.weight.is_cuda:
        return 2e-3  # TF32
    return 32 * torch.finfo(dtype).eps if dtype.itemsize >= 4 else 2 * torch.finfo(dtype).eps


def _is_plain(record: Record, rows: InputMatrix) -> bool:
    """Whether two probes of a layer with at most one bias find ``.grad = ΔZᵀX``; says no where that is not quick."""
    X, dZ, grad = rows.features, rows.output_grads, record.weight.grad
    bias_grad = rows.biases[0].grad if rows.has_one_bias_everywhere else None
    if X is None or grad is None or len(X) > 1 or (rows.biases and bias_grad is None) or grad.dtype != X.dtype:
        return False
    u, v = _signs(dZ.shape[-1], dZ.dtype, dZ.device, 2), _signs(X.shape[-1], X.dtype, X.device, 2)
    left, right = dZ[0] @ u, X[0] @ v
    found = grad.reshape(len(u), -1) @ v
    if bias_grad is not None:
        right, found = right + 1, found + bias_grad[:, None]
    difference = (found * u).sum(0) - (left * right).sum(0)
    return bool((difference.abs() <= rounding(record) * left.norm(dim=0) * right.norm(dim=0)).all())


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
