"""Observing a layer's inputs: the sum of ``x xᵀ`` over the forward passes of a step.

While it is observed, a layer has another ``forward``. In the steps between it has its own, and its passes are plain.
"""

from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn

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
    """

    def __init__(
        self, layer: nn.Module, kind: type[Operation], loss_reduction: LossReduction, model_forward: ModelForward
    ) -> None:
        super().__init__(layer)
        self.kind, self.model_forward = kind, model_forward
        self._loss_reduction = loss_reduction
        self.moment = torch.empty(0)  # Σ x xᵀ, a constant 1 being the last entry of every x: the corner counts rows
        self.calls_inside = torch.empty(0)  # of the model's own forward
        self.divisor = torch.empty(0)  # of the calls outside of it
        self._has_observed = False  # in a forward pass
        self._passed_over = 0  # calls there with gradients off

    def put_on(self) -> None:
        """From now on inputs are observed."""
        super().put_on()
        weight: Any = self.module.weight
        operation, dtype = self.kind.of(self.module), torch.promote_types(weight.dtype, torch.float32)
        size = operation.features + 1
        self.moment = torch.zeros(operation.groups, size, size, dtype=dtype, device=weight.device)
        self.calls_inside = torch.zeros((), dtype=dtype, device=weight.device)
        self.divisor = torch.zeros((), dtype=dtype, device=weight.device)
        self._has_observed, self._passed_over = False, 0

    def forget(self) -> None:
        """Free what was seen."""
        self.moment = self.calls_inside = self.divisor = torch.empty(0)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The plain outputs; the inputs are taken note of."""
        outputs = self.plain(self.module, args, kwargs)
        where = self._where()
        found = None if where is Where.NOWHERE else call_of(self.kind, self.module, args, kwargs)
        if found is not None:
            operation, inputs = found
            with torch.no_grad(), torch.autocast(inputs.device.type, enabled=False):
                operation.call_product(ordinary(inputs), self._add)
                if where is Where.INSIDE:
                    self.calls_inside.add_(1)
                else:
                    self.divisor.add_(loss_divisor(self._loss_reduction, operation.samples_in(inputs)))
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
        self.moment.add_(operation.second_moment(inputs, ones=True))
        return inputs
