"""The averaged second moment of one layer's inputs."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from consequent.averages.observer import InputObserver
from consequent.layers import Operation
from consequent.maths.damping import Damping


@dataclass
class Average:
    """The means of ``x xᵀ`` and of x over all rows so far, those of one observation weighing β times those of the next.

    Attributes:
        moment: S, ``[groups, D, D]``.
        mean: s, ``[groups, D]``.
        weight: n, the rows in them, older ones counted less.
        rows: N, of the last observation,
        divisor: and what the losses of its passes divided by: c.
    """

    moment: Tensor
    mean: Tensor
    weight: float
    rows: float
    divisor: float


class AveragedLayer:
    """A layer whose gradients are corrected by averages.

    Args:
        name: of the layer.
        layer: the layer.
        kind: how it is ``Z = W X``.
        damping: λ.
        observer: of its inputs.

    Attributes:
        weight: the layer's at the last observation,
        bias: and its bias, if it has one.
        average: of its inputs; None before they were observed.
    """

    def __init__(
        self, name: str, layer: nn.Module, kind: type[Operation], damping: Damping, observer: InputObserver
    ) -> None:
        self.name, self.kind, self.damping, self.observer = name, kind, damping, observer
        self.layer: Any = layer
        self.average: Average | None = None
        self.weight: Any = layer.weight
        self.bias: Any = getattr(layer, "bias", None)

    @property
    def operation(self) -> Operation:
        """What the layer does now."""
        return self.kind.of(self.layer)

    def corrects_bias(self, *, otherwise: bool) -> bool:
        """Whether a bias is corrected with the weight; as it was before if there is no gradient of the weight now."""
        if self.bias is None or not self.bias.requires_grad:
            return False
        return otherwise if self.weight.grad is None else self.bias.grad is not None

    @property
    def is_unseen(self) -> bool:
        """Whether it is trained, and nothing is known of its inputs."""
        return self.average is None and self.weight.grad is not None

    def check_weight(self) -> None:
        """Raise if the layer was given another weight since: it may be sharded now, and the optimiser may lack it."""
        self.bias = getattr(self.layer, "bias", None)
        if self.layer.weight is not self.weight:
            raise RuntimeError(
                f"layer {self.name!r} has another weight than it had at attach(): if fully_shard() gave it that one, "
                "call fully_shard() first, then make the optimiser, then attach()"
            )

    def check(self, average: Average) -> None:
        """Raise if a saved average is not of this layer's inputs."""
        operation = self.operation
        expected, found = [operation.groups, *[operation.features] * 2], [*getattr(average.moment, "shape", ())]
        if found != expected or [*getattr(average.mean, "shape", ())] != expected[:2]:
            raise ValueError(
                f"the averaged moment of layer {self.name!r} is {found} in the state, and {expected} here: the layer "
                "has changed"
            )
