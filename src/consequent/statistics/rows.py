"""The rows of a weight's inputs, kept as they are: what the sample side solves with."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from consequent.capture.edits import factors_of_gradients
from consequent.capture.use import Use
from consequent.maths.damping import Damping
from consequent.maths.precision import in_full_precision
from consequent.statistics.blocks import Blocks, Cuts, cuts_of
from consequent.statistics.gradients import apart_from_rows, change_of, dot, gradient_matrix, trace_of
from consequent.statistics.moment import Moment, moment_of
from consequent.statistics.row_matrices import RowMatrices, energy_of
from consequent.statistics.solution import Solution
from consequent.statistics.statistic import Statistic, with_bias_of
from consequent.statistics.together import together

if TYPE_CHECKING:
    from consequent.capture.records import Record


@dataclass(frozen=True, eq=False)
class Rows(Statistic):
    """All uses with their inputs and output gradients, while there are fewer rows than features."""

    @classmethod
    def of(cls, use: Use) -> "Rows":
        """Those of one use."""
        return cls((use,), use.features, () if use.bias is None else (use.bias,), use.rows)

    def add(self, use: Use) -> "Rows":
        """With one use more."""
        uses, biases = (*self.uses, use), with_bias_of(use, self.biases)
        return replace(self, uses=uses, biases=biases, rows=self.rows + use.rows)

    def cuts(self, largest_block: int | None) -> Cuts:
        """How the features are cut into blocks; () where they are not."""
        return cuts_of(self.operation, self.features, self.rows, largest_block)

    @in_full_precision
    def moment(self, *, keep_rows: bool, cuts: Cuts = ()) -> Moment | Blocks:
        """The second moment, which stands for them from now on.

        Args:
            keep_rows: whether the uses keep their inputs and output gradients all the same.
            cuts: of the features into blocks.
        """
        for use in self.uses:
            use.refuse_overwritten_inputs()
        of = (self.uses, self.features, self.biases)
        moment = Blocks.of(*of, cuts) if cuts else Moment.of(*of)
        if not keep_rows:
            for use in self.uses:
                use.let_go()
        return moment

    def matrices(self) -> RowMatrices:
        """The rows, with a column for each parameter that has a gradient."""
        biases = [bias for bias in self.biases if bias.grad is not None]
        return RowMatrices(self.uses, biases, with_features=self.features > 0 and self.uses[0].weight.grad is not None)

    def solve(self, record: "Record", damping: Damping, *, may_wait: bool) -> Solution:
        """``ΔZᵀ (X Xᵀ + λI)⁻¹ X``, times the factor by which the gradient in ``.grad`` differs from ``ΔZᵀX``.

        Looks at the numbers. Where that may not be, usual gradients go to :mod:`consequent.engines.unwatched`, and
        those of which a part does not come from the rows are solved for with their moment.
        """
        if not may_wait and record.beside:
            return self.moment(keep_rows=True).solve(record, damping, may_wait=False)
        rows = self.matrices()
        (factor,) = factors_of_gradients([(record, rows)])
        if factor is None:
            return _shortened(record, rows, damping)
        apart = None
        if record.beside:
            apart = apart_from_rows(record, damping, trace_of(rows.gram()), may_wait=True)
        others, shortened = (None, None) if apart is None else (apart.others, apart.shortened)
        if damping.value == 0:
            X, dZ = rows.whole(), rows.output_grads
            finite = math.isfinite(X.sum() + dZ.sum() + factor)
            gradient = (torch.linalg.pinv(X) @ dZ).mT * factor if finite else torch.zeros_like(dZ.mT @ X)
            change = change_of(record, dot(gradient, dZ.mT @ X) * factor, X.square().sum())
            return Solution(record, "samples", finite, _plus(gradient, shortened), others=others, change=change)
        solved = rows.solve(damping, may_wait=True)
        values = solved.values
        if values is None:
            return Solution(record, "samples", False)
        energy = energy_of(values, rows.output_grads, solved.level) * factor**2
        if factor != 1.0:
            values *= factor
        solution = Solution(
            record,
            "samples",
            bool(solved.finite) and math.isfinite(factor),
            others=others,
            rescued=solved.rescued,
            fallen_back=solved.fallen_back,
            change=change_of(record, energy, solved.trace),
        )
        if shortened is None:
            solution.coefficients, solution.rows = values, rows
        else:
            solution.gradient = values.mT @ rows.whole() + shortened
            wanted = gradient_matrix(record).to(values.dtype)
            energy = dot(solution.gradient, wanted if others is None else wanted - others)
            solution.change = change_of(record, energy, solved.trace)
        return solution


@in_full_precision
def moments_together(all_rows: Sequence[Rows]) -> list[Moment]:
    """Their second moments, which stand for them from now on; layers alike that were called once share the calls."""
    moments: dict[int, Moment] = {}
    for alike in together(all_rows, _kind, lambda rows: rows.operation.groups * rows.columns**2):
        uses = [use for rows in alike for use in rows.uses]
        for use in uses:
            use.refuse_overwritten_inputs()
        if len(alike) == 1:
            matrices = [moment_of(uses, alike[0].features, alike[0].biases)]
        else:
            inputs = [use.inputs for use in uses if use.inputs is not None]
            matrices = list(uses[0].operation.second_moments(inputs, ones=uses[0].bias is not None).unbind())
        for rows, matrix in zip(alike, matrices, strict=True):
            moments[id(rows)] = Moment(rows.uses, rows.features, rows.biases, rows.rows, matrix)
        for use in uses:
            use.let_go()
    return [moments[id(rows)] for rows in all_rows]


def _kind(rows: Rows) -> Hashable:
    """What layers alike have in common, if they were called once; nobody else has it otherwise."""
    use, *others = rows.uses
    if others or use.inputs is None:
        return id(rows)
    return use.operation, use.bias is not None, use.inputs.shape, use.inputs.dtype, use.inputs.device


def _plus(gradient: Tensor, more: Tensor | None) -> Tensor:
    return gradient if more is None else gradient + more


def _shortened(record: "Record", rows: RowMatrices, damping: Damping) -> Solution:
    """What a gradient gets that its rows do not explain: it stays, shortened until it cannot overshoot.

    All eigenvalues of ``XXᵀ / (λ + trace)`` are below 1.
    """
    gram = rows.gram()
    trace = trace_of(gram)
    level = damping.level(*rows.size).at(trace)
    bound = (trace + level).clamp(min=torch.finfo(gram.dtype).tiny)[..., None, None]
    edited = gradient_matrix(record).to(gram.dtype)
    gradient = edited / bound
    change = change_of(record, dot(gradient, edited), trace.sum())
    return Solution(record, "samples", bool(gradient.sum().isfinite()), gradient, edited=True, change=change)
