"""A weight and its bias in two parameter groups, whose gradients were scaled by different numbers since their pass.

A GradScaler unscales the gradients of one optimiser after the other's, and each optimiser's, or each group's, may be
clipped by itself. The two are solved for together, which wants them in one unit: a bias's gradient is brought to that
of its weight, and the new one back to its own. So each group's update is scaled by its own number.

Nothing is waited for on a GPU: the numbers stay on the device.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from consequent.capture.torch_internals import answers_at_once

if TYPE_CHECKING:
    from consequent.capture.records import Record

# By how much two measures of a factor may differ if it is one: the gradient is rounded anew, and its sum.
_SAME_FACTOR = {torch.float64: 1e-10, torch.float32: 1e-4}
_SAME_FACTOR_IN_HALF = 0.03


def note_sizes(records: "Iterable[Record]") -> None:
    """Remember how large the records' gradients are, as a backward pass left them."""
    for those in _by_device(records):
        sizes = _sizes_of(those)
        for record in those:
            record.sizes = {p: sizes[p] for p in record.members if p in sizes}


@contextmanager
def in_one_unit(records: "Iterable[Record]") -> Iterator[None]:
    """While this lasts, the gradients of the records' biases are in the unit of their weights'."""
    noted = [record for record in records if record.sizes]
    scaled = [pair for those in _by_device(noted) for pair in _scaled_otherwise(those)]
    for bias, ratio in scaled:
        _multiply(bias, 1 / ratio)
    try:
        yield
    finally:
        for bias, ratio in scaled:
            _multiply(bias, ratio)


def _by_device(records: "Iterable[Record]") -> "Iterable[list[Record]]":
    found: dict[torch.device, list[Record]] = {}
    for record in records:
        found.setdefault(record.weight.device, []).append(record)
    return found.values()


def _multiply(parameter: Tensor, factor: Tensor) -> None:
    """Scale its gradient without a trace: nobody is to take it for an edit."""
    if parameter.grad is not None:
        parameter.grad.data.mul_(factor)


def _scaled_otherwise(records: "Sequence[Record]") -> list[tuple[Tensor, Tensor]]:
    """Biases, and by what the gradient of each was scaled since the backward pass, in units of its weight's factor."""
    now = _sizes_of(records)
    members = [[p for p in record.members if p in now and p in record.sizes] for record in records]
    then = {p: size for record in records for p, size in record.sizes.items()}
    biases = [(bias, its[0]) for its in members for bias in its[1:]]
    if not biases:
        return []

    def factors(parameters: Sequence[Tensor]) -> Tensor:
        return torch.stack([now[p] for p in parameters]) / torch.stack([then[p] for p in parameters])

    tolerance = max(_SAME_FACTOR.get(p.dtype, _SAME_FACTOR_IN_HALF) for pair in biases for p in pair)
    ratios = _ratios(factors([bias for bias, _ in biases]), factors([weight for _, weight in biases]), tolerance)
    if answers_at_once(ratios) and bool((ratios == 1).all()):
        return []
    return [(bias, ratio) for (bias, _), ratio in zip(biases, ratios.unbind(), strict=True)]


def _sizes_of(records: "Sequence[Record]") -> dict[Tensor, Tensor]:
    """Two measures of each gradient's size, all on one device: the largest magnitude and the sum of all, ``[2]``."""
    parameters = [p for record in records for p in record.members if p.grad is not None]
    grads = [p.grad.detach() for p in parameters if p.grad is not None]
    if not grads:
        return {}
    dtype = torch.float64 if any(grad.dtype == torch.float64 for grad in grads) else torch.float32
    largest, sums = (torch._foreach_norm(grads, order, dtype=dtype) for order in (math.inf, 1))
    sizes = torch.stack([torch.stack(largest), torch.stack(sums)], dim=-1)
    return dict(zip(parameters, sizes.unbind(), strict=True))


def _ratios(factors: Tensor, units: Tensor, tolerance: float) -> Tensor:
    """``[biases]``: factors in units of others; 1 where one is none, of a gradient that was edited, zero or not finite.

    Args:
        factors: two measures of each, ``[biases, 2]``.
        units: likewise.
        tolerance: by how much the two measures of a factor may differ.
    """
    ratios = factors[:, 0] / units[:, 0]
    are_factors = [(both[:, 1] / both[:, 0] - 1).abs() < tolerance for both in (factors, units)]
    are_known = are_factors[0] & are_factors[1] & ratios.isfinite() & (ratios > 0)
    return torch.where(are_known, ratios, 1)
