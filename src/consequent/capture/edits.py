"""Whether the gradient in ``.grad`` is the one that the captured rows explain, up to a factor.

The factor c with ``.grad = c ΔZᵀX`` is 1 straight after ``backward()``. The scale of a GradScaler, the average over
ranks and norm clipping change it; value clipping or a user's edit leave no such c. What came to the gradient otherwise
than from the layer's uses (a penalty in the loss) is known apart, and counts as explained.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.linalg import vector_norm

from consequent.maths.precision import tf32_is_allowed
from consequent.maths.probes import random_numbers
from consequent.statistics.row_matrices import RowMatrices

if TYPE_CHECKING:
    from consequent.capture.records import Record

# How far rounding may take ``u G v`` from what it should be, in units of eps and of the sizes that were added up.
_ROUNDINGS = 32


def factors_of_gradients(members: "list[tuple[Record, RowMatrices]]") -> list[float | Tensor | None]:
    """The scalars c with ``.grad = c ΔZᵀX``, for records with as many rows each; None where there is none.

    Where c is not 1, ΔZ is brought to a usual size first, and c belongs to that: the scale of a GradScaler can be so
    large that squares overflow. Looks at the numbers, so not for a busy GPU.
    """
    found, expected, sizes, unit = _probe(members)
    tolerance = rounding(members[0][0])
    plain = ((found - unit * expected).abs() <= tolerance * unit * sizes).all(-1).all(-1).tolist()
    factors: list[float | Tensor | None] = []
    for (record, rows), is_plain in zip(members, plain, strict=True):
        factor: float | Tensor | None = 1.0
        if not is_plain:
            factor = _factor_of(record, rows, rows.bring_to_usual_size(), tolerance)
        factors.append(factor)
    return factors


def factors_on_device(members: "list[tuple[Record, RowMatrices]]") -> tuple[Tensor, Tensor, Tensor]:
    """The same without looking.

    Returns:
        ``[records]`` each: the factors, whether there is none, and numbers that are NaN or inf where any was met.
    """
    return _factors(*_probe(members), rounding(members[0][0]))


def factors_of_products(left: Tensor, right: Tensor, found: Tensor, tolerance: float) -> tuple[Tensor, Tensor, Tensor]:
    """The same, from products with random numbers.

    Args:
        left: ``u ΔZᵀ``, ``[records, groups, probes, rows]``.
        right: ``v Xᵀ``, likewise.
        found: ``u G v``, ``[records, groups, probes]``.
        tolerance: how far rounding may take them apart.
    """
    return _factors(found, *_expected(left, right), tolerance)


def _factors(
    found: Tensor, expected: Tensor, sizes: Tensor, unit: Tensor, rounded: float
) -> tuple[Tensor, Tensor, Tensor]:
    squared = expected.square().sum((-2, -1), keepdim=True)
    factors = torch.where(squared > 0, (found * expected).sum((-2, -1), keepdim=True) / squared, unit)
    tolerance = rounded * factors.abs() * sizes
    edited = ((found - factors * expected).abs() > tolerance).float().mean((-2, -1)) > 0.5
    return (factors / unit)[:, 0, 0], edited, found.sum((-2, -1))


def _factor_of(record: "Record", rows: RowMatrices, size: Tensor, tolerance: float) -> Tensor | None:
    """The c of one record, whose ΔZ was divided by ``size``."""
    from consequent.statistics.gradients import gradient_matrix

    X, dZ = rows.whole(), rows.output_grads
    gradient = gradient_matrix(record).to(X.dtype)
    plain = dZ.mT @ X
    others = _others_of(record)
    if others is not None:
        plain = plain + others.to(X.dtype) / size
    level = tolerance * (X.norm() * dZ.norm() + plain.norm())
    factor = multiple(gradient, plain, level)
    if factor is None:
        half = _rounded_to(gradient)
        if half is not None:  # gradients were sent, or are kept, in half precision
            factor = multiple(gradient, plain, level + torch.finfo(half).eps * plain.norm())
    return factor


def _others_of(record: "Record") -> Tensor | None:
    """What is in the gradient besides ``ΔZᵀX``, ``[groups, out_features, columns]``."""
    from consequent.statistics.gradients import other_matrix, transposed_matrix

    parts = [part for part in (other_matrix(record), transposed_matrix(record)) if part is not None]
    return None if not parts else parts[0] if len(parts) == 1 else parts[0] + parts[1]


def _rounded_to(gradient: Tensor) -> torch.dtype | None:
    """The half precision that all numbers of a gradient are in, if there is one."""
    for dtype in (torch.bfloat16, torch.float16):
        if bool((gradient.to(dtype).to(gradient.dtype) == gradient).all()):
            return dtype
    return None


def multiple(gradient: Tensor, plain: Tensor, level: float | Tensor) -> Tensor | None:
    """The c with ``gradient = c · plain`` up to rounding, if there is one."""
    squared = plain.square().sum()
    factor = torch.where(squared > 0, (gradient * plain).sum() / squared, torch.ones_like(squared))
    residual = (gradient - factor * plain).norm()
    return factor if residual <= level * factor.abs() else None  # of NaN, nothing is a multiple


def rounding(record: "Record") -> float:
    """How far ``.grad`` may be from ``ΔZᵀX`` by rounding, in units of the sizes of what was added up."""
    dtype = record.first_use.dtype
    if dtype == torch.float32 and record.weight.is_cuda and tf32_is_allowed():
        return 2e-3
    if dtype.itemsize >= 4:
        return _ROUNDINGS * torch.finfo(dtype).eps
    return 2 * torch.finfo(dtype).eps


def _probe(members: "list[tuple[Record, RowMatrices]]") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``u G v`` and ``(u ΔZᵀ) · (v Xᵀ)`` for a few random u and v, which agree if ``G = ΔZᵀX``, and sizes for rounding.

    Each is ``[members, groups, probes]``. G is read once, while computing ``ΔZᵀX`` again would cost as much as
    backpropagation. All but the first are in a unit, ``[members, 1, 1]``, which is returned as well: the scale of a
    GradScaler can be so large that products overflow.
    """
    products = [_products(record, rows) for record, rows in members]
    left, right, found = (torch.stack(parts) for parts in list(zip(*products, strict=True))[:3])
    others = [product[3] for product in products]
    expected, sizes, unit = _expected(left, right)
    if any(other is not None for other in others):
        expected = expected + torch.stack([torch.zeros_like(found[0]) if o is None else o for o in others]) / unit
    return found, expected, sizes, unit


