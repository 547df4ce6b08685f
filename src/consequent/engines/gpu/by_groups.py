"""Dense layers with more rows than the dense kernel takes, at the step: layers of one shape by a few products together.

All that becomes of them is launched by one recording, but for the writing: that waits for all other layers.
The mathematics is that of :mod:`consequent.engines.unwatched`, which takes what is left.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from consequent.capture.edits import factors_of_products, rounding
from consequent.capture.torch_internals import graph_is_being_captured
from consequent.engines.engine import Outcome, Work
from consequent.engines.gpu import kernels
from consequent.engines.gpu.by_kernels import fits_dense_kernel, grads_of_one_layer
from consequent.engines.gpu.many_rows import RowGroup, RowLayer, factorise_rows, factorise_rows_beside, groups_of
from consequent.engines.gpu.row_launches import RowLaunches
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

    def __init__(self) -> None:
        self._launches = RowLaunches()
        self._limits: dict[torch.device, Tensor] = {}  # where recordings read them

    def solve(self, works: Sequence[Work]) -> list[Solution]:
        """Solutions for such works."""
        by_device: dict[torch.device, list[Work]] = {}
        for work in works:
            if _is_taken(work):
                by_device.setdefault(work.record.weight.device, []).append(work)
        solutions: list[Solution] = []
        for device, taken in by_device.items():
            part = self._solve(device, taken)
            for number, work in enumerate(taken):  # one flag for all
                finite = part.finite if number == 0 else True
                solutions.append(GroupSolution(work.record, "samples", finite=finite, part=part))
        return solutions

    def write(self, solutions: Sequence[Solution], outcome: Outcome) -> None:
        """Write the gradients of each group, or zeros."""
        parts = {id(s.part): s.part for s in solutions if isinstance(s, GroupSolution) and s.part is not None}
        for part in parts.values():
            part.write(outcome)

    def _solve(self, device: torch.device, works: list[Work]) -> "_Part":
        layers = [_layer_of(work) for work in works]
        groups = groups_of(layers)
        grads = [pair for work in works if (pair := grads_of_one_layer(work.record)) is not None]
        limits = self._limits_of([layers[places[0]].limit for places in groups], device)
        tolerance = rounding(works[0].record)
        in_graph = graph_is_being_captured()
        events = [work.record.uses[0].inputs_there for work in works]

        def new_gradients(layers: Sequence[RowLayer], grads: Sequence[Tensor]) -> tuple[Tensor, ...]:
            solved = factorise_rows_beside(layers, groups, events) if in_graph else factorise_rows(layers, groups)
            rest = iter(grads)
            pairs = [(next(rest), next(rest) if layer.has_bias else None) for layer in layers]
            found = [
                _corrected(group, [pairs[place] for place in places], limit, tolerance)
                for group, places, limit in zip(solved, groups, limits, strict=True)
            ]
            weights, biases, counts, finite = zip(*found, strict=True)
            return *weights, *biases, torch.stack(counts).sum(0), torch.stack(finite).all()

        kind = (tolerance, *map(tuple, groups), *[one.data_ptr() for one in limits[:1] if isinstance(one, Tensor)])
        read = [tensor for pair in grads for tensor in pair if tensor is not None]
        results, _ = self._launches.run(layers, read, new_gradients, kind)
        return _Part(groups, grads, results)

    def _limits_of(self, limits: list[float], device: torch.device) -> Sequence[float | Tensor]:
        """Where recordings read them, as they change with the learning rate."""
        if graph_is_being_captured() or math.isinf(max(limits)):
            return limits
        there = self._limits.get(device)
        if there is None or len(there) < len(limits):
            there = self._limits[device] = torch.empty(max(len(limits), 16), device=device)
        if len(set(limits)) == 1:
            there.fill_(limits[0])
        else:
            for place, limit in enumerate(limits):
                there[place].fill_(limit)
        return list(there[: len(limits)].unbind())


class _Part:
    """The new gradients of some layers.

    Args:
        groups: which layers are together.
        grads: of each layer, to be replaced.
        results: of each group the new gradients of weights and biases, then what is counted, and whether all is finite.
    """

    def __init__(
        self, groups: list[list[int]], grads: list[tuple[Tensor, Tensor | None]], results: tuple[Tensor, ...]
    ) -> None:
        self._old = [grads[place] for places in groups for place in places]
        self._weights, self._biases = results[: len(groups)], results[len(groups) : -2]
        self._counts, self.finite = results[-2:]

    def write(self, outcome: Outcome) -> None:
        """Write the gradients, and count."""
        weights, biases, counts = self._weights, self._biases, self._counts
        if isinstance(outcome.finite, Tensor):
            finite = outcome.finite.to(counts.device)
            weights, biases = (tuple([torch.where(finite, one, 0) for one in many]) for many in (weights, biases))
            counts = counts * finite
        new_pairs = zip(
            *[[one for group in groups for one in group.unbind()] for groups in (weights, biases)], strict=True
        )
        pairs = [both for pairs in zip(self._old, new_pairs, strict=True) for both in zip(*pairs, strict=True)]
        old, new = zip(*[(old, new) for old, new in pairs if old is not None], strict=True)
        torch._foreach_copy_(old, new)
        outcome.counts(counts.device).add_(counts)


def _corrected(
    group: RowGroup, grads: list[tuple[Tensor, Tensor | None]], limit: float | Tensor, tolerance: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The new gradients of layers of one kind.

    Args:
        group: their inputs and factors.
        grads: what their gradients have become since the backward pass.
        limit: of the change of their outputs.
        tolerance: how far their gradients may be from multiples of ``ΔZᵀX`` by rounding.

    Returns:
        those of weights and biases (these also of layers that have none), what is counted, and whether all is finite.
    """
    old = torch.stack([weight_grad for weight_grad, _ in grads])
    old_bias = torch.stack([bias_grad for _, bias_grad in grads if bias_grad is not None]) if group.has_bias else None
    factors, is_edited, numbers = _compared(group, old, old_bias, tolerance)
    trace, level, is_good, raised = group.status.unbind(-1)
    wanted, solved, is_good = group.wanted, group.transposed_coefficients, is_good > 0
    shorter, plain = torch.ones_like(trace), 1 / (trace + level)
    if isinstance(limit, Tensor) or not math.isinf(limit):
        energies = (wanted * (wanted - level[:, None, None] * solved)).sum((1, 2)) * factors.square()
        squares = old.square().sum((1, 2)) + (0 if old_bias is None else old_bias.square().sum(1))
        energies = torch.where(is_edited, squares * plain, energies)
        allowed = trace * (limit**2 * (wanted.shape[1] / group.columns))
        shorter = torch.where(is_good, shortenings_of(energies, allowed), 1)
    finite = (solved.sum((1, 2)) + trace + numbers).isfinite().all()
    scale = group.layers[0].scale
    new, new_bias = group.combined(factors * shorter * scale)
    plain = plain * shorter * scale
    new = torch.where(is_edited[:, None, None], old * plain[:, None, None], new)
    if old_bias is not None:
        new_bias = torch.where(is_edited[:, None], old_bias * plain[:, None], new_bias)
    rest = torch.zeros_like(is_good)
    found = {"rescued": is_good & (raised > 0), "fallen_back": ~is_good, "edited": is_edited, "bounded": shorter < 1}
    return new, new_bias, torch.stack([found.get(name, rest) for name in NAMES]).sum(1), finite


def _compared(group: RowGroup, old: Tensor, old_bias: Tensor | None, tolerance: float) -> tuple[Tensor, Tensor, Tensor]:
    """The scalars c with ``.grad = c ΔZᵀX``, whether there is none, and numbers that are finite if all are."""
    wanted, inputs = group.wanted, group.inputs
    u = random_numbers(wanted.shape[1], wanted.dtype, wanted.device, 0)
    v = random_numbers(inputs.shape[2], wanted.dtype, wanted.device, 1)
    left, right, found = u @ wanted, v @ inputs.mT, old @ v.mT
    if old_bias is not None:
        right, found = right + 1, found + old_bias[..., None]
    found = (found * u.mT).sum(1)
    return factors_of_products(left[:, None], right[:, None], found[:, None], tolerance)


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
