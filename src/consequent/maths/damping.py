"""The damping λ: absolute as in the paper, or in units of the inputs."""

from dataclasses import dataclass

import torch
from torch import Tensor

from consequent.maths.checks import check_damping


@dataclass(frozen=True)
class Level:
    """What is added to the diagonal of one Gram matrix or second moment.

    Attributes:
        value: λ itself, or a fraction of the matrix's trace.
        of_trace: whether it is the latter. A matrix of zeros gets 1 then.
    """

    value: float
    of_trace: bool = False

    def __call__(self, matrix: Tensor) -> float | Tensor:
        """λ for a matrix ``[..., n, n]``: a number, or a tensor that broadcasts with it."""
        return self.at(matrix.diagonal(dim1=-2, dim2=-1).sum(-1))[..., None, None] if self.of_trace else self.value

    def of(self, trace: float) -> float:
        """λ for a matrix of this trace."""
        return (self.value * trace if trace > 0 else 1.0) if self.of_trace else self.value

    def at(self, trace: Tensor) -> Tensor:
        """λ for matrices of these traces, in their shape."""
        return torch.where(trace > 0, self.value * trace, 1) if self.of_trace else torch.full_like(trace, self.value)


@dataclass(frozen=True)
class Damping:
    """λ as a user gives it: absolute, or relative to the mean eigenvalue that the inputs would have at full rank."""

    value: float
    relative: bool = False

    @classmethod
    def chosen(cls, damping: float | None, relative_damping: float | None, where: str = "") -> "Damping | None":
        """The damping that a user named; None if neither is given."""
        if damping is not None and relative_damping is not None:
            remedy = "; take the other out: group.pop(…)" if where else ""
            raise ValueError(
                f"damping={damping!r} and relative_damping={relative_damping!r}{where}: give one, λ itself or a "
                f"fraction of the inputs' mean eigenvalue{remedy}"
            )
        if relative_damping is not None:
            check_damping(relative_damping, "relative_damping", where)
            return cls(float(relative_damping), relative=True)
        if damping is not None:
            check_damping(damping, "damping", where)
            return cls(float(damping))
        return None

    def level(self, rows: int, columns: int) -> Level:
        """λ for inputs of this shape: ``ρ · trace(XXᵀ) / min(N, D)`` if it is relative.

        Args:
            rows: N, of all uses, micro-batches and ranks together.
            columns: D, those of biases included.
        """
        if not self.relative or self.value == 0:
            return Level(self.value)
        return Level(self.value / max(min(rows, columns), 1), of_trace=True)

    def __str__(self) -> str:
        return f"{'relative_' if self.relative else ''}damping={self.value:g}"


# Where nobody has chosen one; what speaks for and against them: docs/defaults.md.
DEFAULT = Damping(0.1, relative=True)  # of SGD, whose steps are proportional to the gradient
DEFAULT_OF_OTHERS = Damping(1.0, relative=True)  # of Adam and its kin, whose steps have a length of their own
