"""The sample side of many dense layers at once, with a few calls for each: what a small batch costs is mostly calls.

The same mathematics as in :mod:`consequent.update`, which takes whatever is not the usual case: a layer called once,
its gradient as backpropagation left it, a matrix that can be factorised with digits to spare.
"""

import math
from collections.abc import Callable, Iterable
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm

from consequent.explained import factor_of_gradient
from consequent.input_matrix import InputMatrix
from consequent.record import Record
from consequent.ridge import leaves_few_digits
from consequent.settings import Damping
from consequent.update import Update

FEWEST = 2  # layers; one alone gains nothing


def updates_together(records: Iterable[Record], damping_of: Callable[[Tensor], Damping], turn: int) -> list[Update]:
    """Updates for those of the records that are the usual case, in groups of equal batch size.

    Args:
        records: on a device that may be waited for.
        damping_of: λ for a parameter.
        turn: the number of the step. A scale that left no trace in the gradients (``GradScaler.unscale_``) is looked
            for in one layer of each group, another one in each step: it would be in all of them.
    """
    groups: dict[tuple[int, bool, torch.dtype, Damping], list[Record]] = {}
    for record in records:
        if _is_usual(record):
            use = record.uses[0]
            damping = damping_of(use.key)
            if damping.value > 0 and not damping.relative:
                groups.setdefault((use.rows, use.bias is not None, use.dtype, damping), []).append(record)
    updates = []
    for (rows, has_bias, dtype, damping), members in groups.items():
        if len(members) >= FEWEST and _is_plain(members[turn % len(members)], has_bias):
            constant = _added_to_products(rows, damping.value, has_bias, dtype)
            updates += _updates_of_group(members, constant)
    return updates


def _is_usual(record: Record) -> bool:
    if len(record.uses) != 1 or record.moment is not None or not record.verified:
        return False
    use, grad = record.uses[0], record.weight.grad
    return (
        isinstance(record.layer, nn.Linear)
        and use.inputs is not None
        and use.rows > 0
        and use.dtype in (torch.float32, torch.float64)
        and use.dtype == record.weight.dtype
        and grad is not None
        and all(bias.grad is not None for bias in record.biases)
        and record.is_untouched()
    )


def _is_plain(record: Record, has_bias: bool) -> bool:
    rows = InputMatrix.of(record)
    assert rows.features is not None
    squared_inputs = vector_norm(rows.features).square() + rows.features.shape[1] * has_bias
    return bool(factor_of_gradient(record, rows, squared_inputs) == 1.0)


@lru_cache(maxsize=64)
def _added_to_products(rows: int, damping: float, has_bias: bool, dtype: torch.dtype) -> Tensor:
    """What ``X Xᵀ`` of the features lacks: the ones of a bias, and λ on the diagonal."""
    return torch.eye(rows, dtype=dtype) * damping + float(has_bias)


def _updates_of_group(records: list[Record], constant: Tensor) -> list[Update]:
    matrices = [InputMatrix.of(record) for record in records]
    damped = constant.new_empty(len(records), *constant.shape)
    for target, matrix in zip(damped.unbind(), matrices, strict=True):
        assert matrix.features is not None
        X = matrix.features[0]
        torch.addmm(constant, X, X.mT, out=target)
    factors, info = torch.linalg.cholesky_ex(damped)
    doubtful = leaves_few_digits(damped, factors).logical_or_(info != 0).tolist()
    inverses = torch.linalg.solve_triangular(factors, torch.eye(len(constant), dtype=constant.dtype), upper=False)
    updates = []
    for record, matrix, inverse, is_doubtful in zip(records, matrices, inverses.unbind(), doubtful, strict=True):
        if is_doubtful:
            continue
        coefficients = inverse.mT @ (inverse @ matrix.output_grads[0])
        finite = math.isfinite(coefficients.sum().item())
        updates.append(Update(record, "samples", finite, coefficients=coefficients[None], rows=matrix))
    return updates
