"""How large the loss was whose gradient is in ``.grad``, and by what that gradient was multiplied since.

All numbers stay on the device that they are on, which is not waited for.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from consequent.capture.loss_nodes import outermost_backward
from consequent.capture.torch_internals import callers_of_backward
from consequent.ranks.sharded_tensors import local


class LossNow(NamedTuple):
    """The loss whose gradient is in ``.grad``.

    Attributes:
        value: of all passes together.
        factors: by what each parameter's gradient was multiplied since its pass: to unscale it, or to clip it. Where
            some of its elements alone were changed, by what it was on the whole; 1 where it is zero.
        usual_factor: the largest of those that are known of gradients that are not zero, as a scaler's.
    """

    value: Tensor
    factors: dict[Tensor, Tensor]
    usual_factor: Tensor


class LossValues:
    """The losses of backward passes, as these were called with them: times a scaler's factor, if there is one.

    Args:
        parameters: all that a step changes; what comes to others is no matter.
    """

    def __init__(self, parameters: Callable[[], Collection[Tensor]]) -> None:
        self.parameters = parameters
        self._of: dict[int, Tensor | None] = {}  # by pass; None: not known
        self._calls: dict[int, Any] = {}  # the call of backward() that a pass is a part of
        self._sizes: dict[Tensor, Tensor] = {}  # of gradients, as the last pass left them

    # ---- in backward passes -----------------------------------------------------------------------------------------

    def __contains__(self, backward_pass: int) -> bool:
        return backward_pass in self._of

    def forget_but(self, passes: Iterable[int]) -> None:
        """Forget all other passes."""
        kept = set(passes)
        self._of = {one: loss for one, loss in self._of.items() if one in kept}
        self._calls = {one: call for one, call in self._calls.items() if one in kept}

    def look(self, backward_pass: int) -> None:
        """A pass is under way: what is it for? Passes that are parts of one backward() have one loss together.

        Args:
            backward_pass: the running one. Nothing is known of it where several threads may have called it.
        """
        threads = callers_of_backward()
        call = outermost_backward(*threads) if len(threads) == 1 else None
        if call is None or not all(isinstance(loss, Tensor) for loss in call.losses):
            self._of[backward_pass] = None
            return
        gradients = call.gradients or [None] * len(call.losses)
        total = _sum(list(map(_value, call.losses, gradients)))
        is_counted = any(call.mark is other for other in self._calls.values())
        self._of[backward_pass] = torch.zeros_like(total) if is_counted else total
        self._calls[backward_pass] = call.mark

    def note_sizes(self, parameters: Iterable[Tensor]) -> None:
        """A pass is over: how large are the gradients that it has left?

        Args:
            parameters: to whose gradients it has come.
        """
        self._sizes |= _sizes_of(parameters)

    def forget_sizes_but(self, parameters: Collection[Tensor]) -> None:
        """Forget those of all other gradients."""
        self._sizes = {parameter: size for parameter, size in self._sizes.items() if parameter in parameters}

    # ---- at the step ------------------------------------------------------------------------------------------------

    def now(self, passes: Mapping[int, Sequence[Tensor]], *, zeros_are_none: bool) -> LossNow | None:
        """The loss of these passes together; None where it is not known of each.

        Args:
            passes: each with the parameters to whose gradients it came.
            zeros_are_none: whether a pass is not there any more if these are all zero: on a GPU that was not looked at
                before. A rank that has parts of gradients may have none of these.
        """
        values = [self._of.get(one) for one in passes]
        known = [value for value in values if value is not None]
        if not known or len(known) < len(values):
            return None
        members = (p for its in passes.values() for p in its)
        sizes = _sizes_of(dict.fromkeys((*members, *self._sizes)))
        if len(passes) > 1 and zeros_are_none:
            known = [_if_any(its, sizes, value) for its, value in zip(passes.values(), known, strict=True)]
        total = _sum(known)
        parameters = list(sizes)
        before = [self._sizes.get(p, size) for p, size in sizes.items()]
        factors: Iterable[Tensor] = ()
        usual = torch.ones_like(total)
        if parameters:
            ratios = _together(sizes.values(), total) / _together(before, total)
            are_known = ratios.isfinite() & (ratios > 0)
            factors = torch.where(are_known, ratios, 1.0).unbind()
            usual = torch.where(are_known.any(), torch.where(are_known, ratios, 0.0).amax(), 1.0)
        return LossNow(total, dict(zip(parameters, factors, strict=True)), usual)


def _value(loss: Tensor, gradient: Tensor | None) -> Tensor:
    """A loss, times the gradient that was given of it; a copy, which stays as it is."""
    value = loss.detach()
    value = value.to(torch.promote_types(value.dtype, torch.float32), copy=True)
    return value.squeeze() if gradient is None else (value * gradient.detach()).sum()


def _sum(values: Sequence[Tensor]) -> Tensor:
    """Where the first one is."""
    return sum((value.to(values[0]) for value in values[1:]), values[0])


def _if_any(members: Sequence[Tensor], sizes: Mapping[Tensor, Tensor], value: Tensor) -> Tensor:
    """A pass's loss; 0 where none of these parameters has a gradient any more."""
    there = [sizes[parameter] for parameter in members if parameter in sizes]
    return torch.where((_together(there, value) != 0).any(), value, 0.0) if there else torch.zeros_like(value)


def _together(numbers: Iterable[Tensor], like: Tensor) -> Tensor:
    return torch.stack([number.to(like) for number in numbers])


@torch.no_grad()
def _sizes_of(parameters: Iterable[Tensor]) -> dict[Tensor, Tensor]:
    """The norms of gradients, of those that have one."""
    kinds: dict[tuple[torch.device, torch.dtype], dict[Tensor, Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            values = _values_of(local(parameter.grad))
            kinds.setdefault((values.device, values.dtype), {})[parameter] = values
    sizes: dict[Tensor, Tensor] = {}
    for (_, dtype), grads in kinds.items():
        norms = torch._foreach_norm(list(grads.values()), dtype=torch.promote_types(dtype, torch.float32))
        sizes.update(zip(grads, norms, strict=True))
    return sizes


def _values_of(grad: Tensor) -> Tensor:
    """A gradient's numbers, of a sparse one those that are there."""
    return grad.coalesce().values() if grad.is_sparse else grad
