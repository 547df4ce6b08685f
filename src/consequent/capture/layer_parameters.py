"""A layer's parameters as they are needed at every call: which are corrected, and whether they have changed."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from consequent.capture.capture import Capture


@dataclass(slots=True)
class LayerParameters:
    """A layer's parameters as they were when last looked at, and which of them are corrected.

    Attributes:
        seen: what all of this follows from.
        held_weight: the optimiser's own, which is another tensor than the layer's where that is sharded.
        held_bias: likewise; None unless it is corrected.
        weight: the layer's; None unless it is corrected.
        bias: likewise.
    """

    seen: tuple[Any, ...]
    held_weight: Tensor
    held_bias: Tensor | None
    weight: nn.Parameter | None
    bias: nn.Parameter | None

    @classmethod
    def of(cls, layer: nn.Module, capture: "Capture") -> "LayerParameters":
        """The layer's, of which the capture wants some."""
        held_weight, held_bias = capture.parameters_of(layer)
        weight, bias = _trainable(layer.weight), _trainable(getattr(layer, "bias", None))
        if weight is not None and not capture.wants(held_weight):
            weight = None
        if bias is not None and (held_bias is None or not capture.wants(held_bias)):
            bias = None
        return cls(_signs_of(layer, capture), held_weight, None if bias is None else held_bias, weight, bias)

    def is_current(self, layer: nn.Module, capture: "Capture") -> bool:
        """Whether nothing has changed since."""
        weight, bias, weight_trains, bias_trains, parameters_seen = self.seen
        now = layer._parameters
        return (
            parameters_seen is capture.parameters_seen
            and weight is now.get("weight")
            and bias is now.get("bias")
            and (weight is None or weight.requires_grad is weight_trains)
            and (bias is None or bias.requires_grad is bias_trains)
        )

    @property
    def may_be_kept(self) -> bool:
        """Not where tensors that were computed stand in for parameters: they would keep their graph alive."""
        return all(sign is None or isinstance(sign, nn.Parameter) for sign in self.seen[:2])


def _signs_of(layer: nn.Module, capture: "Capture") -> tuple[Any, ...]:
    """What shows whether a layer's parameters are still those that they were."""
    weight, bias = layer._parameters.get("weight"), layer._parameters.get("bias")
    weight_trains = weight is not None and weight.requires_grad
    bias_trains = bias is not None and bias.requires_grad
    return weight, bias, weight_trains, bias_trains, capture.parameters_seen


def _trainable(parameter: Any) -> nn.Parameter | None:
    return parameter if isinstance(parameter, nn.Parameter) and parameter.requires_grad else None
