"""Layers with more rows than features, corrected together on a GPU: a few launches for all of them."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from consequent.gpu.launch import is_dense, on_device
from consequent.gpu.moments import Source, Window, accepts, add_moments
from consequent.gpu.multiply import Multiplication, Problem
from consequent.gpu.samples import Updates
from consequent.layers import Operation
from consequent.maths.damping import Damping
from consequent.maths.inverse import Counts, Inverse, inverse_of, parts_of
from consequent.maths.precision import at_least_float32


class Wide(NamedTuple):
    """A call.

    Attributes:
        place: of the layer.
        images: X's rows are patches of them,
        window: which lie in them like this.
        weight_grad: the plain gradient,
        bias_grad: and that of the bias, if it is trained.
        rows: N.
        damping: λ.
        scale: by which the solution is multiplied.
        measured: whether it is to be told how much the outputs change.
    """

    place: int
    images: Tensor
    window: Window
    weight_grad: Tensor
    bias_grad: Tensor | None
    rows: int
    damping: Damping
    scale: float
    measured: bool

    @property
    def key(self) -> Any:
        """What calls have in common that are solved together."""
        return self.damping, self.measured

    @property
    def features(self) -> int:
        """D."""
        return self.weight_grad[0].numel()


def wide_call(
    operation: Operation, inputs: Tensor, output_grad: Tensor, *, ones: bool
) -> tuple[Tensor, Window, Tensor, Tensor | None, int] | None:
    """The images, window, plain gradients and rows of a call; None where it has to be solved otherwise."""
    rows = operation.rows(output_grad)
    if rows <= operation.features + ones or operation.groups > 1 or not operation.has_rows_of_outputs:
        return None
    patches = operation.as_images(inputs) if accepts(inputs, rows, operation.features) else None
    if patches is None:
        return None
    weight_grad = at_least_float32(operation.weight_gradient(inputs, output_grad))
    bias_grad = at_least_float32(operation.bias_gradient(output_grad)) if ones else None
    images, window = patches
    return images, window, weight_grad if is_dense(weight_grad) else weight_grad.contiguous(), bias_grad, rows


def solve_wide(calls: Sequence[Wide]) -> Updates:
    """Replace the gradients of all calls by corrected ones."""
    by_features: dict[int, list[int]] = {}
    for place, call in enumerate(calls):
        by_features.setdefault(call.features, []).append(place)
    device = calls[0].images.device
    stacks = {
        D: (torch.zeros(len(places), D, D, device=device), torch.zeros(len(places), D, device=device))
        for D, places in by_features.items()
    }
    sources = []
    for D, places in by_features.items():
        for place, moment, mean in zip(places, *stacks[D], strict=True):
            sources.append(Source(calls[place].images, calls[place].window, moment, mean))
    add_moments(sources)
    inverses: list[Any] = [None] * len(calls)
    failed: Any = 0
    for D, places in by_features.items():
        numbers = tuple([(calls[p].rows, min(calls[p].rows, D + _ones(calls[p])), _ones(calls[p])) for p in places])
        counts, damping, (moments, means) = _counts(numbers, device), calls[0].damping, stacks[D]
        moments.div_(counts.rows[:, None, None])
        means.div_(counts.rows[:, None])
        is_large = damping.is_large(max(number[1] for number in numbers), D + 1, torch.float32)
        inverse = inverse_of(moments, means, counts, damping, is_large=is_large)
        failed = failed + inverse.failed
        parts = (part.split(1) for part in inverse[:4])
        for place, *of_call in zip(places, *parts, strict=True):
            inverses[place] = Inverse(*of_call)
    gradients = [(call.weight_grad, call.bias_grad) for call in calls]
    multiplication = Multiplication(
        [
            Problem(call.weight_grad, call.bias_grad is not None, *parts_of(inverse), call.scale / call.rows)
            for call, inverse in zip(calls, inverses, strict=True)
        ]
    )
    told = torch.zeros(len(calls), 3, device=device)
    if calls[0].measured:
        change = multiplication.with_changes(gradients)
        tells = change.isfinite() & (change > 0)
        told[:, 0], told[:, 1] = tells, torch.where(tells, change, 0)
    else:
        multiplication(gradients)
    told[0, 2] = failed
    return Updates([call.weight_grad for call in calls], [call.bias_grad for call in calls], told)


def _ones(call: Wide) -> int:
    return int(call.bias_grad is not None)


@lru_cache(maxsize=256)
def _counts(numbers: tuple[tuple[int, int, int], ...], device: torch.device) -> Counts:
    return Counts(*on_device([*zip(*numbers, strict=True)], torch.float32, device).unbind())
