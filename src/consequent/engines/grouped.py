"""The sample side of many dense layers at once, with a few calls for each: what a small batch costs is mostly calls.

The same mathematics as in :mod:`consequent.engines.plain`, which takes whatever is not the usual case: a layer called
once, its gradient what its inputs explain, a matrix that can be factorised with digits to spare.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from consequent.capture.edits import factors_of_gradients
from consequent.capture.records import Record
from consequent.capture.torch_internals import answers_at_once
from consequent.engines.engine import Work, WritesOneByOne
from consequent.maths.damping import Damping
from consequent.maths.ridge import keeps_digits
from consequent.statistics.gradients import change_of, trace_of
from consequent.statistics.row_matrices import RowMatrices, energy_of
from consequent.statistics.rows import Rows
from consequent.statistics.solution import Solution

FEWEST = 2  # layers; one alone gains nothing


class Grouped(WritesOneByOne):
    """Takes the usual case on the CPU, in groups of equal batch size."""

    def solve(self, works: Sequence[Work]) -> list[Solution]:
        """Solutions for those of the works that are the usual case."""
        groups: dict[tuple[int, bool, torch.dtype, Damping, float], list[tuple[Record, RowMatrices]]] = {}
        for record, damping, _, scale, _ in works:
            rows = record.statistic
            if not isinstance(rows, Rows) or not _is_usual(record) or damping.value == 0:
                continue
            use = record.first_use
            key = (use.rows, use.bias is not None, use.dtype, damping, scale)
            groups.setdefault(key, []).append((record, rows.matrices()))
        solutions = []
        for (count, has_bias, dtype, damping, scale), matrices in groups.items():
            if len(matrices) < FEWEST:
                continue
            factors = factors_of_gradients(matrices)
            members = [
                _Member(*pair, factor) for pair, factor in zip(matrices, factors, strict=True) if factor is not None
            ]
            if members:
                constant = torch.full((count, count), float(has_bias), dtype=dtype, device="cpu")
                if not damping.relative:
                    constant.diagonal().add_(damping.value)
                solved = _solutions_of_group(members, constant, damping)
                solutions += [replace(solution, scale=scale) for solution in solved]
        return solutions


class _Member(NamedTuple):
    """A layer of a group."""

    record: Record
    rows: RowMatrices
    factor: float | Tensor  # by which its gradient differs from ΔZᵀX


def _is_usual(record: Record) -> bool:
    if len(record.uses) != 1 or record.beside:
        return False
    use = record.uses[0]
    return (
        use.operation.is_dense
        and answers_at_once(record.weight)
        and use.inputs is not None
        and use.rows > 0
        and use.dtype in (torch.float32, torch.float64)
        and use.dtype == record.weight.dtype
        and record.weight.grad is not None
        and all(bias.grad is not None for bias in record.biases)
    )


def _solutions_of_group(members: list[_Member], constant: Tensor, damping: Damping) -> list[Solution]:
    """Solve for members of one batch size.

    Args:
        members: the layers.
        constant: what ``X Xᵀ`` of the features lacks: the ones of a bias, and λ on the diagonal if it is absolute.
        damping: λ.
    """
    damped = constant.new_empty(len(members), *constant.shape)
    levels = [] if damping.relative else [damping.value] * len(members)
    for target, member in zip(damped.unbind(), members, strict=True):
        assert member.rows.features is not None
        X = member.rows.features[0]
        torch.addmm(constant, X, X.mT, out=target)
        if damping.relative:
            level = damping.level(*member.rows.size).at(target.trace()).item()
            target.diagonal().add_(level)
            levels.append(level)
    factors, info = torch.linalg.cholesky_ex(damped)
    good = keeps_digits(damped, factors).logical_and_(info == 0).tolist()
    identity = torch.eye(len(constant), dtype=constant.dtype, device="cpu")
    inverses = torch.linalg.solve_triangular(factors, identity, upper=False)
    solutions = []
    traces = trace_of(damped).tolist()
    for (record, rows, factor), inverse, is_good, level, trace in zip(
        members, inverses.unbind(), good, levels, traces, strict=True
    ):
        if not is_good:
            continue
        coefficients = inverse.mT @ (inverse @ rows.output_grads[0])
        energy = energy_of(coefficients, rows.output_grads[0], level).item()
        if factor != 1.0:
            coefficients *= factor
            energy *= float(factor) ** 2
        finite = math.isfinite(coefficients.sum().item())
        change = change_of(record, energy, trace - len(constant) * level)
        solutions.append(Solution(record, "samples", finite, coefficients=coefficients[None], rows=rows, change=change))
    return solutions
