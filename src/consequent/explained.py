"""Whether the gradient in ``.grad`` is the one that the captured inputs explain, up to a factor.

The factor c with ``.grad = c ΔZᵀX`` is 1 straight after ``backward()``. The scale of a GradScaler, the average over
ranks and norm clipping change it; value clipping, a penalty on the weights or a user's edit leave no such c.
"""

from functools import lru_cache

import torch
from torch import Tensor
from torch.linalg import vector_norm

from consequent.input_matrix import InputMatrix, gradient_matrix
from consequent.layers import weight_matrix
from consequent.record import Record

PROBES = 3  # as many as a CPU multiplies by in the time that it takes to read the gradient


def factors_of_gradients(members: list[InputMatrix]) -> list[float | Tensor | None]:
    """The scalars c with ``.grad = c ΔZᵀX``, for records with as many rows each; None where there is none.

    Where c is not 1, ΔZ is brought to a usual size first, and c belongs to that: the scale of a GradScaler can be so
    large that squares overflow. Looks at the numbers, so not for a busy GPU.
    """
    found, expected, sizes, unit = _probe(members)
    tolerance = rounding(members[0].record)
    plain = ((found - unit * expected).abs() <= tolerance * unit * sizes).all(-1).all(-1).tolist()
    factors: list[float | Tensor | None] = []
    for rows, is_plain in zip(members, plain, strict=True):
        factor: float | Tensor | None = 1.0
        if not is_plain:
            rows.bring_to_usual_size()
            X, dZ = rows.whole(), rows.output_grads
            gradient = gradient_matrix(rows.record).to(X.dtype)
            factor = multiple(gradient, dZ.mT @ X, tolerance * X.norm() * dZ.norm())
        if factor is not None:
            rows.record.verified = True
        factors.append(factor)
    return factors


def factors_on_device(members: list[InputMatrix]) -> tuple[Tensor, Tensor, Tensor]:
    """The same without looking.

    Returns:
        ``[records]`` each: the factors, whether there is none, and numbers that are NaN or inf where any was met.
    """
    found, expected, sizes, unit = _probe(members)
    squared = expected.square().sum((-2, -1), keepdim=True)
    factors = torch.where(squared > 0, (found * expected).sum((-2, -1), keepdim=True) / squared, unit)
    tolerance = rounding(members[0].record) * factors.abs() * sizes
    edited = ((found - factors * expected).abs() > tolerance).float().mean((-2, -1)) > 0.5
    return (factors / unit)[:, 0, 0], edited, found.sum((-2, -1))


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


def _probe(members: list[InputMatrix]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``u G v`` and ``(u ΔZᵀ) · (v Xᵀ)`` for a few random u and v, which agree if ``G = ΔZᵀX``, and sizes for rounding.

    Each is ``[members, groups, probes]``. G is read once, while computing ``ΔZᵀX`` again would cost as much as
    backpropagation. All but the first are in a unit, ``[members, 1, 1]``, which is returned as well: the scale of a
    GradScaler can be so large that products overflow.
    """
    products = [_products(rows.record, rows) for rows in members]
    left, right, found = (torch.stack(parts) for parts in zip(*products, strict=True))
    unit = left.new_ones(len(members), 1, 1)
    if left.numel() > 0:
        unit = left.abs().amax((-2, -1)).amax(-1)[:, None, None].clamp(min=torch.finfo(left.dtype).tiny)
    left = left / unit[..., None]
    return found, (left * right).sum(-1), vector_norm(left, dim=-1) * vector_norm(right, dim=-1), unit


def _products(record: Record, rows: InputMatrix) -> tuple[Tensor, Tensor, Tensor]:
    """``u ΔZᵀ`` and ``v Xᵀ``, ``[groups, probes, rows]``, and ``u G v``, ``[groups, probes]``.

    The columns of the biases, X's and G's, are multiplied apart: to join them to the others would copy all of both.
    """
    X, dZ = rows.features, rows.output_grads
    u = _signs(dZ.shape[-1], dZ)
    left = _times_transposed(u, dZ)
    if X is not None and record.weight.grad is not None:
        v = _signs(X.shape[-1], X)
        right = _times_transposed(v, X)
        found = _times_transposed(v, weight_matrix(record.layer, record.weight.grad).to(X.dtype))
    else:
        right, found = torch.zeros_like(left), torch.zeros_like(u)
    for place, (bias, ones) in enumerate(rows.bias_columns()):
        assert bias.grad is not None
        column: Tensor | float = bias.grad.view(len(dZ), 1, -1).to(dZ.dtype)
        if isinstance(ones, Tensor):
            ones = ones.mT
        if place > 0:  # the usual only one needs no sign
            sign = _signs(place, dZ)[:, -1:]
            column, ones = column * sign, ones * sign
        found, right = found + column, right + ones
    return left, right, (found * u).sum(-1)


def _times_transposed(signs: Tensor, matrices: Tensor) -> Tensor:
    """``signs @ matrices.mT``; of the usual one matrix in half of the calls."""
    return torch.mm(signs, matrices[0].mT)[None] if matrices.shape[0] == 1 else signs @ matrices.mT


def _signs(size: int, like: Tensor) -> Tensor:
    return _random_signs(size, like.dtype, like.device)


@lru_cache(maxsize=256)
def _random_signs(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``[probes, size]``, of 1 and −1."""
    generator = torch.Generator("cpu").manual_seed(size)  # not the user's random numbers
    return (torch.randint(0, 2, (PROBES, size), generator=generator, device="cpu") * 2 - 1).to(device, dtype)
