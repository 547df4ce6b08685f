"""What averages do at the steps of one optimiser: when inputs are observed, and the multiplication of ``.grad``.

The map is linear in ``.grad``. So scaling, clipping, accumulated micro-batches and averaging over ranks, whatever of it
has been done before, are exact by themselves.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from consequent.averages.average import Average, AveragedLayer, Inverse
from consequent.averages.ranks import add_up, add_up_shards, local
from consequent.layers import Operation
from consequent.maths.bound import shortening
from consequent.maths.ridge import LossReduction, loss_divisor
from consequent.minibatch.model_forward import ModelForward


class Corrected(NamedTuple):
    """A layer's new gradient, not yet written."""

    layer: AveragedLayer
    operation: Operation
    inverse: Inverse
    plain: Tensor
    update: Tensor

    @property
    def parameters(self) -> list[Tensor]:
        """Whose gradients these are."""
        return [self.layer.weight, self.layer.bias] if self.inverse.ones else [self.layer.weight]


class Averages:
    """The averaged layers that one optimiser trains.

    Args:
        layers: the layers.
        model_forward: of the model.
        averaging: β.
        refresh: T.
        loss_reduction: how the loss sums up over samples.
    """

    def __init__(
        self,
        layers: Sequence[AveragedLayer],
        model_forward: ModelForward,
        averaging: float,
        refresh: int,
        loss_reduction: LossReduction,
    ) -> None:
        self.layers = list(layers)
        self.steps = 0
        self._model_forward, self._averaging, self._refresh = model_forward, averaging, refresh
        self._loss_reduction = loss_reduction
        self._divisor = torch.empty(0)  # what the losses of the passes observed so far divide by
        self._is_observing = False
        self.observe()

    def observe(self, *, at_once: bool = False) -> None:
        """Observe inputs from now on, if the next step is one of those for it, or if it has to be."""
        if self._is_observing or not self.layers or (self.steps % self._refresh and not at_once):
            return
        self._is_observing = True
        self._divisor = torch.zeros((), device=self.layers[0].weight.device)
        self._model_forward.counters.append(self._count)
        self._model_forward.builds_graphs = False
        for layer in self.layers:
            layer.observer.put_on()
        self._model_forward.hold()

    def stop_observing(self) -> None:
        """Leave the passes alone again."""
        if not self._is_observing:
            return
        self._is_observing = False
        self._model_forward.release()
        self._model_forward.counters.remove(self._count)
        for layer in self.layers:
            layer.observer.take_off()

    def _count(self, samples: int) -> None:
        self._divisor.add_(loss_divisor(self._loss_reduction, samples))

    @torch.no_grad()
    def before_step(self, bound: float | None, rate_of: Callable[[Sequence[Tensor]], Any]) -> None:
        """Take in what was observed, and multiply the gradients.

        Args:
            bound: β of the bound; None: there is none.
            rate_of: how far a step moves parameters along their gradients, for the bound.
        """
        for layer in self.layers:
            layer.check_weight()
        if self._is_observing:
            self._take_in()
        corrected = [one for layer in self.layers if (one := _corrected(layer)) is not None]
        factors: list[Tensor | None] = [None] * len(corrected)
        if bound is not None:
            rates = [rate_of(one.parameters) for one in corrected]
            changes = _squared_changes(corrected)
            factors = [shortening(bound, rate**2 * change) for rate, change in zip(rates, changes, strict=True)]
        for one, factor in zip(corrected, factors, strict=True):
            _write(one, factor)
        self.steps += 1
        unseen = [layer for layer in self.layers if layer.average is None and layer.weight.grad is not None]
        self.observe(at_once=bool(unseen))

    def _take_in(self) -> None:
        """Give the layers what was observed on all ranks. The host reads a few numbers, once for all layers."""
        self.stop_observing()
        device = self._divisor.device
        observers = [layer.observer for layer in self.layers]
        counts = [count.to(device) for one in observers for count in (one.calls_inside, one.divisor)]
        *moments, counted = add_up(
            [*(observer.moment for observer in observers), torch.stack([self._divisor, *counts])]
        )
        traces = [moment.diagonal(dim1=-2, dim2=-1).sum().to(device) for moment in moments]
        rows = [moment[0, -1, -1].to(device) for moment in moments]
        numbers = torch.stack([torch.stack(traces), torch.stack(rows)]).tolist()
        common, *own = counted.tolist()
        for layer, moment, trace, row, inside, outside in zip(
            self.layers, moments, *numbers, own[::2], own[1::2], strict=True
        ):
            layer.observer.forget()
            if row > 0 and math.isfinite(trace):
                divisor = (common if inside else 0.0) + outside
                layer.refresh(moment, row, 1.0 if self._loss_reduction == "sum" else divisor, self._averaging)

    def state_dict(self) -> dict[str, Any]:
        """What a later run goes on from."""
        kept = {layer.name: vars(layer.average) for layer in self.layers if layer.average is not None}
        return {
            "steps": self.steps,
            "is_observing": self._is_observing,
            "layers": {name: dict(average) for name, average in kept.items()},
        }

    def read(self, state: Any) -> "State":
        """What a saved state says; raises if it is none of these layers'."""
        try:
            averages = {name: Average(**kept) for name, kept in state["layers"].items()}
            read = State(int(state["steps"]), bool(state["is_observing"]), averages)
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise ValueError(f"this is no state of averages, or one of another version: {error!r}") from error
        known = {layer.name: layer for layer in self.layers}
        unknown = [name for name in averages if name not in known]
        if unknown:
            raise ValueError(f"the state has averages of layer {unknown[0]!r}, which has none here")
        for name, average in averages.items():
            known[name].check(average)
        return read

    def go_on_from(self, state: "State") -> None:
        """Go on from a state."""
        self.stop_observing()
        self.steps = state.steps
        for layer in self.layers:
            layer.start_from(state.averages.get(layer.name))
        self.observe(at_once=state.is_observing)


