"""From a record of a weight's inputs, and the gradient in ``.grad``, to its consequentialist gradient."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from consequent import layers
from consequent.explained import factors_of_gradients, is_explained
from consequent.input_matrix import InputMatrix, columns_with_gradient, gradient_matrix, split, trained
from consequent.inverse_factor import inverse_factor
from consequent.record import Record
from consequent.ridge import correct_any_gradient, damped_solve_or_fall_back, quick_solve
from consequent.settings import Damping


@dataclass
class Update:
    """New gradients for a weight and its biases, not yet written."""

    record: Record
    side: str
    finite: bool | Tensor  # whether no NaN or inf was met
    gradient: Tensor | None = None  # [groups, out_features, columns]; or, on the sample side,
    coefficients: Tensor | None = None  # [groups, rows, out_features] of
    rows: InputMatrix | None = None  # these rows
    kept: Tensor | None = None  # [groups]: what the old gradient is multiplied by and added; None: it is dropped
    rescued: int | Tensor = 0  # factorisations that needed float64, or more damping
    fallen_back: int | Tensor = 0  # factorisations that failed: a shortened plain gradient instead
    edited: bool | Tensor = False  # the gradient in .grad is no multiple of ΔZᵀX
    foreign: bool = False  # and never was, in a layer whose class has a forward of its own

    def write(self, scale: float, finite: bool | Tensor) -> list[Tensor]:
        """Put the new gradients, times the scale, in the place of the old ones; zeros unless finite.

        Returns:
            the parameters that got a new gradient.
        """
        parameters = trained(self.record)
        if self.coefficients is not None and self.rows is not None:
            kept = None if self.kept is None else self.kept * scale
            self.rows.combine_into_gradients(self.coefficients.mul_(scale), kept)
            if finite is not True:
                for parameter in parameters:
                    assert parameter.grad is not None
                    parameter.grad.masked_fill_(~_on(finite, parameter.grad), 0)
            return parameters
        assert self.gradient is not None
        for parameter, gradient in zip(parameters, split(self.record, self.gradient), strict=True):
            assert parameter.grad is not None
            scaled = gradient * scale
            parameter.grad.copy_(scaled if finite is True else torch.where(_on(finite, scaled), scaled, 0))
        return parameters


def consequentialist_update(record: Record, damping: Damping, *, may_wait: bool) -> Update:
    """The consequentialist gradient for what is in ``.grad`` of the record's parameters now.

    Args:
        record: what was captured for that gradient.
        damping: λ.
        may_wait: whether the host may wait for the device to look at a result.
    """
    known = record.verified
    if not record.is_reduced:
        update = _on_sample_side(record, damping)
    else:
        if record.uses:
            record.reduce(keep_rows=True)
        update = _on_feature_side(record, damping, may_wait=may_wait)
    update.foreign = update.edited is True and not known and layers.overrides_forward(record.layer)
    return update


def _on_feature_side(record: Record, damping: Damping, *, may_wait: bool) -> Update:
    """``G (XᵀX + λI)⁻¹``: takes the gradient as it is, scaled, clipped or averaged over ranks."""
    moment = record.moment
    if moment is None:
        return _by_a_factor_alone(record, damping)
    columns = columns_with_gradient(record)
    if len(columns) < record.columns:
        index = torch.tensor(columns, device=moment.device)
        moment = moment[:, index[:, None], index]
    gradient = gradient_matrix(record).to(moment.dtype)
    trace = moment.diagonal(dim1=-2, dim2=-1).sum(-1)
    finite = (trace.sum() + gradient.sum()).isfinite()
    if may_wait and not finite:
        return Update(record, "features", finite, gradient)
    if damping.value == 0:  # λ was set to 0 after the rows were reduced
        pseudo_inverse = torch.linalg.pinv(moment.double(), hermitian=True)
        return Update(record, "features", finite, (gradient.double() @ pseudo_inverse).to(gradient.dtype))
    level = damping.absolute(trace, record.rows)
    edited = not is_explained(record)
    if may_wait:
        # Overwrites the moment, which nobody needs after this. What it has lost in digits is not to be had from it.
        solution = quick_solve(moment, gradient.mT, level, with_digits=False)
        if solution is not None:
            return Update(record, "features", math.isfinite(solution.sum().item()), solution.mT, edited=edited)
        moment.diagonal(dim1=-2, dim2=-1).sub_(level[..., 0] if isinstance(level, Tensor) else level)
        solution, rescued, fallen_back = damped_solve_or_fall_back(moment, gradient.mT, level)
        finite = finite & solution.sum().isfinite()
        return Update(record, "features", finite, solution.mT, rescued=rescued, fallen_back=fallen_back, edited=edited)
    factor = record.factor_for(damping) if len(columns) == record.columns else None  # otherwise of another matrix
    solution, more_damped, failures = (factor or inverse_factor(moment, level)).solve(gradient.mT)
    finite = finite & solution.sum().isfinite()
    return Update(record, "features", finite, solution.mT, rescued=more_damped, fallen_back=failures, edited=edited)


def _by_a_factor_alone(record: Record, damping: Damping) -> Update:
    """The same with the factor of the moment that another rank made, and looked at if it may be waited for."""
    if record.cholesky is not None:
        gradient = gradient_matrix(record).to(record.cholesky.dtype)
        solution = torch.cholesky_solve(gradient.mT, record.cholesky)
        return Update(record, "features", math.isfinite(solution.sum().item()), solution.mT)
    factor = record.factor_for(damping)
    assert factor is not None
    gradient = gradient_matrix(record).to(factor.inverse.dtype)
    solution, more_damped, failures = factor.solve(gradient.mT)
    finite = (factor.status[..., 0].sum() + gradient.sum() + solution.sum()).isfinite()
    return Update(record, "features", finite, solution.mT, rescued=more_damped, fallen_back=failures)


def _on_sample_side(record: Record, damping: Damping) -> Update:
    """``ΔZᵀ (X Xᵀ + λI)⁻¹ X``, times the factor by which the gradient in ``.grad`` differs from ``ΔZᵀX``.

    Looks at the numbers. A GPU that is not waited for has :mod:`consequent.on_device`.
    """
    rows = InputMatrix.of(record)
    gram = rows.gram()
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    level = damping.absolute(trace, record.rows)
    (factor,) = factors_of_gradients([rows])
    dZ = rows.output_grads
    if factor is None:
        X = rows.whole()
        gradient = correct_any_gradient(gradient_matrix(record).to(X.dtype), X, level)
        return Update(record, "samples", gradient.sum().isfinite(), gradient, edited=True)
    if damping.value == 0:
        finite = math.isfinite(trace.sum() + dZ.sum() + factor)
        X = rows.whole()
        gradient = (torch.linalg.pinv(X) @ dZ).mT * factor if finite else torch.zeros_like(dZ.mT @ X)
        return Update(record, "samples", finite, gradient)
    coefficients = quick_solve(gram, dZ, level, with_digits=True)
    rescued = fallen_back = 0
    if coefficients is None and trace.isfinite().all():
        rows = rows.double()  # they are still there: in float64 the answer is free of float32's rounding
        coefficients, rescued, fallen_back = damped_solve_or_fall_back(rows.gram(), rows.output_grads, level)
        if dZ.dtype != torch.float64:
            rescued = len(gram) - fallen_back
    if coefficients is None:
        return Update(record, "samples", False)
    if factor != 1.0:
        coefficients *= factor
    finite = math.isfinite(coefficients.sum().item())
    return Update(
        record, "samples", finite, coefficients=coefficients, rows=rows, rescued=rescued, fallen_back=fallen_back
    )


def _on(flag: bool | Tensor, like: Tensor) -> Tensor:
    assert isinstance(flag, Tensor)
    return flag.to(like.device)
