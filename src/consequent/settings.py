"""What users choose: the damping, and how the loss sums up over samples."""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor

from consequent.checks import check_damping
from consequent.selection import Patterns

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

LossReduction = str | float | Callable[[int], float]


class Options(TypedDict, total=False):
    """The keyword arguments of :class:`consequent.Consequentialism`, for functions that pass them on."""

    relative_damping: float | None
    loss_reduction: LossReduction
    include: Patterns | None
    exclude: Patterns
    check: bool
    foresight: bool
    process_group: "ProcessGroup | None"
    across_ranks: bool


@dataclass(frozen=True)
class Damping:
    """λ: absolute, or a fraction of the mean squared norm of the inputs (the mean diagonal of ``XᵀX``)."""

    value: float
    relative: bool = False

    @classmethod
    def chosen(cls, damping: float | None, relative_damping: float | None, where: str = "") -> "Damping | None":
        """The damping that a user named; the relative one if both are given, None if neither is."""
        if relative_damping is not None:
            check_damping(relative_damping, "relative_damping", where)
            return cls(float(relative_damping), relative=True)
        if damping is not None:
            check_damping(damping, "damping", where)
            return cls(float(damping))
        return None

    def absolute(self, trace: Tensor, rows: int) -> float | Tensor:
        """λ for a Gram matrix of the given trace (``[...]``); of nothing but zeros, any will do, and 1 is safe."""
        if not self.relative or self.value == 0:
            return self.value
        return torch.where(trace > 0, self.value / max(rows, 1) * trace, 1)[..., None, None]

    def absolute_for(self, matrix: Tensor, rows: int) -> float | Tensor:
        """The same for a Gram matrix (``[..., n, n]``), whose trace is asked for only if that matters."""
        if not self.relative:
            return self.value
        return self.absolute(matrix.diagonal(dim1=-2, dim2=-1).sum(-1), rows)

    def __str__(self) -> str:
        return f"{'relative_' if self.relative else ''}damping={self.value:g}"


def check_loss_reduction(loss_reduction: LossReduction) -> None:
    """Raise unless it is one of the three forms."""
    if isinstance(loss_reduction, str):
        if loss_reduction not in ("mean", "sum"):
            raise ValueError(
                f'loss_reduction must be "mean", "sum", a number or a function of the samples, got {loss_reduction!r}'
            )
    elif not callable(loss_reduction):
        _check_divisor(loss_reduction, "loss_reduction")
    elif not _takes_one_argument(loss_reduction):
        raise TypeError(
            f"loss_reduction must take the number of samples, got {loss_reduction!r}; "
            "write lambda samples: …, also where it does not matter"
        )


def _takes_one_argument(function: Callable[..., Any]) -> bool:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of C
        return True
    try:
        signature.bind(1)
    except TypeError:
        return False
    return True


def loss_divisor(loss_reduction: LossReduction, samples: int) -> float:
    """What the loss was divided by: N for a mean over samples."""
    if loss_reduction == "sum":
        return 1.0
    if loss_reduction == "mean":
        return float(samples)
    if samples == 0:
        return 1.0  # nothing came in, and all gradients are zero
    assert not isinstance(loss_reduction, str)
    divisor = loss_reduction(samples) if callable(loss_reduction) else loss_reduction
    _check_divisor(divisor, f"loss_reduction({samples})")
    return float(divisor)


def _check_divisor(divisor: Any, name: str) -> None:
    if isinstance(divisor, bool) or not isinstance(divisor, int | float) or not math.isfinite(divisor) or divisor <= 0:
        raise ValueError(f"{name} must be a finite number > 0 (what the loss is divided by), got {divisor!r}")
