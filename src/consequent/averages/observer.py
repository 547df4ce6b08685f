"""Observing a layer's inputs: the sums of ``x xᵀ`` and of x over the forward passes of a step.

While it is observed, a layer has another ``forward``. In the steps between it has its own, and its passes are plain.
"""

from collections.abc import Sequence
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn

from consequent.gpu.moments import Source, accepts, add_moments
from consequent.layers import Operation
from consequent.maths.ridge import LossReduction, loss_divisor
from consequent.maths.torch_private import in_backward_pass
from consequent.minibatch.forwards import Replacement
from consequent.minibatch.model_forward import ModelForward
from consequent.minibatch.own_inputs import call_of, ordinary


class Where(Enum):
    """Where a layer is called: in the model's own forward, whose samples are counted there, or outside of it."""

    INSIDE = auto()
    OUTSIDE = auto()
    NOWHERE = auto()


class InputObserver(Replacement):
    """The ``forward`` of a layer while its inputs are observed.

    Args:
        layer: the layer.
        kind: how it is ``Z = W X``.
        loss_reduction: how the loss sums up over samples.
        model_forward: of the model that it is in.

    Attributes:
        moment: where ``Σ x xᵀ`` is summed up,
        sums: and ``Σ x``.
        counts: rows; calls in the model's own forward; the divisor of those outside of it. Of calls in compiled code,
        counted: and of others.
        waiting: small inputs on a GPU that are not in the sums yet, but will be with those of other layers.
    """

    def __init__(
        self, layer: nn.Module, kind: type[Operation], loss_reduction: LossReduction, model_forward: ModelForward
    ) -> None:
        super().__init__(layer)
        self.kind, self.model_forward = kind, model_forward
        self.moment = self.sums = self.counts = torch.empty(0)
        self.counted = [0.0, 0.0, 0.0]
        self.waiting: Source | None = None
        self._may_wait = False
        self._loss_reduction = loss_reduction
        self._has_observed = False  # in a forward pass
        self._passed_over = 0  # calls there with gradients off

    def begin(self, moment: Tensor, sums: Tensor, counts: Tensor) -> None:
        """From now on inputs are observed, and added to these."""
        super().put_on()
        self.moment, self.sums, self.counts = moment, sums, counts
        self.counted = [0.0, 0.0, 0.0]
        self._has_observed, self._passed_over = False, 0

    def forget(self) -> None:
        """Hold nothing of what was seen."""
        self.moment = self.sums = self.counts = torch.empty(0)
        self.waiting = None

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The plain outputs; the inputs are taken note of."""
        outputs = self.plain(self.module, args, kwargs)
        where = self._where()
        found = None if where is Where.NOWHERE else call_of(self.kind, self.module, args, kwargs)
        if found is None:
            return outputs
        operation, inputs = found
        rows, inside = operation.rows(outputs), where is Where.INSIDE
        # Inputs of the model itself may be overwritten until the step.
        self._may_wait = self.waiting is None and inputs.requires_grad and accepts(inputs, rows, operation.features)
        divisor = 0 if inside else loss_divisor(self._loss_reduction, operation.samples_in(inputs))
        device = inputs.device.type
        if not torch.is_autocast_enabled(device):
            operation.call_product(ordinary(inputs.detach()), self._add)
        else:
            dtype = inputs.dtype if inputs.dtype is torch.float64 else torch.get_autocast_dtype(device)
            with torch.autocast(device, enabled=False):
                operation.call_product(ordinary(inputs.detach().to(dtype)), self._add)
        if torch.compiler.is_compiling():
            for place, number in enumerate((rows, int(inside), divisor)):
                self.counts[place].add_(number)
        else:
            self.counted = [sum(pair) for pair in zip(self.counted, (rows, inside, divisor), strict=True)]
        return outputs

    def _where(self) -> Where:
        """Where the call is; nowhere if it is an evaluation, or computed once more by checkpointing.

        Checkpointing of the older kind turns gradients off at first, and computes with them in the backward pass.
        """
        current = self.model_forward.current
        if not torch.is_grad_enabled():
            if current is not None:
                self._passed_over += 1
            return Where.NOWHERE
        if not in_backward_pass():
            self._has_observed = True
        elif current is None and self._passed_over > 0:
            self._passed_over -= 1
            return Where.INSIDE
        elif self._has_observed if current is None else current.is_repeated:
            return Where.NOWHERE
        return Where.OUTSIDE if current is None or current.samples is None else Where.INSIDE

    def _add(self, operation: Operation, inputs: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            moment = operation.second_moment(inputs, ones=True)
            self.moment.add_(moment[:, :-1, :-1])
            self.sums.add_(moment[:, :-1, -1])
            return inputs
        images = operation.as_images(inputs) if self._may_wait else None
        if images is not None and self.moment.dtype is torch.float32:
            self.waiting = Source(*images, self.moment[0], self.sums[0])
            return inputs
        moment, sums, _ = operation.moments(inputs, sums=getattr(self.module, "bias", None) is not None)
        self.moment.add_(moment)
        if sums is not None:
            self.sums.add_(sums)
        return inputs


def add_waiting(observers: Sequence[InputObserver]) -> None:
    """Add what waits."""
    add_moments([one.waiting for one in observers if one.waiting is not None])
