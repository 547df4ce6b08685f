"""The sample side on a device that is not waited for: every choice is made there. Layers of one batch size together.

The same mathematics as in :mod:`consequent.engines.plain`, with one difference: there is no float64 solve. A matrix
that has lost its digits gets more damping.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from consequent.capture.edits import factors_on_device
from consequent.capture.records import Record
from consequent.engines.engine import Work, WritesOneByOne
from consequent.engines.inverse_factor import inverse_factor
from consequent.maths.damping import Level
from consequent.statistics.gradients import change_of
from consequent.statistics.row_matrices import RowMatrices, energy_of
from consequent.statistics.rows import Rows
from consequent.statistics.solution import Solution

# Groups and rows, the dtype, where they are, λ, and the scale.
_Kind = tuple[torch.Size, torch.dtype, torch.device, Level, float]


class Unwatched(WritesOneByOne):
    """Takes rows on devices that must not be waited for."""

    def solve(self, works: Sequence[Work]) -> list[Solution]:
        """Solutions for the works with rows, on such devices."""
        groups: dict[_Kind, list[tuple[Record, RowMatrices]]] = {}
        for record, damping, may_wait, scale, _ in works:
            if may_wait or type(record.statistic) is not Rows or record.beside or damping.value == 0:
                continue
            rows = record.statistic.matrices()
            dZ, level = rows.output_grads, damping.level(*rows.size)
            key = (dZ.shape[:2], record.first_use.dtype, dZ.device, level, scale)  # the layer's dtype
            groups.setdefault(key, []).append((record, rows))
        return [
            replace(solution, scale=scale)
            for (*_, level, scale), members in groups.items()
            for solution in _solutions_of_group(members, level)
        ]


def _solutions_of_group(members: list[tuple[Record, RowMatrices]], level_of: Level) -> list[Solution]:
    grams = torch.stack([rows.gram() for _, rows in members])
    solver = inverse_factor(grams, level_of)
    factors, edited, found = factors_on_device(members)
    trace, level, is_good, _ = solver.status.unbind(-1)  # [members, groups]
    plain = edited[:, None] | (is_good == 0)
    kept = torch.where(plain, 1 / (trace + level), 0)
    coefficients, energies = [], []
    for place, (_, rows) in enumerate(members):
        inverse = solver.inverse[place]
        solution = inverse.mT @ (inverse @ rows.output_grads)
        energies.append(energy_of(solution, rows.output_grads, level[place, :, None, None]) * factors[place] ** 2)
        coefficients.append((solution * factors[place]).masked_fill_(plain[place, :, None, None], 0))
    sums = torch.stack([solution.sum() for solution in coefficients])
    finite = (sums + trace.sum(-1) + found).isfinite()
    rescued, traces = solver.is_rescued.sum(-1), trace.sum(-1)
    fallen_back = ((is_good == 0) & trace.isfinite()).sum(-1)
    return [
        Solution(
            record,
            "samples",
            finite[place],
            coefficients=coefficients[place],
            rows=rows,
            kept=kept[place],
            rescued=rescued[place],
            fallen_back=fallen_back[place],
            edited=edited[place].long(),
            change=change_of(record, energies[place], traces[place]),
        )
        for place, (record, rows) in enumerate(members)
    ]
