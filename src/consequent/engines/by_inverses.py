"""Weights whose inverses are kept for several steps (``averaging``, ``refresh``): those of one shape in one product.

The mathematics is that of :meth:`consequent.statistics.kept_inverses.Kept.solve`, which takes what is not only that.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from consequent.capture.records import Record
from consequent.engines.engine import Outcome, Work
from consequent.maths.bound import Change, shortenings_of
from consequent.reports.counters import NAMES
from consequent.statistics.gradients import change_of, gradient_matrix, split, trained
from consequent.statistics.kept_inverses import Inverses, Kept
from consequent.statistics.solution import Solution

_Kind = tuple[int, float, torch.Size, torch.dtype, bool, float, float | None]  # what weights that go together share


@dataclass
class _Member(Solution):
    """One of those that were found together.

    Attributes:
        group: all of them.
    """

    group: "_Group | None" = None


@dataclass
class _Group:
    """New gradients of weights of one shape.

    Attributes:
        records: whose they are.
        gradients: ``[members, groups, out_features, columns]``.
        counts: what the device counts if the step is taken, an element for each of
            :data:`consequent.reports.counters.NAMES`; None where the host counts.
    """

    records: list[Record]
    gradients: Tensor
    counts: Tensor | None = None


class ByInverses:
    """Takes weights with kept inverses."""

    def solve(self, works: Sequence[Work]) -> list[Solution]:
        """Solutions for the works with such weights, and nothing beside."""
        kinds: dict[_Kind, list[tuple[Work, Kept]]] = {}
        for work in works:
            kept = work.record.statistic
            if type(kept) is not Kept or work.record.beside:
                continue
            weight = work.record.weight
            key = (id(kept.inverses), kept.growth, weight.shape, weight.dtype, work.may_wait, work.scale, work.limit)
            kinds.setdefault(key, []).append((work, kept))
        return [solution for alike in kinds.values() for solution in _solved(alike)]

    def write(self, solutions: Sequence[Solution], outcome: Outcome) -> None:
        """Write all gradients, or zeros, and count."""
        by_group: dict[int, list[_Member]] = {}
        for solution in solutions:
            assert isinstance(solution, _Member)
            by_group.setdefault(id(solution.group), []).append(solution)
        old: list[Tensor] = []
        new: list[Tensor] = []
        for members in by_group.values():
            group = members[0].group
            assert group is not None
            gradients = _scaled(group.gradients, [member.scale for member in members])
            if isinstance(outcome.finite, Tensor):
                finite = outcome.finite.to(gradients.device)
                gradients = torch.where(finite, gradients, 0)
            if group.counts is not None:
                counts = group.counts * finite if isinstance(outcome.finite, Tensor) else group.counts
                outcome.counts(counts.device).add_(counts)
            for record, gradient in zip(group.records, gradients.unbind(), strict=True):
                old += [parameter.grad for parameter in trained(record) if parameter.grad is not None]
                new += split(record, gradient)
        torch._foreach_copy_(old, new)


def _solved(alike: list[tuple[Work, Kept]]) -> list[_Member]:
    """Solutions for weights of one shape, whose inverses were made together."""
    works = [work for work, _ in alike]
    records = [work.record for work in works]
    _, first = alike[0]
    inverses = first.inverses.at([kept.place for _, kept in alike])
    matrices, traces = inverses.matrices, inverses.whole_traces
    gradients = torch.stack([gradient_matrix(record) for record in records]).to(matrices.dtype)
    solutions = (gradients.flatten(0, 1) @ matrices.flatten(0, 1)).view(gradients.shape)
    if first.growth != 1:
        solutions, traces = solutions / first.growth, traces * first.growth
    finite = (solutions.sum((1, 2, 3)) + traces).isfinite()
    energies = torch.linalg.vecdot(solutions.flatten(1), gradients.flatten(1))
    changes = change_of(records[0], energies, traces)
    find = _seen if works[0].may_wait else _unseen
    return find(works, _Group(records, solutions), inverses, finite, changes)


def _seen(works: list[Work], group: _Group, inverses: Inverses, finite: Tensor, changes: Change) -> list[_Member]:
    """With all numbers on the host, which shortens and counts one by one."""
    energies, traces = changes.energy, changes.trace
    assert isinstance(energies, Tensor)
    assert isinstance(traces, Tensor)
    numbers = zip(works, inverses.counts, finite.tolist(), energies.tolist(), traces.tolist(), strict=True)
    return [
        _Member(
            work.record,
            "features",
            is_finite,
            rescued=rescued,
            fallen_back=failed,
            scale=work.scale,
            change=Change(energy, trace, changes.outputs_per_column),
            group=group,
        )
        for work, (rescued, failed), is_finite, energy, trace in numbers
    ]


def _unseen(works: list[Work], group: _Group, inverses: Inverses, finite: Tensor, changes: Change) -> list[_Member]:
    """With all choices made on the device, which counts as well; one flag for all."""
    scale, limit = works[0].scale, works[0].limit
    found = dict(inverses.counts_on_device)
    if limit is None:
        group.gradients = group.gradients * scale
    else:
        energies, traces = changes.energy, changes.trace
        assert isinstance(energies, Tensor)
        assert isinstance(traces, Tensor)
        shorter = shortenings_of(energies, traces * (limit**2 * changes.outputs_per_column))
        group.gradients = group.gradients * (shorter * scale)[:, None, None, None]
        found["bounded"] = (shorter < 1).sum()
    group.counts = torch.stack([found.get(name, found["none"]) for name in NAMES])
    flag = finite.all()
    return [
        _Member(work.record, "features", True if number else flag, group=group) for number, work in enumerate(works)
    ]


def _scaled(gradients: Tensor, scales: list[float | Tensor]) -> Tensor:
    """Each multiplied by its own number."""
    if all(scale == 1 for scale in scales):
        return gradients
    if len(set(scales)) == 1:
        return gradients * scales[0]
    return gradients * torch.tensor(scales, dtype=gradients.dtype, device=gradients.device)[:, None, None, None]
