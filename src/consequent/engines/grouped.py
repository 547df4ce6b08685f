"""The sample side of many dense layers at once, with a few calls for each: what a small batch costs is mostly calls.

The same mathematics as in :mod:`consequent.engines.plain`, which takes whatever is not the usual case: a layer called
once, its gradient what its inputs explain, a matrix that can be factorised with digits to spare.
"""

import math
from collections.abc import Sequence
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
        groups: dict[tuple[int, bool, torch.dtype, Damping], list[tuple[Work, RowMatrices]]] = {}
        for work in works:
            rows = work.record.statistic
            if not isinstance(rows, Rows) or not _is_usual(work.record) or work.damping.value == 0:
                continue
            use = work.record.first_use
            key = (use.rows, use.bias is not None, use.dtype, work.damping)
            groups.setdefault(key, []).append((work, rows.matrices()))
        solutions = []
        for (count, has_bias, dtype, damping), pairs in groups.items():
            if len(pairs) < FEWEST:
                continue
            factors = factors_of_gradients([(work.record, rows) for work, rows in pairs])
            members = [
                _Member(*pair, factor) for pair, factor in zip(pairs, factors, strict=True) if factor is not None
            ]
            if members:
                ones = torch.full((count, count), float(has_bias), dtype=dtype, device="cpu")
                solutions += _solutions_of_group(members, ones, damping)
        return solutions


class _Member(NamedTuple):
    """A layer of a group."""

    work: Work
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


def _solutions_of_group(members: list[_Member], ones: Tensor, damping: Damping) -> list[Solution]:
    """Solve for members of one batch size.

    Args:
        members: the layers.
        ones: what ``X Xᵀ`` of the features lacks, that of the bias's column.
        damping: λ.
    """
    damped = ones.new_empty(len(members), *ones.shape)
    for target, member in zip(damped.unbind(), members, strict=True):
        assert member.rows.features is not None
        X = member.rows.features[0]
        torch.addmm(ones, X, X.mT, out=target)
    traces = trace_of(damped).tolist()
    levels = [damping.level(*member.rows.size).of(trace) for member, trace in zip(members, traces, strict=True)]
    damped.diagonal(dim1=-2, dim2=-1).add_(torch.tensor(levels, dtype=damped.dtype)[:, None])
    factors, info = torch.linalg.cholesky_ex(damped)
    good = keeps_digits(damped, factors).logical_and_(info == 0).tolist()
    identity = torch.eye(len(ones), dtype=ones.dtype, device="cpu")
    inverses = torch.linalg.solve_triangular(factors, identity, upper=False)
    norms = torch.stack(torch._foreach_norm([member.rows.output_grads for member in members])).tolist()
    solutions = []
    for (work, rows, factor), inverse, is_good, level, trace, norm in zip(
        members, inverses.unbind(), good, levels, traces, norms, strict=True
    ):
        if not is_good:
            continue
        coefficients = inverse.mT @ (inverse @ rows.output_grads[0])
        # ⟨U, G⟩ is at most ‖ΔZ‖². Only where that is too much it is asked for.
        most, change = change_of(work.record, (norm * float(factor)) ** 2, trace), None
        if work.limit is not None and not most.is_within(work.limit):
            energy = energy_of(coefficients, rows.output_grads[0], level).item() * float(factor) ** 2
            change = most._replace(energy=energy)
        if factor != 1.0:
            coefficients *= factor
        finite = math.isfinite(coefficients.sum().item())
        solutions.append(
            Solution(
                work.record,
                "samples",
                finite,
                coefficients=coefficients[None],
                rows=rows,
                scale=work.scale,
                change=change,
            )
        )
    return solutions
