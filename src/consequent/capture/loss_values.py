"""How large the loss was whose gradient is in ``.grad``, and by what that gradient was multiplied since."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from consequent.capture.loss_nodes import losses_in
from consequent.capture.torch_internals import answers_at_once, callers_of_backward

if TYPE_CHECKING:
    from consequent.capture.records import Record


class LossValues:
    """The losses of backward passes, as these were called with them: times a scaler's factor, if there is one."""

    def __init__(self) -> None:
        self._of: dict[int, float | Tensor | None] = {}  # by pass; None: not known
        self._sizes: dict[Tensor, Tensor] = {}  # of gradients, as the last pass left them

    def __contains__(self, backward_pass: int) -> bool:
        return backward_pass in self._of

    # ---- in backward passes -----------------------------------------------------------------------------------------

    def look(self, backward_pass: int) -> None:
        """A pass is under way: what is it for?

        Args:
            backward_pass: the running one. Nothing is known of it where several threads may have called it.
        """
        threads = callers_of_backward()
        losses = losses_in(*threads) if len(threads) == 1 else []
        self._of[backward_pass] = _sum([_value(*given) for given in losses])

    def note_sizes(self, records: "Iterable[Record]") -> None:
        """A pass is over: how large are the gradients that it has left?"""
        parameters = [p for record in records for p in record.members]
        self._sizes |= _sizes_of(parameters)

    def forget_but(self, passes: set[int]) -> None:
        """Forget the losses of all other passes."""
        self._of = {one: loss for one, loss in self._of.items() if one in passes}

    # ---- at the step ------------------------------------------------------------------------------------------------

    def total(self, passes: set[int]) -> float | Tensor | None:
        """The sum of the losses of these passes; None where it is not known of each."""
        return _sum([self._of.get(one) for one in passes])

    def scaled_since(self, parameters: Sequence[Tensor]) -> list[float | Tensor]:
        """By what each of these parameters' gradients was multiplied since its pass: to unscale it, or to clip it.

        Where some of its elements alone were changed, by what it was on the whole.
        """
        now, factors = _sizes_of(parameters), []
        for parameter in parameters:
            before, after = self._sizes.get(parameter), now.get(parameter)
            factors.append(1.0 if before is None or after is None else _ratio(after, before))
        return factors


def _value(loss: Tensor, gradient: Tensor | None) -> float | Tensor:
    """A loss, times the gradient that was given of it: a number, or on a GPU a tensor that is not waited for."""
    value = loss.detach() if gradient is None else (loss.detach() * gradient.detach()).sum()
    return float(value) if answers_at_once(value) else value.reshape(())


def _sum(values: Sequence[float | Tensor | None]) -> float | Tensor | None:
    """None where there is none, or one is not known."""
    total: float | Tensor | None = None
    for value in values:
        if value is None:
            return None
        total = value if total is None else total + value
    return total


def _ratio(after: Tensor, before: Tensor) -> Tensor:
    return torch.where((before > 0) & (after > 0), after / before, 1)


def _sizes_of(parameters: Iterable[Tensor]) -> dict[Tensor, Tensor]:
    """The sums of the magnitudes in gradients that are dense."""
    dense = {p: p.grad.detach() for p in parameters if p.grad is not None and not p.grad.is_sparse}
    if not dense:
        return {}
    dtype = torch.float64 if any(grad.dtype == torch.float64 for grad in dense.values()) else torch.float32
    return dict(zip(dense, torch._foreach_norm(list(dense.values()), 1, dtype=dtype), strict=True))
