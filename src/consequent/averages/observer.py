"""Observing a layer's inputs: the sum of ``x xᵀ`` over the forward passes of a step.

While it is observed, a layer has another ``forward``. In the steps between it has its own, and its passes are plain.
"""

from typing import Any

import torch
from torch import Tensor, nn

from consequent.layers import Operation
from consequent.maths.ridge import LossReduction, loss_divisor
from consequent.maths.torch_private import in_backward_pass
from consequent.minibatch.forwards import Replacement
from consequent.minibatch.model_forward import ModelForward
from consequent.minibatch.own_inputs import call_of, ordinary


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
        self.divisor = torch.empty(0)  # of the calls outside of the model's own forward
        self._has_observed = False

    def put_on(self) -> None:
        """From now on inputs are observed."""
        super().put_on()
        weight: Any = self.module.weight
        operation, dtype = self.kind.of(self.module), torch.promote_types(weight.dtype, torch.float32)
        size = operation.features + 1
        self.moment = torch.zeros(operation.groups, size, size, dtype=dtype, device=weight.device)
        self.divisor = torch.zeros((), dtype=dtype, device=weight.device)
        self._has_observed = False

    def forget(self) -> None:
        """Free what was seen."""
        self.moment = self.divisor = torch.empty(0)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The plain outputs; the inputs are taken note of."""
        found = call_of(self.kind, self.module, args, kwargs) if self._is_wanted() else None
        if found is not None:
            operation, inputs = found
            self._has_observed = True
            with torch.no_grad(), torch.autocast(inputs.device.type, enabled=False):
                operation.call_product(ordinary(inputs), self._add)
                if self.model_forward.current is None or self.model_forward.current.samples is None:
                    self.divisor.add_(loss_divisor(self._loss_reduction, operation.samples_in(inputs)))
        return self.plain(self.module, args, kwargs)

    def _is_wanted(self) -> bool:
        """Whether this call is one to be observed: not an evaluation, nor what checkpointing computes once more."""
        if self.model_forward.current is not None:
            return not self.model_forward.current.is_repeated
        return torch.is_grad_enabled() and not (in_backward_pass() and self._has_observed)

    def _add(self, operation: Operation, inputs: Tensor) -> Tensor:
        self.moment.add_(operation.second_moment(inputs, ones=True))
        return inputs
