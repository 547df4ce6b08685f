"""The sample side on a device that is not waited for: every choice is made there. Layers of one batch size together.

The same mathematics as in :mod:`consequent.update`, with one difference: there is no float64 solve. A matrix that has
lost its digits gets more damping; an edited gradient, or one whose matrix cannot be factorised even so, is used as it
is, shortened until it cannot overshoot.
"""

from collections.abc import Callable, Iterable

import torch

from consequent.explained import factors_on_device
from consequent.input_matrix import InputMatrix
from consequent.inverse_factor import inverse_factor
from consequent.record import Record
from consequent.settings import Damping
from consequent.update import Update


def updates_on_device(records: Iterable[Record], damping_of: Callable[[Record], Damping]) -> list[Update]:
    """Updates for those of the records that are solved on the sample side, with some λ, and were looked at before.

    Args:
        records: on devices that must not be waited for.
        damping_of: λ for a record.
    """
    groups: dict[tuple[torch.Size, torch.dtype, torch.device, Damping], list[InputMatrix]] = {}  # dtype: the layer's
    for record in records:
        damping = damping_of(record)
        if not record.is_reduced and record.verified and damping.value > 0:
            rows = InputMatrix.of(record)
            dZ = rows.output_grads
            groups.setdefault((dZ.shape[:2], record.first_use.dtype, dZ.device, damping), []).append(rows)
    return [update for (*_, damping), members in groups.items() for update in _updates_of_group(members, damping)]


def _updates_of_group(members: list[InputMatrix], damping: Damping) -> list[Update]:
    grams = torch.stack([rows.gram() for rows in members])
    solver = inverse_factor(grams, damping.absolute_for(grams, grams.shape[-1]))
    factors, edited, found = factors_on_device(members)
    trace, level, is_good, _ = solver.status.unbind(-1)  # [members, groups]
    plain = edited[:, None] | (is_good == 0)
    kept = torch.where(plain, 1 / (trace + level), 0)
    coefficients = []
    for place, rows in enumerate(members):
        inverse = solver.inverse[place]
        solution = inverse.mT @ (inverse @ rows.output_grads) * factors[place]
        coefficients.append(solution.masked_fill_(plain[place, :, None, None], 0))
    sums = torch.stack([solution.sum() for solution in coefficients])
    finite = (sums + trace.sum(-1) + found).isfinite()
    rescued = solver.is_rescued.sum(-1)
    fallen_back = ((is_good == 0) & trace.isfinite()).sum(-1)
    return [
        Update(
            rows.record,
            "samples",
            finite[place],
            coefficients=coefficients[place],
            rows=rows,
            kept=kept[place],
            rescued=rescued[place],
            fallen_back=fallen_back[place],
            edited=edited[place].long(),
        )
        for place, rows in enumerate(members)
    ]
