"""How large the loss was whose gradient is in ``.grad``, and by what that gradient was multiplied since.

On a CPU alone: the numbers are looked at.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.linalg import vector_norm

from consequent.capture.loss_nodes import outermost_backward
from consequent.capture.torch_internals import answers_at_once, callers_of_backward

if TYPE_CHECKING:
    from consequent.capture.records import Record


class LossValues:
    """The losses of backward passes, as these were called with them: times a scaler's factor, if there is one."""

    def __init__(self) -> None:
        self._of: dict[int, float | None] = {}  # by pass; None: not known
        self._calls: dict[int, Any] = {}  # the call of backward() that a pass is a part of
        self._sizes: dict[Tensor, float] = {}  # of gradients, as the last pass left them

    # ---- in backward passes -----------------------------------------------------------------------------------------

    def __contains__(self, backward_pass: int) -> bool:
        return backward_pass in self._of

    def forget_but(self, passes: set[int]) -> None:
        """Forget all other passes."""
        self._of = {one: loss for one, loss in self._of.items() if one in passes}
        self._calls = {one: call for one, call in self._calls.items() if one in passes}

    def look(self, backward_pass: int) -> None:
        """A pass is under way: what is it for? Passes that are parts of one backward() have one loss together.

        Args:
            backward_pass: the running one. Nothing is known of it where several threads may have called it.
        """
        threads = callers_of_backward()
        call = outermost_backward(*threads) if len(threads) == 1 else None
        if call is None:
            self._of[backward_pass] = None
        elif any(call.mark is other for other in self._calls.values()):
            self._of[backward_pass] = 0.0
        else:
            gradients = call.gradients or [None] * len(call.losses)
            self._of[backward_pass] = _sum(map(_value, call.losses, gradients))
            self._calls[backward_pass] = call.mark

    def note_sizes(self, records: "Iterable[Record]", present: set[Tensor]) -> None:
        """A pass is over: how large are the gradients that it has left?

        Args:
            records: that it has filled.
            present: the parameters of all records.
        """
        kept = {parameter: size for parameter, size in self._sizes.items() if parameter in present}
        self._sizes = kept | _sizes_of([p for record in records for p in record.members])

    # ---- at the step ------------------------------------------------------------------------------------------------

    def total(self, passes: set[int]) -> float | None:
        """The sum of the losses of these passes; None where it is not known of each."""
        return _sum(self._of.get(one) for one in passes)

    def scaled_since(self, parameters: Sequence[Tensor]) -> list[float]:
        """By what each of these parameters' gradients was multiplied since its pass: to unscale it, or to clip it.

        Where some of its elements alone were changed, by what it was on the whole.
        """
        now, factors = _sizes_of(parameters), []
        for parameter in parameters:
            before, after = self._sizes.get(parameter, 0.0), now.get(parameter, 0.0)
            factors.append(after / before if before > 0 and after > 0 else 1.0)
        return factors


def _value(loss: Any, gradient: Tensor | None) -> float | None:
    """A loss, times the gradient that was given of it; None where it is none that can be looked at."""
    if not isinstance(loss, Tensor) or not answers_at_once(loss):
        return None
    value = loss.detach() if gradient is None else (loss.detach() * gradient.detach()).sum()
    return float(value)


def _sum(values: Iterable[float | None]) -> float | None:
    """None where there is none, or one is not known."""
    total: float | None = None
    for value in values:
        if value is None:
            return None
        total = value if total is None else total + value
    return total


def _sizes_of(parameters: Iterable[Tensor]) -> dict[Tensor, float]:
    """The norms of gradients."""
    grads = {p: _values_of(p.grad) for p in parameters if p.grad is not None and answers_at_once(p.grad)}
    return {p: float(vector_norm(g, dtype=torch.promote_types(g.dtype, torch.float32))) for p, g in grads.items()}


def _values_of(grad: Tensor) -> Tensor:
    """A gradient's numbers, of a sparse one those that are there."""
    return grad.detach().coalesce().values() if grad.is_sparse else grad.detach()
