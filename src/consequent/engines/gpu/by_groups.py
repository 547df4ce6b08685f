"""Dense layers with more rows than the dense kernel takes, at the step: layers of one shape by a few products together.

The mathematics is that of :mod:`consequent.engines.unwatched`, which takes what is left.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from consequent.capture.edits import factors_of_products, rounding
from consequent.engines.engine import Outcome, Work
from consequent.engines.gpu import kernels
from consequent.engines.gpu.by_kernels import fits_dense_kernel, grads_of_one_layer
from consequent.engines.gpu.many_rows import RowGroup, RowLayer, factorise_rows_beside
from consequent.maths.bound import shortenings_of
from consequent.maths.probes import random_numbers
from consequent.reports.counters import NAMES
from consequent.statistics.rows import Rows
from consequent.statistics.solution import Solution


@dataclass
class GroupSolution(Solution):
    """One of those that were found together; only they know it.

    Attributes:
        part: all of them.
    """

    part: "_Part | None" = None


class ByGroups:
    """Takes dense layers on the sample side of a GPU that is not waited for."""

    def solve(self, works: Sequence[Work]) -> list[Solution]:
        """Solutions for such works."""
        by_device: dict[torch.device, list[Work]] = {}
        for work in works:
            if _is_taken(work):
                by_device.setdefault(work.record.weight.device, []).append(work)
        solutions: list[Solution] = []
        for taken in by_device.values():
            layers = [_layer_of(work) for work in taken]
            events = [work.record.uses[0].inputs_there for work in taken]
            for group, places in factorise_rows_beside(layers, events):
                part = _Part(group, [taken[place] for place in places])
                for number, work in enumerate(part.works):  # one flag for all
                    finite = part.finite if number == 0 else True
                    solutions.append(GroupSolution(work.record, "samples", finite=finite, part=part))
        return solutions

    def write(self, solutions: Sequence[Solution], outcome: Outcome) -> None:
        """Write the gradients of each group, or zeros."""
        parts = {id(s.part): s.part for s in solutions if isinstance(s, GroupSolution) and s.part is not None}
        for part in parts.values():
            part.write(outcome)


class _Part:
    """Layers of one shape: their solutions, and what became of their gradients since the backward pass.

    Args:
        group: their inputs and factors.
        works: one for each.
    """

    def __init__(self, group: RowGroup, works: Sequence[Work]) -> None:
        self._group = group
        self.works = works
        grads = [grads_of_one_layer(work.record) for work in works]
        self._weight_grads = [pair[0] for pair in grads if pair is not None]
        self._bias_grads = [pair[1] for pair in grads if pair is not None and pair[1] is not None]
        self._old = torch.stack(self._weight_grads)
        self._old_bias = torch.stack(self._bias_grads) if self._bias_grads else None
        self._factors, self._edited, numbers = self._compare()
        trace, level, is_good, _ = group.status.unbind(-1)
        wanted, solved = group.wanted, group.transposed_coefficients
        self._is_good = is_good > 0
        self._plain = works[0].scale / (trace + level)
        self._shorter = torch.ones_like(trace)
        limit = works[0].limit
        if limit is not None:
            energies = (wanted * (wanted - level[:, None, None] * solved)).sum((1, 2)) * self._factors.square()
            per_column = wanted.shape[1] / group.columns
            self._shorter = torch.where(self._is_good, shortenings_of(energies, trace * (limit**2 * per_column)), 1)
        self.finite = (solved.sum((1, 2)) + trace + numbers).isfinite().all()

    def _compare(self) -> tuple[Tensor, Tensor, Tensor]:
        """The scalars c with ``.grad = c ΔZᵀX``, whether there is none, and numbers that are finite if all are."""
        wanted, inputs = self._group.wanted, self._group.inputs
        u = random_numbers(wanted.shape[1], wanted.dtype, wanted.device, 0)
        v = random_numbers(inputs.shape[2], wanted.dtype, wanted.device, 1)
        left, right, found = u @ wanted, v @ inputs.mT, self._old @ v.mT
        if self._old_bias is not None:
            right, found = right + 1, found + self._old_bias[..., None]
        found = (found * u.mT).sum(1)
        return factors_of_products(left[:, None], right[:, None], found[:, None], rounding(self.works[0].record))

    def write(self, outcome: Outcome) -> None:
        """Write the gradients, and count."""
        edited, scale = self._edited[:, None], self.works[0].scale
        new, new_bias = self._group.combined(self._factors * self._shorter * scale)
        new = torch.where(edited[..., None], self._old * self._plain[:, None, None], new)
        biases = None
        if self._old_bias is not None:
            biases = torch.where(edited, self._old_bias * self._plain[:, None], new_bias)
        counts = outcome.counts(new.device)
        is_taken: Tensor | int = 1
        if isinstance(outcome.finite, Tensor):
            finite = outcome.finite.to(new.device)
            new, is_taken = torch.where(finite, new, 0), finite
            biases = None if biases is None else torch.where(finite, biases, 0)
        torch._foreach_copy_(self._weight_grads, list(new.unbind()))
        if biases is not None:
            torch._foreach_copy_(self._bias_grads, list(biases.unbind()))
        is_short = (self._shorter < 1) & ~self._edited
        is_raised = self._is_good & (self._group.status[:, 3] > 0)
        found = {"rescued": is_raised, "fallen_back": ~self._is_good, "edited": self._edited, "bounded": is_short}
        rest = torch.zeros_like(is_short)
        counts.add_(torch.stack([found.get(name, rest) for name in NAMES]).sum(1) * is_taken)


def _is_taken(work: Work) -> bool:
    record = work.record
    if work.may_wait or type(record.statistic) is not Rows or len(record.uses) != 1 or work.damping.value == 0:
        return False
    use = record.uses[0]
    if not use.operation.is_dense or not use.operation.has_rows_of_outputs or record.rows >= record.columns:
        return False
    if use.inputs is None or use.output_grad is None or fits_dense_kernel(use) or use.rows == 0:
        return False
    if use.inputs.dtype != torch.float32 or use.output_grad.dtype != torch.float32:
        return False
    if not kernels.run_on(record.weight.device):
        return False
    grads = grads_of_one_layer(record)
    return grads is not None and grads[0].is_contiguous()


def _layer_of(work: Work) -> RowLayer:
    record, limit = work.record, math.inf if work.limit is None else work.limit
    use = record.uses[0]
    use.refuse_overwritten_inputs()
    return RowLayer.of(use, work.damping, work.scale, limit)
