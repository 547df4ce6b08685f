"""How large the loss was whose gradient is in ``.grad``, and by what that gradient was multiplied since."""

import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from consequent.capture.loss_nodes import losses_in
from consequent.capture.torch_internals import answers_at_once, callers_of_backward

if TYPE_CHECKING:
    from consequent.capture.records import Record


class _Seen(NamedTuple):
    """The loss of a backward pass.

    Attributes:
        loss: the tensor that the pass began with; gone when nobody else holds it.
        value: a number, or on a GPU a tensor that is not waited for.
    """

    loss: "weakref.ref[Tensor]"
    value: float | Tensor


class LossValues:
    """The losses of backward passes, as these were called with them: times a scaler's factor, if there is one."""

    def __init__(self) -> None:
        self._of: dict[int, list[_Seen]] = {}  # by pass
        self._sizes: dict[Tensor, Tensor] = {}  # of gradients, as the last pass left them

    # ---- in backward passes -----------------------------------------------------------------------------------------

    def look(self, backward_pass: int) -> None:
        """A pass has begun: what is it for?

        Args:
            backward_pass: the running one. Nothing is known of it where several threads may have called it.
        """
        threads = callers_of_backward()
        if len(threads) == 1:
            self._of[backward_pass] = [_seen(*given) for given in losses_in(*threads)]

    def note_sizes(self, records: "Iterable[Record]") -> None:
        """A pass is over: how large are the gradients that it has left?"""
        parameters = [p for record in records for p in record.members]
        self._sizes |= _sizes_of(parameters)

    def forget_but(self, passes: set[int]) -> None:
        """Forget the losses of all other passes."""
        self._of = {one: seen for one, seen in self._of.items() if one in passes}

    # ---- at the step ------------------------------------------------------------------------------------------------

    def total(self, passes: set[int]) -> float | Tensor | None:
        """The sum of all losses of these passes; None where it is not known of each.

        Passes that are parts of one backward() have one loss together.
        """
        if not passes or not all(self._of.get(one) for one in passes):
            return None
        counted: list[_Seen] = []
        for one in passes:
            for seen in self._of[one]:
                loss = seen.loss()
                if loss is None or not any(other.loss() is loss for other in counted):
                    counted.append(seen)
        total = counted[0].value
        for seen in counted[1:]:
            total = total + seen.value
        return total

    def scaled_since(self, parameters: Sequence[Tensor]) -> list[float | Tensor]:
        """By what each of these parameters' gradients was multiplied since its pass: to unscale it, or to clip it.

        Where some of its elements alone were changed, by what it was on the whole.
        """
        now, factors = _sizes_of(parameters), []
        for parameter in parameters:
            before, after = self._sizes.get(parameter), now.get(parameter)
            factors.append(1.0 if before is None or after is None else _ratio(after, before))
        return factors


def _seen(loss: Tensor, gradient: Tensor | None) -> _Seen:
    value = loss.detach() if gradient is None else (loss.detach() * gradient.detach()).sum()
    return _Seen(weakref.ref(loss), float(value) if answers_at_once(value) else value.reshape(()))


def _ratio(after: Tensor, before: Tensor) -> Tensor:
    return torch.where((before > 0) & (after > 0), after / before, 1)


def _sizes_of(parameters: Iterable[Tensor]) -> dict[Tensor, Tensor]:
    """The sums of the magnitudes in gradients that are dense."""
    dense = {p: p.grad.detach() for p in parameters if p.grad is not None and not p.grad.is_sparse}
    return {p: grad.abs().sum(dtype=torch.float64 if grad.is_cpu else torch.float32) for p, grad in dense.items()}
