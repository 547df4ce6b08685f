"""The damping λ: absolute as in the paper, or in units of the inputs."""

from dataclasses import dataclass

import torch
from torch import Tensor

from consequent.maths.checks import check_damping


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

    def absolute(self, trace: Tensor, rows: int, columns: int) -> float | Tensor:
        """λ for a Gram matrix of the given trace. For a matrix of zeros any relative λ would be 0: it is 1 then.

        Args:
            trace: ``[...]``, the inputs' squared norms added up.
            rows: of the input matrix.
            columns: of it, those of biases included.

        Returns:
            a number, or a tensor that broadcasts with ``[..., n, n]``.
        """
        if not self.relative or self.value == 0:
            return self.value
        return torch.where(trace > 0, self.value / max(rows, 1) * trace, 1)[..., None, None]

    def absolute_for(self, matrix: Tensor, rows: int, columns: int) -> float | Tensor:
        """The same for a Gram matrix (``[..., n, n]``), whose trace is asked for only if that matters."""
        if not self.relative:
            return self.value
        return self.absolute(matrix.diagonal(dim1=-2, dim2=-1).sum(-1), rows, columns)

    def __str__(self) -> str:
        return f"{'relative_' if self.relative else ''}damping={self.value:g}"
