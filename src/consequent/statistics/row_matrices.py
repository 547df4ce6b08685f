"""The rows of a weight's inputs and output gradients as matrices, and solving with them on the sample side."""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from consequent.capture.use import Use
from consequent.engines.inverse_factor import inverse_factor
from consequent.layers import Operation
from consequent.layers.operation import at_least_float32
from consequent.maths.damping import Damping, Level
from consequent.maths.ridge import damped_solve_or_fall_back, quick_solve
from consequent.statistics.gradients import dot, trace_of


class Coefficients(NamedTuple):
    """``(X Xᵀ + λI)⁻¹ ΔZ``: with how much of each row of inputs the new gradient is made.

    Attributes:
        values: ``[groups, rows, out_features]``; None where NaN or inf was met, and that was looked at.
        finite: whether neither was met: a bool, or a tensor on a device that is not waited for.
        rescued: matrices that needed float64, or more damping.
        fallen_back: matrices that could not be factorised even so.
        shortening: ``1 / (trace + λ)``, ``[groups]``, for those; None where it was looked at and there are none.
        level: λ, a number or ``[groups, 1, 1]``,
        trace: and that of ``XXᵀ``, of all groups together; both for the bound.
    """

    values: Tensor | None
    finite: bool | Tensor
    rescued: int | Tensor = 0
    fallen_back: int | Tensor = 0
    shortening: Tensor | None = None
    level: float | Tensor = 0.0
    trace: float | Tensor = 0.0


