"""Looking at a layer's inputs: the sum of ``x xᵀ`` over the forward passes of a step.

While it is looked at, a layer has another ``forward``; between two looks it has its own, and its passes are plain.
"""

from typing import Any

import torch
from torch import Tensor, nn

from consequent.layers import Operation
from consequent.minibatch.entry import Entry
from consequent.minibatch.forwards import Replacement
from consequent.minibatch.layer import call_of


class Look(Replacement):
    """The ``forward`` of a layer that is looked at.

    Args:
        layer: the layer.
        kind: how it is ``Z = W X``.
        entry: of the model.
    """

    def __init__(self, layer: nn.Module, kind: type[Operation], entry: Entry) -> None:
        super().__init__(layer)
        self.kind, self.entry = kind, entry
        self.moment = torch.empty(0)  # Σ x xᵀ, a constant 1 being the last entry of every x: the corner counts rows
        self.samples = torch.empty(0)  # that came to the layer outside of the model's own forward

    def put_on(self) -> None:
        """From now on inputs are looked at."""
        super().put_on()
        weight: Any = self.module.weight
        operation, dtype = self.kind.of(self.module), torch.promote_types(weight.dtype, torch.float32)
        size = operation.features + 1
        self.moment = torch.zeros(operation.groups, size, size, dtype=dtype, device=weight.device)
        self.samples = torch.zeros((), dtype=dtype, device=weight.device)

    def forget(self) -> None:
        """Free what was seen."""
        self.moment = self.samples = torch.empty(0)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The plain outputs, after a look at the inputs."""
        found = call_of(self.kind, self.module, args, kwargs)
        if found is not None:
            operation, inputs = found
            device = inputs.device.type
            with torch.no_grad(), torch.autocast(device, enabled=False):
                operation.around(inputs, self._add)
                if self.entry.current is None or self.entry.current.samples is None:
                    self.samples.add_(operation.samples_in(inputs))
        return self.plain(self.module, args, kwargs)

    def _add(self, operation: Operation, inputs: Tensor) -> Tensor:
        self.moment.add_(operation.second_moment(inputs, ones=True))
        return inputs