class State(NamedTuple):
    """What a later run goes on from."""

    steps: int
    is_observing: bool
    averages: dict[str, Average]


def _corrected(layer: AveragedLayer) -> Corrected | None:
    """The layer's new gradient; None where it has no gradient, or nothing has been seen of its inputs."""
    weight, bias = layer.weight, layer.bias
    if weight.grad is None or not weight.requires_grad:
        return None
    ones = bias is not None and bias.requires_grad and bias.grad is not None
    inverse = layer.inverse(ones=ones)
    if inverse is None:
        return None
    operation = layer.kind.of(layer.layer)
    plain = operation.weight_matrix(local(weight.grad)).to(inverse.matrix.dtype)
    if ones:
        plain = torch.cat([plain, local(bias.grad).reshape(operation.groups, -1, 1).to(plain.dtype)], dim=-1)
    return Corrected(layer, operation, inverse, plain, plain @ inverse.matrix)


def _squared_changes(corrected: Sequence[Corrected]) -> list[Tensor]:
    """Of the outputs, relative to the inputs, by a step of rate 1 (:mod:`consequent.maths.bound`)."""
    energies = [(one.plain * one.update).sum() for one in corrected]
    energies = add_up_shards(energies, [one.layer.weight for one in corrected])
    return [_relative(energy, one) for energy, one in zip(energies, corrected, strict=True)]


def _relative(energy: Tensor, corrected: Corrected) -> Tensor:
    _, operation, inverse, plain, _ = corrected
    columns, outputs = plain.shape[-1] * operation.groups, operation.outputs
    change = inverse.divisor * energy / inverse.trace * (columns / outputs)
    return torch.where(inverse.trace > 0, change, 0)


def _write(corrected: Corrected, factor: Tensor | None) -> None:
    layer, operation, inverse, _, update = corrected
    if factor is not None:
        update = update * factor
    weight_grad = local(layer.weight.grad)
    matrix = update[..., :-1] if inverse.ones else update
    whole = weight_grad is layer.weight.grad
    weight_grad.copy_(operation.shaped_like_weight(matrix) if whole else matrix.reshape(weight_grad.shape))
    if inverse.ones:
        bias_grad = local(layer.bias.grad)
        bias_grad.copy_(update[..., -1].reshape(bias_grad.shape))
