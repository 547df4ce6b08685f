"""The damping λ: absolute as in the paper, or in units of the inputs."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from consequent.maths.checks import check_nonnegative


@dataclass(frozen=True)
class Damping:
    """λ as a user gives it: absolute, or relative to the mean eigenvalue that the inputs would have at full rank.

    Example:
        >>> Damping(0.5, relative=True).level(torch.tensor([8.0]), rows=2, columns=3)
        tensor([2.])
    """

    value: float
    relative: bool = False
    _text: ClassVar[str]  # an instance's own, but no field: torch.compile of torch 2.8 cannot trace such a field

    def __post_init__(self) -> None:
        object.__setattr__(self, "_text", repr(self.value))

    @classmethod
    def chosen(cls, damping: float | None, relative_damping: float | None) -> "Damping | None":
        """The damping that a user named; None if neither is given."""
        if damping is not None and relative_damping is not None:
            raise ValueError(
                f"damping={damping!r} and relative_damping={relative_damping!r}: give one, λ itself or a fraction of "
                "the inputs' mean eigenvalue"
            )
        if relative_damping is not None:
            check_nonnegative("relative_damping", relative_damping, "0.01 to 1 are usual")
            return cls(float(relative_damping), relative=True)
        if damping is not None:
            check_nonnegative("damping", damping, "the paper uses 0.001 to 0.03")
            return cls(float(damping))
        return None

    def level(self, trace: Tensor, rows: Any, columns: int) -> Tensor:
        """λ for second moments of these traces: ``ρ · trace(XXᵀ) / min(N, D)`` if it is relative, 1 for zeros.

        Args:
            trace: of the second moments, or of the Gram matrices, which is the same number.
            rows: N, a number or a tensor.
            columns: D, with that of the bias.
        """
        # torch.compile takes text for constant. Numbers that differ from one model to another it would make variables,
        # which it cannot trace inside of an autograd function.
        value = float(self._text) if torch.compiler.is_compiling() else self.value
        if not self.relative or value == 0:
            return torch.full_like(trace, value)
        rank = rows.clamp(1, columns) if isinstance(rows, Tensor) else max(min(rows, columns), 1)
        return torch.where(trace > 0, value * trace / rank, 1)

    def level_of_mean(self, trace: Tensor, rows: Tensor, rank: Tensor) -> Tensor:
        """λ for mean second moments, in their units: ``ρ · trace / rank`` if it is relative, ``1 / N`` for zeros.

        Args:
            trace: of the mean second moments.
            rows: N, what the sums were divided by.
            rank: min(N, D).
        """
        if not self.relative or self.value == 0:
            return self.value / rows
        return torch.where(trace > 0, self.value * trace / rank, 1 / rows)

    def is_large(self, rows: int, columns: int, dtype: torch.dtype) -> bool:
        """Whether it is above all rounding of a second moment in this precision, whatever the inputs are."""
        return self.relative and float(self._text) > 1e3 * torch.finfo(dtype).eps * max(min(rows, columns), 1)

    def __str__(self) -> str:
        return f"{'relative_' if self.relative else ''}damping={self.value:g}"


DEFAULT_OF_SGD = Damping(0.1, relative=True)  # whose steps are proportional to the gradient
DEFAULT = Damping(1.0, relative=True)  # of Adam and its kin, whose steps have a length of their own
