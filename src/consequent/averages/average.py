"""The averaged second moment of one layer's inputs, and the inverse that its gradients are multiplied by."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from consequent.averages.observer import InputObserver
from consequent.layers import Operation
from consequent.maths.damping import Damping
from consequent.maths.factorisation import damped_inverse


@dataclass
class Average:
    """S, the mean of ``x xᵀ`` over all rows so far, those of one observation weighing β times those of the next.

    Attributes:
        moment: S, ``[groups, D + 1, D + 1]``; the last column is that of a constant 1.
        weight: n, the rows in it, older ones counted less.
        rows: of the last observation,
        divisor: and what the losses of its passes divided by: c.
    """

    moment: Tensor
    weight: float
    rows: float
    divisor: float

    def with_observation(self, moment: Tensor, rows: float, divisor: float, averaging: float) -> "Average":
        """With one observation more: ``n ← β n + N``, ``S ← S + (XXᵀ/N − S) N/n``."""
        weight = averaging * self.weight + rows
        return Average(torch.lerp(self.moment.to(moment), moment / rows, rows / weight), weight, rows, divisor)


@dataclass
class Inverse:
    """What gradients are multiplied by, ``c (N S + λI)⁻¹``, and what the bound asks for.

    Attributes:
        matrix: ``[groups, columns, columns]``.
        ones: whether the last column is a bias's.
        divisor: c.
        trace: of ``N S``, of all groups.
    """

    matrix: Tensor
    ones: bool
    divisor: float
    trace: Tensor


class AveragedLayer:
    """A layer whose gradients are corrected by averages.

    Args:
        name: of the layer.
        layer: the layer.
        kind: how it is ``Z = W X``.
        damping: λ.
        observer: of its inputs.
    """

    def __init__(
        self,
        name: str,
        layer: nn.Module,
        kind: type[Operation],
        damping: Damping,
        observer: InputObserver,
    ) -> None:
        self.name, self.layer, self.kind, self.damping, self.observer = name, layer, kind, damping, observer
        self._weight_at_attach = layer.weight
        self.average: Average | None = None
        self.failed: int | Tensor = 0  # factorisations
        self._inverse: Inverse | None = None

    @property
    def weight(self) -> Any:
        """The layer's."""
        return self.layer.weight

    @property
    def bias(self) -> Any:
        """The layer's, if it has one."""
        return getattr(self.layer, "bias", None)

    def check_weight(self) -> None:
        """Raise if the layer was given another weight since: it may be sharded now, and the optimiser may lack it."""
        if self.weight is not self._weight_at_attach:
            raise RuntimeError(
                f"layer {self.name!r} has another weight than it had at attach(): if fully_shard() gave it that one, "
                "call fully_shard() first, then make the optimiser, then attach()"
            )

    def refresh(self, moment: Tensor, rows: float, divisor: float, averaging: float) -> None:
        """Take in an observation.

        Args:
            moment: ``Σ x xᵀ`` of all micro-batches and ranks.
            rows: in it.
            divisor: what the losses of these passes divided by.
            averaging: β.
        """
        if self.average is None or self.average.moment.shape != moment.shape:
            self.average = Average(moment / rows, rows, rows, divisor)
        else:
            self.average = self.average.with_observation(moment, rows, divisor, averaging)
        self._inverse = None

    def check(self, average: Average) -> None:
        """Raise if a saved average is not of this layer's inputs."""
        operation = self.kind.of(self.layer)
        expected, found = [operation.groups, *[operation.features + 1] * 2], [*getattr(average.moment, "shape", ())]
        if found != expected:
            raise ValueError(
                f"the averaged moment of layer {self.name!r} is {found} in the state, and {expected} here: the layer "
                "has changed"
            )

    def start_from(self, average: Average | None) -> None:
        """Go on from a saved average; None: from nothing."""
        self.average, self._inverse = average, None

    def inverse(self, *, ones: bool) -> Inverse | None:
        """What the gradient of the weight, with ``ones`` of the bias too, is multiplied by; None at first."""
        if self.average is None:
            return None
        device = self.weight.device
        known = self._inverse
        if known is None or known.ones is not ones or known.matrix.device != device:
            self._inverse = known = self._inverted(self.average, ones=ones)
        return known

    def _inverted(self, average: Average, *, ones: bool) -> Inverse:
        moment = average.moment.to(self.weight.device) * average.rows
        moment = moment if ones else moment[:, :-1, :-1]
        trace = moment.diagonal(dim1=-2, dim2=-1).sum(-1)
        rows, columns = max(round(average.weight), 1), moment.shape[-1]
        level, is_large = self.damping.level(trace, rows, columns), self.damping.is_large(rows, columns, moment.dtype)
        matrix, failed = damped_inverse(moment, level, is_large=is_large)
        self.failed = self.failed + failed
        return Inverse(matrix * average.divisor, ones, average.divisor, trace.sum())
