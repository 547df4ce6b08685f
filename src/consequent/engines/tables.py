"""Tables of embeddings: their inputs are sparse, so that neither rows nor moments are ever dense.

Of an Embedding the second moment is diagonal, the counts of the indices. Bags of several indices are solved for by
samples, with the Gram matrix of sparse rows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from consequent.capture.edits import multiple
from consequent.capture.records import Record
from consequent.capture.use import Use
from consequent.engines.plain import factor_since
from consequent.engines.solution import Solution, Work
from consequent.layers.embedding import EmbeddingBag
from consequent.layers.operation import at_least_float32
from consequent.maths.damping import Damping
from consequent.maths.ridge import damped_solve_or_fall_back


class Tables:
    """Takes Embedding, and EmbeddingBag with fewer bags than indices."""

    def solve(self, works: Sequence[Work]) -> list[Solution]:
        """Solutions for the works with tables."""
        found = []
        for record, damping, may_wait in works:
            gradient = record.weight.grad
            if gradient is None or record.is_empty:
                continue
            if record.counts is not None:
                found.append(_by_counts(record, gradient, damping, may_wait=may_wait))
            elif isinstance(record.operation, EmbeddingBag) and not record.is_reduced:
                found.append(_by_bags(record, gradient, damping, may_wait=may_wait))
        return found


@dataclass
class TableSolution(Solution):
    """A new gradient of a table, dense or sparse, in the weight's own shape; so are ``others``."""

    table: Tensor | None = None

    def write(self, scale: float, finite: bool | Tensor) -> list[Tensor]:
        """Put it, times the scale, in the place of the old one; zeros unless finite."""
        assert self.table is not None
        weight = self.record.weight
        new = self.table * scale
        if self.others is not None:
            new = self.others + new  # of which the second may be sparse
        if isinstance(finite, Tensor):
            _values(new).masked_fill_(~finite.to(new.device), 0)
        weight.grad = new.to(weight.dtype)
        return [weight]


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


def _by_counts(record: Record, gradient: Tensor, damping: Damping, *, may_wait: bool) -> Solution:
    assert record.counts is not None
    others = _others_of(record, may_wait=may_wait)
    explained = gradient if others is None else gradient - others
    table = divided_by_counts(record.operation, explained, record.counts, record.rows, damping)
    return TableSolution(record, "features", _values(table).sum().isfinite(), others=others, table=table)


def _by_bags(record: Record, gradient: Tensor, damping: Damping, *, may_wait: bool) -> Solution:
    operation = record.operation
    assert isinstance(operation, EmbeddingBag)
    X, dZ = rows_of_bags(record.uses)
    others = _others_of(record, may_wait=may_wait)
    plain = _dense(operation.weight_gradient(X, dZ))
    explained = _dense(gradient).to(plain.dtype) - (0 if others is None else others)
    eps = torch.finfo(plain.dtype).eps
    level = 32 * eps * (_values(X).norm() * dZ.norm() + plain.norm()) if may_wait else math.inf
    factor = multiple(explained, plain, level)
    coefficients, rescued, fallen_back = coefficients_of_bags(operation, X, dZ, damping)
    if factor is None:  # edited: as it is, shortened until it cannot overshoot
        trace = operation.gram(X).diagonal(dim1=-2, dim2=-1).sum()  # of X itself, which may have entries twice
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


def _others_of(record: Record, *, may_wait: bool) -> Tensor | None:
    """What came to the gradient otherwise than from look-ups, as it has been scaled since."""
    others = record.others.get(record.weight)
    factor = None if others is None else factor_since(record, may_wait=may_wait)
    return None if others is None or factor is None else others * factor


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


def _values(tensor: Tensor) -> Tensor:
    return tensor._values() if tensor.is_sparse else tensor
