"""Statistics of embeddings' inputs, which are sparse, so that neither rows nor moments are ever dense.

Of an Embedding the second moment is diagonal, the counts of the indices. Bags of several indices are solved for by
samples, with the Gram matrix of sparse rows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from consequent.capture.edits import multiple
from consequent.capture.use import Use
from consequent.layers.embedding_bag import EmbeddingBag
from consequent.layers.operation import at_least_float32
from consequent.maths.damping import Damping
from consequent.maths.ridge import damped_solve_or_fall_back
from consequent.statistics.gradients import factor_since, trace_of
from consequent.statistics.rows import Rows
from consequent.statistics.solution import Solution
from consequent.statistics.statistic import Statistic

if TYPE_CHECKING:
    from consequent.capture.records import Record


@dataclass(frozen=True, eq=False)
class Counts(Statistic):
    """How often each row of a table was looked up: the diagonal of the second moment of one-hot rows.

    Attributes:
        counts: ``[D]``.
    """

    counts: Tensor

    @classmethod
    def of(cls, use: Use) -> "Counts":
        """Those of one use, whose indices are not needed any longer."""
        counts: Tensor = use.operation.counts(use.inputs)  # type: ignore[attr-defined]
        use.let_go()
        return cls((use,), use.features, (), use.rows, counts)

    def add(self, use: Use) -> "Counts":
        """With one use more."""
        more = Counts.of(use)
        return replace(self, uses=(*self.uses, use), rows=self.rows + use.rows, counts=self.counts + more.counts)

    def solve(self, record: "Record", damping: Damping, *, may_wait: bool) -> Solution:
        """``G (XXᵀ + λI)⁻¹``: each row of the table divided by its count plus λ."""
        gradient, others = record.weight.grad, _others_of(record, may_wait=may_wait)
        assert gradient is not None
        explained = gradient if others is None else gradient - others
        table = divided_by_counts(self.operation, explained, self.counts, self.rows, damping)
        return TableSolution(record, "features", _values(table).sum().isfinite(), others=others, table=table)


@dataclass(frozen=True, eq=False)
class Bags(Rows):
    """The rows of an EmbeddingBag with fewer bags than indices, sparse."""

    def solve(self, record: "Record", damping: Damping, *, may_wait: bool) -> Solution:
        """``ΔZᵀ (X Xᵀ + λI)⁻¹ X``, times the factor by which the gradient in ``.grad`` differs from ``ΔZᵀX``."""
        operation, gradient = self.operation, record.weight.grad
        assert isinstance(operation, EmbeddingBag)
        assert gradient is not None
        X, dZ = rows_of_bags(self.uses)
        others = _others_of(record, may_wait=may_wait)
        plain = _dense(operation.weight_gradient(X, dZ))
        explained = _dense(gradient).to(plain.dtype) - (0 if others is None else others)
        eps = torch.finfo(plain.dtype).eps
        level = 32 * eps * (_values(X).norm() * dZ.norm() + plain.norm()) if may_wait else math.inf
        factor = multiple(explained, plain, level)
        coefficients, rescued, fallen_back = coefficients_of_bags(operation, X, dZ, damping)
        if factor is None:  # edited: as it is, shortened until it cannot overshoot
            trace = trace_of(operation.gram(X)).sum()  # of X itself, which may have entries twice
            bound = trace + damping.level(*X.shape).at(trace)
            table = explained / bound.clamp(min=torch.finfo(plain.dtype).tiny)
        else:
            table = operation.weight_gradient(X, (coefficients * factor).to(dZ.dtype))
        finite = (_values(table).sum() + coefficients.sum()).isfinite()
        return TableSolution(
            record,
            "samples",
            finite,
            others=others,
            table=table,
            rescued=rescued,
            fallen_back=fallen_back,
            edited=factor is None,
        )


@dataclass
class TableSolution(Solution):
    """A new gradient of a table, dense or sparse, in the weight's own shape; so are ``others``."""

    table: Tensor | None = None

    def write(self, finite: bool | Tensor) -> None:
        """Put it in the place of the old one; zeros unless finite."""
        assert self.table is not None
        weight = self.record.weight
        new = self.table * self.scale
        if self.others is not None:
            new = self.others + new  # of which the second may be sparse
        if isinstance(finite, Tensor):
            _values(new).masked_fill_(~finite.to(new.device), 0)
        weight.grad = new.to(weight.dtype)


def divided_by_counts(operation: Any, gradient: Tensor, counts: Tensor, rows: int, damping: Damping) -> Tensor:
    """``G (XXᵀ + λI)⁻¹`` with the diagonal ``XXᵀ`` of an Embedding.

    Args:
        operation: of the layer.
        gradient: ``[features, out_features]``, dense or sparse.
        counts: ``[features]``, the diagonal.
        rows: of X.
        damping: λ.
    """
    trace = counts.sum().to(torch.promote_types(counts.dtype, gradient.dtype))  # λ is to have the gradient's digits
    level = damping.level(rows, counts.shape[0]).at(trace)
    corrected: Tensor = operation.corrected(gradient, counts, level)
    return corrected


def coefficients_of_bags(
    operation: EmbeddingBag, rows: Tensor, output_grads: Tensor, damping: Damping
) -> tuple[Tensor, int, int]:
    """``(X Xᵀ + λI)⁻¹ ΔZ`` of an EmbeddingBag, ``[bags, out_features]``; how many were rescued, and how many failed.

    Args:
        operation: of the layer.
        rows: ``[bags, features]``, sparse.
        output_grads: ``[bags, out_features]``.
        damping: λ.
    """
    gram = operation.gram(rows)
    right = at_least_float32(output_grads)[None].to(gram.dtype)
    if damping.value == 0:
        return (torch.linalg.pinv(gram, hermitian=True) @ right)[0], 0, 0
    solved = damped_solve_or_fall_back(gram, right, damping.level(*rows.shape)(gram))
    return solved.solution[0], solved.rescued, solved.fallen_back


def rows_of_bags(uses: Sequence[Use]) -> tuple[Tensor, Tensor]:
    """All bags, sparse, and their output gradients."""
    inputs = [use.inputs for use in uses if use.inputs is not None]
    output_grads = [use.output_grad for use in uses if use.output_grad is not None]
    return torch.cat(inputs), torch.cat(output_grads)


def _others_of(record: "Record", *, may_wait: bool) -> Tensor | None:
    """What came to the gradient otherwise than from look-ups, as it has been scaled since."""
    others = record.beside.others.get(record.weight)
    factor = None if others is None else factor_since(record, may_wait=may_wait)
    return None if others is None or factor is None else others * factor


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


def _values(tensor: Tensor) -> Tensor:
    return tensor._values() if tensor.is_sparse else tensor
