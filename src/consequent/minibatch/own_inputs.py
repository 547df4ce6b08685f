"""A layer whose gradient is corrected with each mini-batch's own inputs: how its forward comes to the product."""

from typing import Any

import torch
from torch import Tensor, nn

from consequent.layers import Operation
from consequent.maths.damping import Damping
from consequent.maths.ridge import LossReduction, loss_divisor
from consequent.maths.torch_private import transforms_are_active
from consequent.minibatch.forwards import Replacement
from consequent.minibatch.model_forward import ModelForward, WeightCalls
from consequent.minibatch.product import FAILED, Calls, Product


class OwnInputs(Replacement):
    """The ``forward`` of a layer that is corrected with each mini-batch's own inputs.

    Args:
        name: of the layer.
        layer: the layer.
        kind: how it is ``Z = W X``.
        damping: λ.
        loss_reduction: how the loss sums up over samples.
        model_forward: of the model.
        same_weight: another layer with the same weight, if there is one: their calls are counted together.

    Attributes:
        weight_owner: that other layer, or this one.
        sharing: all layers that have this one's weight.
        calls: of the weight.
        measured: whether passes are measured for the bound.
        probe: whose gradient tells of backward passes (:mod:`consequent.minibatch.product`).
        failed: factorisations that it told of before.
    """

    def __init__(
        self,
        name: str,
        layer: nn.Module,
        kind: type[Operation],
        damping: Damping,
        loss_reduction: LossReduction,
        model_forward: ModelForward,
        same_weight: "OwnInputs | None" = None,
    ) -> None:
        super().__init__(layer)
        self.name, self.kind, self.damping, self.model_forward = name, kind, damping, model_forward
        self.weight_owner, self.sharing = same_weight or self, [self.module]
        if same_weight is None:
            self.calls = WeightCalls()
            model_forward.weights.append(self.calls)
        else:
            self.calls = same_weight.calls
            same_weight.sharing.append(self.module)
        self.probe = _probe(layer.weight)
        self.measured = False
        self.failed: float | Tensor = 0
        self._loss_reduction = loss_reduction

    @property
    def parameters(self) -> list[Any]:
        """The weight, and the biases of all layers that have it."""
        biases = {id(bias): bias for layer in self.sharing if (bias := getattr(layer, "bias", None)) is not None}
        return [self.module.weight, *biases.values()]

    def told(self) -> Tensor | None:
        """What the passes since the last step have told, and no more from now on; None if nothing."""
        told, self.probe.grad = self.probe.grad, None
        if told is not None:
            self.failed = self.failed + told[FAILED]
        return told

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The outputs: with the product in place of the layer's own where a gradient may be asked for."""
        found = call_of(self.kind, self.module, args, kwargs) if torch.is_grad_enabled() else None
        if found is None:
            return self.plain(self.module, args, kwargs)
        operation, inputs = found
        outputs = operation.call_product(ordinary(inputs), self._product(operation.samples_in(inputs)))
        return outputs if ordinary(inputs) is inputs else outputs.as_subclass(type(inputs))

    def _product(self, own_samples: int) -> Any:
        """The product for a call of the layer.

        Args:
            own_samples: what counts where the layer is called outside of the model.
        """
        current, owner = self.model_forward.current, self.weight_owner
        samples = own_samples if current is None or current.samples is None else current.samples
        divisor = loss_divisor(self._loss_reduction, samples)
        calls = self.calls.in_this_pass if current is not None else Calls()
        calls.number += 1
        is_compiling = torch.compiler.is_compiling()  # which traces the backward pass now
        if is_compiling and current is not None:
            divisor = divisor / self.calls.in_last_pass
        weight, bias = self.module.weight, getattr(self.module, "bias", None)
        if owner.probe.device != weight.device:
            owner.probe = _probe(weight)
        probe, known_calls = owner.probe, None if is_compiling else calls

        def product(operation: Operation, inputs: Tensor) -> Tensor:
            device = inputs.device.type
            if torch.is_autocast_enabled(device) and inputs.dtype is not torch.float64:
                inputs = inputs.to(torch.get_autocast_dtype(device))
            outputs: Tensor = Product.apply(  # type: ignore[no-untyped-call]
                inputs, weight, bias, probe, operation, self.damping, divisor, known_calls, self.measured
            )
            return outputs

        return product


def call_of(
    kind: type[Operation], layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Operation, Tensor] | None:
    """The operation that a call of a layer is, and its inputs; None where the call is to stay plain.

    Plain are calls with a frozen weight, with anything but ordinary tensors, and inside of ``torch.func`` or
    ``torch.jit.trace``.
    """
    if not layer.weight.requires_grad:
        return None
    found = kind.of_call(layer, args, kwargs)
    if found is None or (not torch.compiler.is_compiling() and (transforms_are_active() or _is_tracing())):
        return None
    operation, inputs = found
    if not isinstance(inputs, Tensor) or inputs.layout is not torch.strided or not inputs.is_floating_point():
        return None
    if type(layer.weight) not in (Tensor, nn.Parameter) or not _is_ordinary(inputs):
        return None
    return (operation, inputs) if operation.accepts(inputs) else None


def ordinary(tensor: Tensor) -> Tensor:
    """The tensor without a class of its own."""
    return tensor if type(tensor) in (Tensor, nn.Parameter) else tensor.as_subclass(Tensor)


def _is_tracing() -> bool:
    """Whether ``torch.jit.trace`` is at work, which wants the plain layer."""
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]


def _is_ordinary(tensor: Tensor) -> bool:
    """Whether it is a tensor like any other, though perhaps of a class of its own; not a shard of one, or nested."""
    return type(tensor) in (Tensor, nn.Parameter) or type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__


def _probe(weight: Any) -> Tensor:
    return torch.zeros(3, dtype=torch.float32, device=weight.device, requires_grad=True)
