"""What averages do at the steps of one optimiser: when to look, and the multiplication of ``.grad``.

The map is linear in ``.grad``. So scaling, clipping, accumulated micro-batches and averaging over ranks, whatever of it
has been done before, are exact by themselves.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from consequent.averages.layer import Average, AveragedLayer, Inverse
from consequent.averages.ranks import add_up, add_up_shards, local
from consequent.layers import Operation
from consequent.maths.bound import rate_in_the_long_run, shortening
from consequent.minibatch.entry import Entry


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
        entry: of the model.
        averaging: β.
        refresh: T.
    """

    def __init__(self, layers: Sequence[AveragedLayer], entry: Entry, averaging: float, refresh: int) -> None:
        self.layers = list(layers)
        self.steps = 0
        self._entry, self._averaging, self._refresh = entry, averaging, refresh
        self._samples = torch.empty(0)
        self._is_looking = False
        self.look()

    def look(self, *, at_once: bool = False) -> None:
        """Look at the inputs from now on, if the next step is one of those for it, or if it has to be."""
        if self._is_looking or not self.layers or (self.steps % self._refresh and not at_once):
            return
        self._is_looking = True
        self._samples = torch.zeros((), device=self.layers[0].weight.device)
        self._entry.counters.append(self._count)
        for layer in self.layers:
            layer.look.put_on()
        self._entry.hold()

    def look_away(self) -> None:
        """Leave the passes alone again."""
        if not self._is_looking:
            return
        self._is_looking = False
        self._entry.release()
        self._entry.counters.remove(self._count)
        for layer in self.layers:
            layer.look.take_off()

    def _count(self, samples: int) -> None:
        self._samples.add_(samples)

    @torch.no_grad()
    def before_step(self, groups: dict[Tensor, dict[str, Any]], bound: float | None, scale: Any) -> None:
        """Take in what was looked at, and multiply the gradients.

        Args:
            groups: the optimiser's group of each parameter.
            bound: β of the bound; None: there is none.
            scale: by which a scaler has multiplied the gradients, where a fused optimiser divides by it.
        """
        if self._is_looking:
            self._take_in()
        corrected = [one for layer in self.layers if (one := _corrected(layer)) is not None]
        for one in corrected:
            factor = None
            if bound is not None:
                rate = rate_in_the_long_run(groups[one.layer.weight]) / scale
                factor = shortening(bound, rate**2 * _squared_change(one))
            _write(one, factor)
        self.steps += 1
        unseen = [layer for layer in self.layers if layer.average is None and layer.weight.grad is not None]
        self.look(at_once=bool(unseen))

    def _take_in(self) -> None:
        """Give the layers what was seen of their inputs, on all ranks; the host looks at a few numbers of each."""
        self.look_away()
        moments = [layer.look.moment for layer in self.layers]
        *moments, counts = add_up([*moments, torch.stack([self._samples, *(one.look.samples for one in self.layers)])])
        traces = [moment.diagonal(dim1=-2, dim2=-1).sum() for moment in moments]
        rows = [moment[0, -1, -1] for moment in moments]
        entered, *own = counts.tolist()
        numbers = torch.stack([*traces, *rows]).tolist()
        for layer, moment, trace, row, other in zip(
            self.layers, moments, numbers, numbers[len(traces) :], own, strict=False
        ):
            layer.look.forget()
            if row > 0 and math.isfinite(trace):
                layer.refresh(moment, row, entered + other, self._averaging)

    def state_dict(self) -> dict[str, Any]:
        """What a later run goes on from."""
        kept = {layer.name: vars(layer.average) for layer in self.layers if layer.average is not None}
        return {"steps": self.steps, "layers": {name: dict(average) for name, average in kept.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        known = {layer.name: layer for layer in self.layers}
        for name in state["layers"]:
            if name not in known:
                raise ValueError(f"the state has averages of layer {name!r}, which has none here")
        self.look_away()
        self.steps = int(state["steps"])
        for name, kept in state["layers"].items():
            known[name].start_from(Average(**kept))
        self.look()


def _corrected(layer: AveragedLayer) -> Corrected | None:
    """The layer's new gradient; None where it has no gradient, or nothing has been seen of its inputs."""
    weight, bias = layer.weight, layer.bias
    if weight.grad is None:
        return None
    ones = bias is not None and bias.grad is not None
    inverse = layer.inverse(ones=ones)
    if inverse is None:
        return None
    operation = layer.kind.of(layer.layer)
    plain = operation.weight_matrix(local(weight.grad)).to(inverse.matrix.dtype)
    if ones:
        plain = torch.cat([plain, local(bias.grad).reshape(operation.groups, -1, 1).to(plain.dtype)], dim=-1)
    return Corrected(layer, operation, inverse, plain, plain @ inverse.matrix)


def _squared_change(corrected: Corrected) -> Tensor:
    """Of the outputs, relative to the inputs, by a step of rate 1 (:mod:`consequent.maths.bound`)."""
    layer, operation, inverse, plain, update = corrected
    energy = add_up_shards((plain * update).sum(), layer.weight.grad)
    columns, outputs = plain.shape[-1] * operation.groups, operation.outputs
    return inverse.divisor * energy / inverse.trace * (columns / outputs)


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
