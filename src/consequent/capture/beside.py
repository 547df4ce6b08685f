"""What is in a gradient besides what the layer's uses put there: penalties, and what comes through ``Wᵀ ΔZ``."""

from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from consequent.layers import Operation
from consequent.layers.operation import at_least_float32
from consequent.maths.probes import PROBES, random_numbers
from consequent.ranks.sharded_tensors import local


@dataclass
class Beside:
    """Parts of the gradients of a weight and its biases that are not ``ΔZ Xᵀ`` of its uses.

    Attributes:
        others: by parameter, what came otherwise than from uses: penalties, uses outside of the layer.
        transposed: a bound of ``‖Σ ΔZ ΔZᵀ‖``, where the weight acted in ``Wᵀ ΔZ``, too (a penalty on gradients).
        from_transposed: the part of the weight's gradient that comes from there, in its shape.
        noted: the :func:`signature` of the gradients when that was found.
        passes: backward passes that went to the parameters alone, through no use.
    """

    others: dict[Tensor, Tensor] = field(default_factory=dict)
    transposed: Tensor | None = None
    from_transposed: Tensor | None = None
    noted: Tensor | None = None
    passes: set[int] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.others) or self.transposed is not None

    def add_other(self, parameter: Tensor, gradient: Tensor) -> None:
        """This part of the parameter's gradient comes from elsewhere: a penalty, a use outside of the layer."""
        known = self.others.get(parameter)
        self.others[parameter] = gradient if known is None else known + gradient

    def add_transposed(self, operation: Operation, output_grad: Tensor, weight_grad: Tensor) -> None:
        """The weight acted in ``Wᵀ ΔZ``, too, which an earlier pass had computed and this one goes through."""
        gradient = weight_grad.detach()
        self.from_transposed = gradient if self.from_transposed is None else self.from_transposed + gradient
        size = operation.transposed_norm(output_grad.detach())
        self.transposed = size if self.transposed is None else self.transposed + size

    def note(self, grads: list[Tensor]) -> None:
        """Remember by these gradients how large the parts were."""
        self.noted = signature(grads)

    def scaled_by(self, grads: list[Tensor]) -> tuple[Tensor, Tensor] | None:
        """By what the gradients were multiplied since they were noted, and how far from a multiple they are.

        None where nothing was noted of them, or not all of them are there. The second number is a fraction, in units
        of eps: rounding, unless somebody wrote to them.
        """
        before = self.noted
        if before is None or len(before) != PROBES * len(grads):
            return None
        now = signature(grads)
        tiny = torch.finfo(now.dtype).tiny
        factor = (now * before).sum() / before.square().sum().clamp(min=tiny)
        error = (now - factor * before).norm() / now.norm().clamp(min=tiny)
        return factor, error / torch.finfo(now.dtype).eps


def signature(grads: list[Tensor]) -> Tensor:
    """A few numbers, linear in the gradients, by which a multiple of them is known again: ``[3 · gradients]``."""
    return torch.cat([_signature_of(local(grad)) for grad in grads])


def _signature_of(grad: Tensor) -> Tensor:
    matrix = at_least_float32(grad).reshape(len(grad), prod(grad.shape[1:]))
    rows, columns = (
        random_numbers(size, matrix.dtype, matrix.device, place) for place, size in enumerate(matrix.shape)
    )
    return ((rows @ matrix) * columns).sum(-1)
