"""The second moment of a weight's inputs, ``X Xᵀ`` in the paper: what the feature side solves with."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from consequent.capture.use import Use
from consequent.engines.inverse_factor import InverseFactor, inverse_factor
from consequent.maths.damping import Damping
from consequent.maths.precision import in_full_precision
from consequent.maths.ridge import damped_solve_or_fall_back, quick_solve
from consequent.statistics.gradients import (
    Apart,
    apart_from_rows,
    change_of,
    columns_with_gradient,
    dot,
    gradient_matrix,
    trace_of,
)
from consequent.statistics.solution import Solution
from consequent.statistics.statistic import Statistic, with_bias_of

if TYPE_CHECKING:
    from consequent.capture.records import Record


@dataclass(frozen=True, eq=False)
class Moment(Statistic):
    """The second moment of all uses' inputs, which needs no more memory however many rows there are.

    Attributes:
        matrix: ``[groups, columns, columns]``, ``XXᵀ`` in the paper, in float32 or better.
        factor: of the matrix plus this λ, if it was factorised already.
    """

    matrix: Tensor
    factor: tuple[Damping, InverseFactor] | None = None

    @classmethod
    def of(cls, uses: Sequence[Use], features: int, biases: Sequence[Tensor]) -> "Moment":
        """That of uses whose inputs are known."""
        matrix = moment_of(uses, features, biases)
        return cls(tuple(uses), features, tuple(biases), sum(use.rows for use in uses), matrix)

    @in_full_precision
    def add(self, use: Use) -> "Moment":
        """With one use more, whose inputs are not needed any longer. The matrix may be overwritten."""
        biases = with_bias_of(use, self.biases)
        matrix = moment_of([use], self.features, biases, self.matrix)
        return Moment((*self.uses, use), self.features, biases, self.rows + use.rows, matrix)

    def with_biases(self, biases: Sequence[Tensor]) -> "Moment":
        """With columns for these biases, in this order; those that no use had are zero."""
        if len(biases) == len(self.biases) and all(map(is_, biases, self.biases)):
            return self
        size = self.features + len(biases)
        place = {bias: self.features + number for number, bias in enumerate(biases)}
        index = torch.tensor([*range(self.features), *(place[b] for b in self.biases)], device=self.matrix.device)
        matrix = self.matrix.new_zeros(len(self.matrix), size, size)
        matrix[:, index[:, None], index] = self.matrix
        return Moment(self.uses, self.features, tuple(biases), self.rows, matrix)

    def factor_for(self, damping: Damping) -> InverseFactor | None:
        """The factor of the matrix plus this λ, if it was made already."""
        return self.factor[1] if self.factor is not None and self.factor[0] == damping else None

    def solve(self, record: "Record", damping: Damping, *, may_wait: bool) -> Solution:
        """``G (XXᵀ + λI)⁻¹``: takes the gradient as it is, scaled, clipped or averaged over ranks."""
        matrix, columns = self.matrix, columns_with_gradient(record)
        if len(columns) < self.columns:
            index = torch.tensor(columns, device=matrix.device)
            matrix = matrix[:, index[:, None], index]
        gradient = gradient_matrix(record).to(matrix.dtype)
        apart = apart_from_rows(record, damping, trace_of(matrix), may_wait=may_wait) if record.beside else None
        factor = self.factor_for(damping) if len(columns) == self.columns else None  # otherwise of another matrix
        trace = trace_of(matrix).sum()
        explained = gradient if apart is None else gradient - apart.all
        solved = solve_with_moment(matrix, explained, self.rows, damping, may_wait=may_wait, factor=factor)
        return joined(record, gradient, solved, apart, trace)


@dataclass(frozen=True, eq=False)
class Factor(Statistic):
    """The factor of a moment that another rank made.

    Attributes:
        inverse: of the moment plus this λ, where the host may not look;
        cholesky: ``[groups, columns, columns]``, L of it, where it may.
    """

    inverse: tuple[Damping, InverseFactor] | None = None
    cholesky: Tensor | None = None

    def add(self, use: Use) -> "Statistic":
        """Does not happen: factors come from other ranks when all uses have been added."""
        raise NotImplementedError

    def factor_for(self, damping: Damping) -> InverseFactor | None:
        """The inverse factor, if it is one for this λ."""
        return self.inverse[1] if self.inverse is not None and self.inverse[0] == damping else None

    def solve(self, record: "Record", damping: Damping, *, may_wait: bool) -> Solution:
        """``G (XXᵀ + λI)⁻¹`` by the factor."""
        if self.cholesky is not None:
            gradient = gradient_matrix(record).to(self.cholesky.dtype)
            solution = torch.cholesky_solve(gradient.mT, self.cholesky)
            squared = self.cholesky.square().sum()  # the trace of the moment plus λ times its size
            level = damping.level(self.rows, self.columns)
            size = self.columns * len(self.cholesky)
            trace = squared / (1 + level.value * self.columns) if level.of_trace else squared - level.value * size
            change = change_of(record, dot(solution.mT, gradient), trace)
            return Solution(record, "features", math.isfinite(solution.sum().item()), solution.mT, change=change)
        factor = self.factor_for(damping)
        assert factor is not None
        gradient = gradient_matrix(record).to(factor.inverse.dtype)
        traces = factor.status[..., 0]
        apart = apart_from_rows(record, damping, traces, may_wait=may_wait) if record.beside else None
        solution, more_damped, failures = factor.solve((gradient if apart is None else gradient - apart.all).mT)
        solved = Solved(solution.mT, (traces.sum() + gradient.sum() + solution.sum()).isfinite(), more_damped, failures)
        return joined(record, gradient, solved, apart, traces.sum())


def joined(record: "Record", gradient: Tensor, solved: "Solved", apart: Apart | None, trace: Tensor) -> Solution:
    """What was solved for, and the parts of the gradient that were not.

    Args:
        record: of the gradient.
        gradient: all that is in ``.grad``.
        solved: for what the rows explain of it.
        apart: the rest.
        trace: of ``XXᵀ``, of all groups together.
    """
    others = None
    if apart is not None:
        others, gradient = apart.others, gradient if apart.others is None else gradient - apart.others
        if apart.shortened is not None:
            solved = solved._replace(gradient=solved.gradient + apart.shortened)
    return Solution(
        record,
        "features",
        solved.finite,
        solved.gradient,
        others=others,
        rescued=solved.rescued,
        fallen_back=solved.fallen_back,
        change=change_of(record, dot(solved.gradient, gradient), trace),
    )


class Solved(NamedTuple):
    """``G (XXᵀ + λI)⁻¹``.

    Attributes:
        gradient: ``[groups, out_features, columns]``.
        finite: whether no NaN or inf was met: a bool, or a tensor on a device that is not waited for.
        rescued: matrices that needed float64, or more damping.
        fallen_back: matrices that could not be factorised even so.
    """

    gradient: Tensor
    finite: bool | Tensor
    rescued: int | Tensor = 0
    fallen_back: int | Tensor = 0


def columns_of(use: Use, features: int, biases: Sequence[Tensor]) -> list[int]:
    """The columns of the input matrix that a use fills: the features, and the 1 of its own bias."""
    columns = list(range(features))
    if use.bias is not None:
        columns += [features + place for place, bias in enumerate(biases) if bias is use.bias]
    return columns


def moment_of(uses: Sequence[Use], features: int, biases: Sequence[Tensor], moment: Tensor | None = None) -> Tensor:
    """The second moment of all uses' rows, ``[groups, D + biases, D + biases]``, in float32 or better.

    Args:
        uses: calls of layers with one weight.
        features: D; 0 where only biases are trained.
        biases: a last column of each, which is 1 in the rows of its own uses.
        moment: of other uses, which is added to (and may be overwritten).
    """
    size = features + len(biases)
    if moment is not None and moment.shape[-1] < size:  # a bias met for the first time
        grow = size - moment.shape[-1]
        moment = torch.nn.functional.pad(moment, (0, grow, 0, grow))
    for use in uses:
        columns = columns_of(use, features, biases)
        part = _moment_of_one(use)
        if len(columns) == size:
            moment = part if moment is None else moment.add_(part)
            continue
        if moment is None:
            moment = part.new_zeros(len(part), size, size)
        index = torch.tensor(columns, device=part.device)
        moment[:, index[:, None], index] += part
    assert moment is not None
    return moment


def _moment_of_one(use: Use) -> Tensor:
    if use.inputs is not None:
        return use.operation.second_moment(use.inputs, ones=use.bias is not None)
    assert use.bias is not None  # which alone is trained
    dtype = torch.promote_types(use.dtype, torch.float32)
    return torch.full((use.operation.groups, 1, 1), float(use.rows), dtype=dtype, device=use.bias.device)


def solve_with_moment(
    moment: Tensor,
    gradient: Tensor,
    rows: int,
    damping: Damping,
    *,
    may_wait: bool,
    factor: InverseFactor | None = None,
) -> Solved:
    """The definition: ``G (XXᵀ + λI)⁻¹``, for any gradient G, scaled, clipped or averaged as it may be.

    The moment may be overwritten.

    Args:
        moment: ``[groups, D, D]``.
        gradient: ``[groups, out_features, D]``.
        rows: of the inputs.
        damping: λ; 0 is the pseudo-inverse.
        may_wait: whether the host may wait for the device to look at a result.
        factor: of the damped moment, where it was made before; used where the host does not look.
    """
    trace = trace_of(moment)
    finite = (trace.sum() + gradient.sum()).isfinite()
    if may_wait and not finite:
        return Solved(gradient, False)
    level = damping.level(rows, moment.shape[-1])
    if damping.value == 0:
        pseudo_inverse = torch.linalg.pinv(moment.double(), hermitian=True)
        return Solved((gradient.double() @ pseudo_inverse).to(gradient.dtype), finite)
    if not may_wait:
        solution, rescued, fallen_back = (factor or inverse_factor(moment, level)).solve(gradient.mT)
        return Solved(solution.mT, finite & solution.sum().isfinite(), rescued, fallen_back)
    added = level(moment)
    quick = quick_solve(moment, gradient.mT, added, with_digits=False)
    if quick is not None:
        return Solved(quick.mT, math.isfinite(quick.sum().item()))
    moment.diagonal(dim1=-2, dim2=-1).sub_(added[..., 0] if isinstance(added, Tensor) else added)
    careful = damped_solve_or_fall_back(moment, gradient.mT, added)
    is_finite = bool(finite & careful.solution.sum().isfinite())
    return Solved(careful.solution.mT, is_finite, careful.rescued, careful.fallen_back)
