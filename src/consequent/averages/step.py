"""What averages do at the steps of one optimiser: when inputs are observed, and the multiplication of ``.grad``.

The map is linear in ``.grad``. So scaling, clipping, accumulated micro-batches and averaging over ranks, whatever of it
has been done before, are exact by themselves.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from consequent.averages.average import Average, AveragedLayer, Inverse
from consequent.averages.ranks import add_up, add_up_shards, local
from consequent.layers import Operation
from consequent.maths.bound import rate_in_the_long_run, shortening
from consequent.minibatch.model_forward import ModelForward


class Corrected(NamedTuple):
    """A layer's new gradient, not yet written."""

    layer: AveragedLayer
    operation: Operation
    inverse: Inverse
    plain: Tensor
    update: Tensor


class Averages:
    """The averaged layers that one optimiser trains.

    Args:
        layers: the layers.
        model_forward: of the model.
        averaging: β.
        refresh: T.
    """

    def __init__(
        self, layers: Sequence[AveragedLayer], model_forward: ModelForward, averaging: float, refresh: int
    ) -> None:
        self.layers = list(layers)
        self.steps = 0
        self._model_forward, self._averaging, self._refresh = model_forward, averaging, refresh
        self._samples = torch.empty(0)
        self._is_observing = False
        self.observe()

    def observe(self, *, at_once: bool = False) -> None:
        """InputObserver at the inputs from now on, if the next step is one of those for it, or if it has to be."""
        if self._is_observing or not self.layers or (self.steps % self._refresh and not at_once):
            return
        self._is_observing = True
        self._samples = torch.zeros((), device=self.layers[0].weight.device)
        self._model_forward.counters.append(self._count)
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
        self._samples.add_(samples)

    @torch.no_grad()
    def before_step(self, groups: dict[Tensor, dict[str, Any]], bound: float | None, scale: Any) -> None:
        """Take in what was observed, and multiply the gradients.

        Args:
            groups: the optimiser's group of each parameter.
            bound: β of the bound; None: there is none.
            scale: by which a scaler has multiplied the gradients, where a fused optimiser divides by it.
        """
        for layer in self.layers:
            layer.check_weight()
        if self._is_observing:
            self._take_in()
        corrected = [one for layer in self.layers if (one := _corrected(layer)) is not None]
        factors: list[Tensor | None] = [None] * len(corrected)
        if bound is not None:
            rates = [rate_in_the_long_run(groups[one.layer.weight]) / scale for one in corrected]
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
        device = self._samples.device
        observers = [layer.observer for layer in self.layers]
        counts = torch.stack([self._samples, *(observer.samples.to(device) for observer in observers)])
        *moments, counts = add_up([*(observer.moment for observer in observers), counts])
        traces = [moment.diagonal(dim1=-2, dim2=-1).sum().to(device) for moment in moments]
        rows = [moment[0, -1, -1].to(device) for moment in moments]
        numbers = torch.stack([torch.stack(traces), torch.stack(rows)]).tolist()
        samples, *own_samples = counts.tolist()
        for layer, moment, trace, row, own in zip(self.layers, moments, *numbers, own_samples, strict=True):
            layer.observer.forget()
            if row > 0 and math.isfinite(trace):
                layer.refresh(moment, row, samples + own, self._averaging)

    def state_dict(self) -> dict[str, Any]:
        """What a later run goes on from."""
        kept = {layer.name: vars(layer.average) for layer in self.layers if layer.average is not None}
        return {
            "steps": self.steps,
            "is_observing": self._is_observing,
            "layers": {name: dict(average) for name, average in kept.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        known = {layer.name: layer for layer in self.layers}
        averages = {name: Average(**kept) for name, kept in state["layers"].items()}
        unknown = [name for name in averages if name not in known]
        if unknown:
            raise ValueError(f"the state has averages of layer {unknown[0]!r}, which has none here")
        for name, average in averages.items():
            known[name].check(average)
        self.stop_observing()
        self.steps = int(state["steps"])
        for name, layer in known.items():
            layer.start_from(averages.get(name))
        self.observe(at_once=bool(state["is_observing"]))


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
