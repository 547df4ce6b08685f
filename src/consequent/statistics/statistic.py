"""What a statistic of a weight's inputs is: kept from the backward passes to the step, and solved with there."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from consequent.capture.use import Use
from consequent.engines.inverse_factor import InverseFactor
from consequent.layers import Operation
from consequent.maths.damping import Damping

if TYPE_CHECKING:
    from consequent.capture.records import Record
    from consequent.statistics.solution import Solution


@dataclass(frozen=True, eq=False)
class Statistic(ABC):
    """What is kept of the inputs of one weight, for all uses whose gradients are in ``.grad``.

    It is replaced by another one when something is added, and not written to from outside.

    Attributes:
        uses: calls of layers with this weight, in their order; at least one.
        features: D, the columns of X that belong to the weight; 0 where only biases are trained.
        biases: those that are solved for together with the weight, a column of X each, 1 in the rows of their uses.
        rows: of X, ``N × positions`` of all uses and ranks.
    """

    uses: tuple[Use, ...]
    features: int
    biases: tuple[Tensor, ...]
    rows: int

    @abstractmethod
    def add(self, use: Use) -> "Statistic":
        """With one use more."""

    @abstractmethod
    def solve(self, record: "Record", damping: Damping, *, may_wait: bool) -> "Solution":
        """The definition: the consequentialist gradient for what is in ``.grad`` of the record's parameters now.

        Args:
            record: of the gradient.
            damping: λ.
            may_wait: whether the host may wait for the device to look at a result.
        """

    def factor_for(self, damping: Damping) -> InverseFactor | None:
        """The factor of the inputs' second moment plus this λ, if it was made already."""
        return None

    @property
    def members(self) -> list[Tensor]:
        """The parameters that are solved for together."""
        first = self.uses[0]
        return [first.weight, *self.biases] if first.trains_weight else list(self.biases)

    @property
    def operation(self) -> Operation:
        """That of a layer which uses the weight (all of them have the same shape)."""
        return self.uses[0].operation

    @property
    def columns(self) -> int:
        """Of X: the features, and a constant 1 for each bias."""
        return self.features + len(self.biases)


def with_bias_of(use: Use, biases: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The biases, and the use's own one if that is not among them yet."""
    if use.bias is None or any(use.bias is bias for bias in biases):
        return biases
    return (*biases, use.bias)
