"""The sample side of many dense layers at once, with a few calls for each: what a small batch costs is mostly calls.

The same mathematics as in :mod:`consequent.update`, which takes whatever is not the usual case: a layer called once,
its gradient what its inputs explain, a matrix that can be factorised with digits to spare.
"""

import math
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from consequent import layers
from consequent.explained import factors_of_gradients
from consequent.input_matrix import InputMatrix
from consequent.record import Record
from consequent.ridge import keeps_digits
from consequent.settings import Damping
from consequent.update import Update

FEWEST = 2  # layers; one alone gains nothing


def updates_together(records: Iterable[Record], damping_of: Callable[[Record], Damping]) -> list[Update]:
    """Updates for those of the records that are the usual case, in groups of equal batch size.

    Args:
        records: on a device that may be waited for.
        damping_of: λ for a record.
    """
    groups: dict[tuple[int, bool, torch.dtype, Damping], list[InputMatrix]] = {}
    for record in records:
        use = record.uses[0] if _is_usual(record) else None
        damping = None if use is None else damping_of(record)
        if use is None or damping is None or damping.value == 0 or damping.relative:
            continue
        groups.setdefault((use.rows, use.bias is not None, use.dtype, damping), []).append(InputMatrix.of(record))
    updates = []
    for (count, has_bias, dtype, damping), matrices in groups.items():
        if len(matrices) < FEWEST:
            continue
        factors = factors_of_gradients(matrices)
        members = [_Member(rows, factor) for rows, factor in zip(matrices, factors, strict=True) if factor is not None]
        if members:
            updates += _updates_of_group(members, _added_to_products(count, damping.value, has_bias, dtype))
    return updates


class _Member(NamedTuple):
    """A layer of a group."""

    rows: InputMatrix
    factor: float | Tensor  # by which its gradient differs from ΔZᵀX


def _is_usual(record: Record) -> bool:
    if len(record.uses) != 1 or record.is_reduced:
        return False
    use = record.uses[0]
    return (
        layers.is_dense(record.layer)
        and use.inputs is not None
        and use.rows > 0
        and use.dtype in (torch.float32, torch.float64)
        and use.dtype == record.weight.dtype
        and record.weight.grad is not None
        and all(bias.grad is not None for bias in record.biases)
    )


@lru_cache(maxsize=64)
def _added_to_products(rows: int, damping: float, has_bias: bool, dtype: torch.dtype) -> Tensor:
    """What ``X Xᵀ`` of the features lacks: the ones of a bias, and λ on the diagonal."""
    return torch.eye(rows, dtype=dtype, device="cpu") * damping + float(has_bias)


def _updates_of_group(members: list[_Member], constant: Tensor) -> list[Update]:
    damped = constant.new_empty(len(members), *constant.shape)
    for target, member in zip(damped.unbind(), members, strict=True):
        assert member.rows.features is not None
        X = member.rows.features[0]
        torch.addmm(constant, X, X.mT, out=target)
    factors, info = torch.linalg.cholesky_ex(damped)
    good = keeps_digits(damped, factors).logical_and_(info == 0).tolist()
    identity = _added_to_products(len(constant), 1.0, False, constant.dtype)
    inverses = torch.linalg.solve_triangular(factors, identity, upper=False)
    updates = []
    for (rows, factor), inverse, is_good in zip(members, inverses.unbind(), good, strict=True):
        if not is_good:
            continue
        coefficients = inverse.mT @ (inverse @ rows.output_grads[0])
        if factor != 1.0:
            coefficients *= factor
        finite = math.isfinite(coefficients.sum().item())
        updates.append(Update(rows.record, "samples", finite, coefficients=coefficients[None], rows=rows))
    return updates