def _expected(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What ``u G v`` should be, sizes for rounding, and the unit that both are in."""
    unit = left.new_ones(len(left), 1, 1)
    if left.numel() > 0:
        unit = left.abs().amax((-2, -1)).amax(-1)[:, None, None].clamp(min=torch.finfo(left.dtype).tiny)
    left = left / unit[..., None]
    products_of_rows = left * right
    # Errors of the products of single rows add up like a walk at random.
    sizes = (
        vector_norm(products_of_rows, dim=-1)
        + vector_norm(left, dim=-1) * vector_norm(right, dim=-1) / max(left.shape[-1], 1) ** 0.5
    )
    return products_of_rows.sum(-1), sizes, unit


def _products(record: "Record", rows: RowMatrices) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """``u ΔZᵀ`` and ``v Xᵀ``, ``[groups, probes, rows]``, and ``u G v`` and ``u R v``, ``[groups, probes]``.

    R is what came to the gradient otherwise than from the rows, None if that is nothing. The columns of the biases,
    X's and G's, are multiplied apart: to join them to the others would copy all of both.
    """
    X, dZ = rows.features, rows.output_grads
    u = _numbers(dZ.shape[-1], dZ, 0)
    left = _times_transposed(u, dZ)
    others: Tensor | None = None
    if X is not None and record.weight.grad is not None:
        v = _numbers(X.shape[-1], X, 1)
        right = _times_transposed(v, X)
        found = _times_transposed(v, record.operation.weight_matrix(record.weight.grad).to(X.dtype))
        for other in (record.beside.others.get(record.weight), record.beside.from_transposed):
            if other is not None:
                others = _plus(others, _times_transposed(v, record.operation.weight_matrix(other).to(X.dtype)))
    else:
        right, found = torch.zeros_like(left), torch.zeros_like(u)
    for place, (bias, ones) in enumerate(rows.bias_columns()):
        assert bias.grad is not None
        column: Tensor | float = bias.grad.view(len(dZ), 1, -1).to(dZ.dtype)
        if isinstance(ones, Tensor):
            ones = ones.mT
        number: Tensor | float = 1.0  # the usual only one needs none
        if place > 0:
            number = _numbers(place + 1, dZ, 2)[:, -1:]
            column, ones = column * number, ones * number
        found, right = found + column, right + ones
        if bias in record.beside.others:
            others = _plus(others, record.beside.others[bias].view(len(dZ), 1, -1).to(dZ.dtype) * number)
    return left, right, (found * u).sum(-1), None if others is None else (others * u).sum(-1)


def _plus(total: Tensor | None, more: Tensor) -> Tensor:
    return more if total is None else total + more


def _times_transposed(numbers: Tensor, matrices: Tensor) -> Tensor:
    """``numbers @ matrices.mT``; of the usual one matrix in half of the calls."""
    return torch.mm(numbers, matrices[0].mT)[None] if matrices.shape[0] == 1 else numbers @ matrices.mT


def _numbers(size: int, like: Tensor, family: int) -> Tensor:
    return random_numbers(size, like.dtype, like.device, family)
