"""A layer whose gradient is corrected with each mini-batch's own inputs: how its forward comes to the product."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from consequent.layers import Operation
from consequent.maths.damping import Damping
from consequent.maths.ridge import LossReduction, loss_divisor
from consequent.maths.torch_private import transforms_are_active
from consequent.minibatch.forwards import Replacement
from consequent.minibatch.gather import Calls, Gathered, Gathering, Way
from consequent.minibatch.model_forward import ModelForward, WeightCalls
from consequent.minibatch.product import Product


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
        gatherer: of forward passes,
        place: the layer's place in there,
        places: and of all layers that have its weight.
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
        self.place = 0
        self.places: list[int] = []
        self.gatherer: Gatherer | None = None
        self._loss_reduction = loss_reduction

    @property
    def parameters(self) -> list[Any]:
        """The weight, and the biases of all layers that have it."""
        biases = {id(bias): bias for layer in self.sharing if (bias := getattr(layer, "bias", None)) is not None}
        return [self.module.weight, *biases.values()]

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
        gathering = None if current is None else current.gathering
        alias = None if gathering is None else gathering.aliases.get(id(weight))
        if gathering is not None and alias is not None:
            weight, bias, probe = alias, gathering.aliases.get(id(bias), bias), None
        else:
            gathering = None
            if owner.probe.device != weight.device:
                owner.probe = _probe(weight)
            probe = owner.probe
        way = Way(self.damping, divisor, None if is_compiling else calls, self.measured, gathering, self.place)

        def product(operation: Operation, inputs: Tensor) -> Tensor:
            device = inputs.device.type
            if torch.is_autocast_enabled(device) and inputs.dtype is not torch.float64:
                inputs = inputs.to(torch.get_autocast_dtype(device))
            outputs: Tensor = Product.apply(inputs, weight, bias, probe, operation, way)  # type: ignore[no-untyped-call]
            return outputs

        return product


class Gatherer:
    """Makes what gathers the calls of a forward pass.

    Args:
        layers: with own inputs.
    """

    def __init__(self, layers: Sequence[OwnInputs]) -> None:
        self.layers = list(layers)
        for layer in self.layers:
            layer.places = []
        for place, layer in enumerate(self.layers):
            layer.place, layer.gatherer = place, self
            layer.weight_owner.places.append(place)
        self.probe = torch.empty(0)

    def __call__(self) -> Gathering | None:
        """For one forward pass; None where nothing is gained by it, or nothing is trained."""
        weight = self.layers[0].module.weight
        if not gathers(weight) or transforms_are_active() or _is_tracing():
            return None
        if self.probe.device != weight.device or len(self.probe) == 0:
            self.probe = torch.zeros(len(self.layers), 3, device=weight.device, requires_grad=True)
        layers = [Gathered(one.module.weight, getattr(one.module, "bias", None)) for one in self.layers]
        if not any(one.weight.requires_grad for one in layers) or any(
            one.weight.device != weight.device for one in layers
        ):
            return None
        return Gathering(layers, self.probe)

    def told(self, places: list[list[int]]) -> Tensor | None:
        """What the passes since the last step have told of some layers, and no more from now on; None if nothing."""
        told = self.probe.grad
        if told is None:
            return None
        if places == [[place] for place in range(len(self.layers))]:
            self.probe.grad = None
            return told
        rows = torch.stack([told[own].sum(0) for own in places])
        told[[place for own in places for place in own]] = 0
        return rows


def told_of(layers: Sequence[OwnInputs]) -> Tensor | None:
    """What the passes since the last step have told of layers on one device, ``[layers, 3]``; None if nothing."""
    gatherer = layers[0].gatherer
    found = None if gatherer is None else gatherer.told([layer.places for layer in layers])
    own = [layer.probe.grad for layer in layers]
    if any(told is not None for told in own):
        rows = torch.stack(
            [torch.zeros_like(layer.probe) if told is None else told for layer, told in zip(layers, own, strict=True)]
        ).detach()
        found = rows if found is None else found + rows
        for layer in layers:
            layer.probe.grad = None
    return found


def gathers(weight: Any) -> bool:
    """Whether what a GPU is asked for is worth gathering: it takes the host longer than the device."""
    return weight.is_cuda and type(weight) in (Tensor, nn.Parameter)


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
