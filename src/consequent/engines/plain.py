"""One weight after the other, in plain torch: the definition that all other engines are tested against."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from consequent.capture.edits import factors_of_gradients
from consequent.capture.records import Record
from consequent.engines.solution import Solution, Work
from consequent.maths.damping import Damping
from consequent.statistics.gradients import (
    columns_with_gradient,
    gradient_matrix,
    other_matrix,
    transposed_matrix,
)
from consequent.statistics.moment import solve_with_moment
from consequent.statistics.rows import Rows

SAME = 1e3  # in units of eps: how far rounding may take the signature of a scaled gradient


class Plain:
    """Takes everything."""

    def solve(self, works: Sequence[Work]) -> list[Solution]:
        """A solution for each work."""
        return [consequentialist_gradient(*work) for work in works]


def consequentialist_gradient(record: Record, damping: Damping, may_wait: bool) -> Solution:
    """The consequentialist gradient for what is in ``.grad`` of the record's parameters now.

    Args:
        record: what was captured for that gradient.
        damping: λ.
        may_wait: whether the host may wait for the device to look at a result.
    """
    is_mixed = bool(record.others) or record.transposed is not None
    if not record.is_reduced and (may_wait or not is_mixed):
        return _on_sample_side(record, damping)
    if record.uses:
        record.reduce(keep_rows=True)
    return _on_feature_side(record, damping, may_wait=may_wait)


def rows_of(record: Record) -> Rows:
    """The rows of a record, with a column for each parameter that has a gradient."""
    biases = [bias for bias in record.biases if bias.grad is not None]
    return Rows(record.uses, biases, with_features=record.features > 0 and record.weight.grad is not None)


def _on_feature_side(record: Record, damping: Damping, *, may_wait: bool) -> Solution:
    """``G (XXᵀ + λI)⁻¹``: takes the gradient as it is, scaled, clipped or averaged over ranks."""
    moment = record.moment
    if moment is None:
        return _by_a_factor_alone(record, damping)
    columns = columns_with_gradient(record)
    if len(columns) < record.columns:
        index = torch.tensor(columns, device=moment.device)
        moment = moment[:, index[:, None], index]
    gradient = gradient_matrix(record).to(moment.dtype)
    apart = _apart(record, damping, _trace(moment), may_wait=may_wait)
    factor = record.factor_for(damping) if len(columns) == record.columns else None  # otherwise of another matrix
    explained = gradient if apart is None else gradient - apart.all
    solved = solve_with_moment(moment, explained, record.rows, damping, may_wait=may_wait, factor=factor)
    gradient = solved.gradient if apart is None or apart.shortened is None else solved.gradient + apart.shortened
    others = None if apart is None else apart.others
    return Solution(
        record,
        "features",
        solved.finite,
        gradient,
        others=others,
        rescued=solved.rescued,
        fallen_back=solved.fallen_back,
    )


class _Apart(NamedTuple):
    """Parts of a gradient that do not come from the layer's rows, ``[groups, out_features, columns]`` each.

    Attributes:
        all: all of them, as they are in ``.grad`` now.
        others: those that stay as they are: penalties on the weight, uses of it outside of the layer.
        shortened: those from ``Wᵀ ΔZ``, which the weight acted in, too, made so short that they cannot overshoot.
    """

    all: Tensor
    others: Tensor | None
    shortened: Tensor | None


def _apart(record: Record, damping: Damping, trace: Tensor, *, may_wait: bool) -> _Apart | None:
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
    if transposed is not None and record.transposed is not None:
        transposed = transposed.to(dtype) * factor
        level = damping.level(record.rows, record.columns).at(trace)
        bound = ((trace + level)[:, None, None] + record.transposed).clamp(min=torch.finfo(dtype).tiny)
        shortened = transposed / bound
    parts = [part for part in (others, transposed) if part is not None]
    return _Apart(parts[0] if len(parts) == 1 else parts[0] + parts[1], others, shortened)


def factor_since(record: Record, *, may_wait: bool) -> Tensor | None:
    """By what the gradient was scaled since the backward pass; None where it was edited, as far as one may look."""
    scaled = record.scaled_by()
    if scaled is None or (may_wait and bool(scaled[1] > SAME)):
        return None
    return scaled[0]


def _trace(matrix: Tensor) -> Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1).sum(-1)


def _by_a_factor_alone(record: Record, damping: Damping) -> Solution:
    """The same with the factor of the moment that another rank made, and looked at if it may be waited for."""
    if record.cholesky is not None:
        gradient = gradient_matrix(record).to(record.cholesky.dtype)
        solution = torch.cholesky_solve(gradient.mT, record.cholesky)
        return Solution(record, "features", math.isfinite(solution.sum().item()), solution.mT)
    factor = record.factor_for(damping)
    assert factor is not None
    gradient = gradient_matrix(record).to(factor.inverse.dtype)
    solution, more_damped, failures = factor.solve(gradient.mT)
    finite = (factor.status[..., 0].sum() + gradient.sum() + solution.sum()).isfinite()
    return Solution(record, "features", finite, solution.mT, rescued=more_damped, fallen_back=failures)


def _on_sample_side(record: Record, damping: Damping) -> Solution:
    """``ΔZᵀ (X Xᵀ + λI)⁻¹ X``, times the factor by which the gradient in ``.grad`` differs from ``ΔZᵀX``.

    Looks at the numbers. A GPU that is not waited for has :mod:`consequent.engines.unwatched`.
    """
    rows = rows_of(record)
    (factor,) = factors_of_gradients([(record, rows)])
    if factor is None:
        return _shortened(record, rows, damping)
    apart = None
    if record.others or record.transposed is not None:
        apart = _apart(record, damping, _trace(rows.gram()), may_wait=True)
    others, shortened = (None, None) if apart is None else (apart.others, apart.shortened)
    if damping.value == 0:
        X, dZ = rows.whole(), rows.output_grads
        finite = math.isfinite(X.sum() + dZ.sum() + factor)
        gradient = (torch.linalg.pinv(X) @ dZ).mT * factor if finite else torch.zeros_like(dZ.mT @ X)
        return Solution(record, "samples", finite, _plus(gradient, shortened), others=others)
    values, is_finite, rescued, fallen_back, _ = rows.solve(damping, may_wait=True)
    if values is None:
        return Solution(record, "samples", False)
    if factor != 1.0:
        values *= factor
    solution = Solution(
        record,
        "samples",
        bool(is_finite) and math.isfinite(factor),
        others=others,
        rescued=rescued,
        fallen_back=fallen_back,
    )
    if shortened is None:
        solution.coefficients, solution.rows = values, rows
    else:
        solution.gradient = values.mT @ rows.whole() + shortened
    return solution


def _plus(gradient: Tensor, more: Tensor | None) -> Tensor:
    return gradient if more is None else gradient + more


def _shortened(record: Record, rows: Rows, damping: Damping) -> Solution:
    """What a gradient gets that its rows do not explain: it stays, shortened until it cannot overshoot.

    All eigenvalues of ``XXᵀ / (λ + trace)`` are below 1.
    """
    gram = rows.gram()
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    level = damping.level(*rows.size)(gram)
    gradient = gradient_matrix(record).to(gram.dtype) / (trace + level).clamp(min=torch.finfo(gram.dtype).tiny)
    return Solution(record, "samples", bool(gradient.sum().isfinite()), gradient, edited=True)