class RowMatrices:
    """The rows of all uses of a weight, the constant 1 of its biases kept apart: it need not be multiplied.

    Args:
        uses: calls of layers with this weight, whose backward passes have been seen.
        biases: those that are solved for with it.
        with_features: whether the weight itself is.

    Attributes:
        output_grads: ``[groups, rows, out_features]``, ΔZᵀ in the paper, in float32 or better.
        captured: ``[groups, rows, D]``, Xᵀ in the paper, as they met the weight; None without features.
    """

    def __init__(self, uses: Sequence[Use], biases: Sequence[Tensor], *, with_features: bool) -> None:
        self.uses = list(uses)
        self.biases = list(biases)
        self.operation: Operation = self.uses[0].operation
        for use in self.uses:
            use.refuse_overwritten_inputs()
        parts = [use.operation.output_rows(use.output_grad) for use in self.uses if use.output_grad is not None]
        self.output_grads = at_least_float32(_concatenated(parts))
        self.captured: Tensor | None = None
        if with_features:
            self.captured = _concatenated([u.operation.input_rows(u.inputs) for u in self.uses if u.inputs is not None])

    @cached_property
    def features(self) -> Tensor | None:
        """``[groups, rows, D]``, in float32 or better; None where only biases are solved for."""
        return None if self.captured is None else at_least_float32(self.captured)

    @cached_property
    def ones(self) -> Tensor | None:
        """``[rows, biases]``: 1 where a row's use has that bias; None if there are no biases."""
        if not self.biases:
            return None
        columns = [
            torch.cat([self.output_grads.new_full((use.rows,), float(use.bias is bias)) for use in self.uses])
            for bias in self.biases
        ]
        return torch.stack(columns, dim=-1)

    def bias_columns(self) -> list[tuple[Tensor, float | Tensor]]:
        """The biases, each with its column: 1 where that is all, otherwise ``[rows, 1]``."""
        if self.has_one_bias_everywhere:
            return [(self.biases[0], 1.0)]
        return [] if self.ones is None else list(zip(self.biases, self.ones.split(1, dim=-1), strict=True))

    @cached_property
    def has_one_bias_everywhere(self) -> bool:
        """The usual case: every row ends in the same constant 1."""
        return len(self.biases) == 1 and all(use.bias is self.biases[0] for use in self.uses)

    def bring_to_usual_size(self) -> Tensor:
        """Divide the output gradients by their largest entry, which is returned (1 where all of them are 0)."""
        if self.output_grads.numel() == 0:
            return self.output_grads.new_ones(())
        largest = self.output_grads.abs().amax()
        largest = torch.where(largest == 0, 1, largest)
        self.output_grads = self.output_grads / largest
        return largest

    def gram(self) -> Tensor:
        """``[groups, rows, rows]``: the inner products of all rows, ``XᵀX`` in the paper."""
        dZ = self.output_grads
        if self.captured is None:
            gram = dZ.new_zeros(dZ.shape[0], dZ.shape[1], dZ.shape[1])
        elif self.captured.is_cuda and self.captured.dtype.itemsize < 4 and len(self.captured) == 1:
            X = self.captured[0]
            gram = torch.mm(X, X.mT, out_dtype=torch.float32)[None]  # exact products, summed in float32
        else:
            assert self.features is not None
            gram = torch.bmm(self.features, self.features.mT)
        if self.has_one_bias_everywhere:
            return gram.add_(1)
        return gram if self.ones is None else gram.add_(self.ones @ self.ones.mT)

    def whole(self) -> Tensor:
        """``[groups, rows, columns]``: the features and the ones together."""
        groups, rows = self.output_grads.shape[:2]
        parts = [] if self.features is None else [self.features]
        if self.ones is not None:
            parts.append(self.ones.expand(groups, rows, len(self.biases)))
        return torch.cat(parts, dim=-1)

    def double(self) -> "RowMatrices":
        """The same in float64."""
        copy = RowMatrices.__new__(RowMatrices)
        copy.uses, copy.biases, copy.operation = self.uses, self.biases, self.operation
        copy.captured = None if self.captured is None else self.captured.double()
        copy.output_grads = self.output_grads.double()
        return copy

    # ---- solving ----------------------------------------------------------------------------------------------------

    def solve(self, damping: Damping, *, may_wait: bool) -> Coefficients:
        """The definition: ``(X Xᵀ + λI)⁻¹ ΔZ``, rows being samples. λ must not be 0.

        A matrix that loses its digits in float32 is computed anew in float64 where the host may look, and gets more
        damping where it may not.

        Args:
            damping: λ.
            may_wait: whether the host may wait for the device to look at a result.
        """
        gram, dZ = self.gram(), self.output_grads
        level = damping.level(*self.size)
        if not may_wait:
            return self._solve_unseen(gram, level)
        traces = trace_of(gram)
        trace = traces.sum().item()
        added = level.of(trace) if len(gram) == 1 else level.at(traces)[:, None, None]
        values = quick_solve(gram, dZ, added, with_digits=True)
        rescued = fallen_back = 0
        if values is None:
            if not math.isfinite(trace):
                return Coefficients(None, False)
            exact = self.double()  # the rows are still there: in float64 the answer is free of float32's rounding
            values, rescued, fallen_back = damped_solve_or_fall_back(exact.gram(), exact.output_grads, added)
            self.captured, self.output_grads = exact.captured, exact.output_grads
            self.__dict__.pop("features", None)
            self.__dict__.pop("ones", None)
            if dZ.dtype != torch.float64:
                rescued = len(gram) - fallen_back if gram.numel() else 0  # a layer without samples has nothing to solve
        finite = math.isfinite(values.sum().item())
        return Coefficients(values, finite, rescued, fallen_back, level=added, trace=trace)

    def _solve_unseen(self, gram: Tensor, level: Level) -> Coefficients:
        factor = inverse_factor(gram, level)
        trace, levels, is_good, _ = factor.status.unbind(-1)
        values = factor.inverse.mT @ (factor.inverse @ self.output_grads)
        values = values.masked_fill_((is_good == 0)[:, None, None], 0)
        shortening = torch.where(is_good == 0, 1 / (trace + levels), 0)
        finite = (values.sum() + gram.diagonal(dim1=-2, dim2=-1).sum() + self.output_grads.sum()).isfinite()
        fallen_back = ((is_good == 0) & trace.isfinite()).sum()
        rescued, level_of_each = factor.is_rescued.sum(), levels[:, None, None]
        return Coefficients(values, finite, rescued, fallen_back, shortening, level_of_each, trace.sum())

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns of the input matrix."""
        columns = (0 if self.captured is None else self.captured.shape[-1]) + len(self.biases)
        return self.output_grads.shape[1], columns

    def combined(self, coefficients: Tensor) -> tuple[Tensor | None, list[Tensor]]:
        """``coefficientsᵀ X``: in the shape of the weight (None if that is not solved for), and for each bias.

        Args:
            coefficients: ``[groups, rows, out_features]``.
        """
        weight_gradient = None
        if self.features is not None:
            if self.operation.is_dense:
                left, right = coefficients[0], self.features[0]
                weight_gradient = right.mT @ left if self.operation.is_transposed else left.mT @ right
            else:
                weight_gradient = self.operation.shaped_like_weight(coefficients.mT @ self.features)
        return weight_gradient, self.bias_sums(coefficients)

    def bias_sums(self, coefficients: Tensor) -> list[Tensor]:
        """For each bias the sum of its rows' coefficients, ``[groups, out_features]``."""
        if self.has_one_bias_everywhere:
            return [coefficients.sum(-2)]
        return [] if self.ones is None else list((coefficients.mT @ self.ones).unbind(-1))


def energy_of(coefficients: Tensor, output_grads: Tensor, level: float | Tensor) -> Tensor:
    """``⟨U, G⟩`` of ``G = ΔZᵀX`` and ``U = AᵀX`` with ``(X Xᵀ + λI) A = ΔZ``: it is ``⟨ΔZ, ΔZ − λA⟩``.

    Args:
        coefficients: A, ``[groups, rows, out_features]``.
        output_grads: ΔZ, likewise.
        level: λ, a number or ``[groups, 1, 1]``.
    """
    if isinstance(level, Tensor) and len(coefficients) > 1:
        return (output_grads * (output_grads - level * coefficients)).sum()
    level = level.reshape(()) if isinstance(level, Tensor) else level
    return dot(output_grads, output_grads) - level * dot(output_grads, coefficients)


def _concatenated(blocks: list[Tensor]) -> Tensor:
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)
