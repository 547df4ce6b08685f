"""A layer's parameters as a hook needs them at every call: which are corrected, and whether they have changed."""

from dataclasses import dataclass
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from consequent import layers
from consequent.autograd import accumulator, accumulator_beside
from consequent.dtensor import is_sharded
from consequent.layers import Layer

if TYPE_CHECKING:
    from consequent.capture import Capture


@dataclass(slots=True)
class LayerParameters:
    """A layer's parameters as they were when last looked at, and which of them are corrected.

    The leaves of the graph are the optimiser's own parameters, unless those are sharded: then they are put together for
    the forward and the backward pass only.
    """

    seen: tuple[Any, ...]  # what all of this follows from,
    shape: torch.Size  # and the weight's
    held_weight: Tensor  # the optimiser's
    held_bias: Tensor | None  # None unless it is corrected
    weight: nn.Parameter | None  # the leaf; None unless it is corrected
    bias: nn.Parameter | None
    outputs: int  # per row
    features: int  # likewise
    is_sharded: bool

    @classmethod
    def of(cls, layer: Layer, capture: "Capture") -> "LayerParameters":
        """The layer's, of which the capture wants some."""
        held_weight, held_bias = capture.parameters_of(layer)
        weight, bias = _trainable(layer.weight), _trainable(layer.bias)
        if weight is not None and not capture.wants(held_weight):
            weight = None
        if bias is not None and (held_bias is None or not capture.wants(held_bias)):
            bias = None
        return cls(
            seen=_signs_of(layer, capture),
            shape=layer.weight.shape,
            held_weight=held_weight,
            held_bias=None if bias is None else held_bias,
            weight=weight,
            bias=bias,
            outputs=layers.outputs(layer),
            features=layers.features(layer),
            is_sharded=is_sharded(held_weight),
        )

    def is_current(self, layer: Layer, capture: "Capture") -> bool:
        """Whether nothing has changed since."""
        return all(map(is_, self.seen, _signs_of(layer, capture))) and self.shape == layer.weight.shape

    @property
    def may_be_kept(self) -> bool:
        """Not where tensors that were computed stand in for parameters: they would keep their graph alive."""
        return all(sign is None or isinstance(sign, nn.Parameter) for sign in self.seen[:2])

    def leaves(self, output: Tensor) -> list[Tensor | Node]:
        """What tells whether a backward pass through the output adds to ``.grad``: the first that it does add to."""
        found: list[Tensor | Node] = [leaf for leaf in (self.weight, self.bias) if leaf is not None]
        if self.is_sharded:  # the whole weight has no memory then, which asking for its node would need
            return [accumulator(leaf) for leaf in found if isinstance(leaf, Tensor)]
        assert isinstance(found[0], Tensor)
        found[0] = accumulator_beside(output, found[0]) or found[0]
        return found


def _signs_of(layer: Layer, capture: "Capture") -> tuple[Any, ...]:
    """What shows whether a layer's parameters are still those that they were: compared by identity."""
    weight, bias = layer._parameters.get("weight"), layer._parameters.get("bias")
    weight_trains = weight is not None and weight.requires_grad
    bias_trains = bias is not None and bias.requires_grad
    return weight, bias, weight_trains, bias_trains, capture.parameters_seen


def _trainable(parameter: Any) -> nn.Parameter | None:
    return parameter if isinstance(parameter, nn.Parameter) and parameter.requires_grad else None
