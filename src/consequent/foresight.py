"""The paper's picture of a step: the output changes that were wanted, and those that the step really makes."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from consequent.layers import Operation, kind_of
from consequent.maths.ridge import LossReduction, loss_divisor
from consequent.minibatch.forwards import Replacement
from consequent.minibatch.model_forward import first_tensor
from consequent.minibatch.own_inputs import call_of
from consequent.selection import readable_name
from consequent.settings import check_loss_reduction


@dataclass(frozen=True)
class LayerForesight:
    """What one step did to one layer's outputs on the mini-batch it was computed from.

    Attributes:
        wanted: ``‖μ c ΔZ‖``, how far the outputs were to move; c is the loss's divisor.
        produced: ``‖ΔW X‖``, how far the layer's own new weights move them.
        cosine: between both changes; 1 is straight toward the (virtual) targets.
        backprop_cosine: what it would have been with the plain gradient, ``ΔZ XᵀX``.
    """

    wanted: float
    produced: float
    cosine: float
    backprop_cosine: float

    @property
    def ratio(self) -> float:
        """``produced / wanted``; 1 is ideal."""
        return self.produced / self.wanted if self.wanted > 0 else math.nan


class Foresight(dict[str, LayerForesight]):
    """The layers of a step, by name. Printing it shows a table."""

    def __str__(self) -> str:
        width = max(len("layer"), *(len(name) for name in self), 0)
        lines = [f"{'':{width}}                   cosine between wanted and"]
        lines += [f"{'layer':{width}}  produced/wanted  the step  backpropagation"]
        for name, layer in self.items():
            lines.append(f"{name:{width}}  {layer.ratio:15.4f}  {layer.cosine:8.3f}  {layer.backprop_cosine:15.3f}")
        return "\n".join(lines)


def foresight(
    optimizer: Optimizer,
    model: nn.Module,
    closure: Callable[[], Any],
    *,
    loss_reduction: LossReduction = "mean",
) -> Foresight:
    """Take one step, and tell what it did to each layer's outputs on its own mini-batch.

    It stands in the place of ``closure(); optimizer.step()``, for a plain optimiser as well as for a corrected one.

    Args:
        optimizer: whose step is taken.
        model: the model.
        closure: computes the loss and its gradients: ``zero_grad()``, forward pass, ``loss.backward()``.
        loss_reduction: how the loss sums up over samples, as in :func:`consequent.attach`.

    Example:
        >>> import torch, consequent
        >>> _, model = torch.manual_seed(0), torch.nn.Linear(3, 1)
        >>> optimizer = consequent.CSGD(model, lr=1.0, damping=1e-6)
        >>> X = torch.eye(2, 3) + 0.5
        >>> def closure():
        ...     optimizer.zero_grad()
        ...     (0.5 * model(X) ** 2).mean().backward()
        >>> layer = consequent.foresight(optimizer, model, closure)[""]
        >>> round(layer.ratio, 3), round(layer.cosine, 3), layer.backprop_cosine < 0.99
        (1.0, 1.0, True)
    """
    check_loss_reduction(loss_reduction)
    named = {readable_name(name): layer for name, layer in model.named_modules()}
    watched = {name: _Watched(layer) for name, layer in named.items() if kind_of(layer) is not None}
    samples = _Samples(model)
    for replacement in (*watched.values(), samples):
        replacement.put_on()
    try:
        closure()
    finally:
        for replacement in (samples, *watched.values()):
            replacement.take_off()
    with torch.no_grad():
        for layer in watched.values():
            layer.before = [p.detach().clone() for p in layer.parameters]
        optimizer.step()
        rates = {p: float(group["lr"]) for group in optimizer.param_groups for p in group["params"]}
        divisor = float(loss_divisor(loss_reduction, max(samples.number, 1)))
        scales = {name: divisor * rates.get(layer.module.weight, 0.0) for name, layer in watched.items()}
        return Foresight({name: layer.compared(scales[name]) for name, layer in watched.items() if layer.calls})


class _Samples(Replacement):
    """The model's forward, which counts the samples that enter."""

    number = 0

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor = first_tensor((args, kwargs))
        self.number += 0 if tensor is None or not torch.is_grad_enabled() else tensor.shape[0]
        return self.plain(self.module, args, kwargs)


class _Watched(Replacement):
    """A layer's forward, which keeps inputs and output gradients of each call."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        self.calls: list[tuple[Operation, Tensor, Tensor]] = []
        self.before: list[Tensor] = []

    @property
    def parameters(self) -> list[Any]:
        return [p for p in (self.module.weight, getattr(self.module, "bias", None)) if p is not None]

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kind = kind_of(self.module)
        assert kind is not None
        found = call_of(kind, self.module, args, kwargs) if torch.is_grad_enabled() else None
        outputs = self.plain(self.module, args, kwargs)
        if found is not None:
            operation, inputs = found[0], found[1].detach().clone()
            outputs.register_hook(lambda grad: self.calls.append((operation, inputs, grad.detach().clone())))
        return outputs

    def compared(self, scale: float) -> LayerForesight:
        """What the step did.

        Args:
            scale: μ c.
        """
        changes = [p.detach() - before for p, before in zip(self.parameters, self.before, strict=True)]
        plain = [torch.zeros_like(change) for change in changes]
        for operation, inputs, grad in self.calls:
            with torch.enable_grad():
                leaves = [torch.zeros_like(change, requires_grad=True) for change in changes]
                outputs = _outputs(operation, inputs, leaves)
            for total, part in zip(plain, torch.autograd.grad(outputs, leaves, grad), strict=True):
                total -= part
        wanted = [-scale * grad for _, _, grad in self.calls]
        produced = [_outputs(operation, inputs, changes) for operation, inputs, _ in self.calls]
        backprop = [_outputs(operation, inputs, plain) for operation, inputs, _ in self.calls]
        return LayerForesight(_norm(wanted), _norm(produced), _cosine(produced, wanted), _cosine(backprop, wanted))


def _outputs(operation: Operation, inputs: Tensor, parameters: list[Tensor]) -> Tensor:
    """The outputs of a layer with these in the place of its weight and bias."""
    weight, bias = (*parameters, None)[:2]
    assert weight is not None
    return operation.call_product(inputs.to(weight.dtype), lambda same, given: same.apply(given, weight, bias))


def _norm(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))


def _cosine(a: list[Tensor], b: list[Tensor]) -> float:
    norms = _norm(a) * _norm(b)
    product = sum(float((x.double() * y.double()).sum()) for x, y in zip(a, b, strict=True))
    return product / norms if norms > 0 else math.nan
