"""What convolutions and transposed convolutions have in common: the taps of a window meet the pixels of an image."""

from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd, prod
from typing import Any

from torch import Tensor

from consequent.layers.operation import Operation


@dataclass(frozen=True)
class Windowed(Operation):
    """An operation on images ``[images, channels, *space]``.

    Attributes:
        kernel_size: of the window, in each spatial dimension; likewise the following two.
        stride: from one position of the window to the next, in pixels of the larger image.
        dilation: from one tap of the window to the next, likewise.
    """

    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]

    @cached_property
    def spatial_dims(self) -> int:  # type: ignore[override]
        """How many dimensions the space has."""
        return len(self.kernel_size)

    @property
    def taps(self) -> int:
        """Those of the window."""
        return prod(self.kernel_size)

    def of_channels(self, inputs: Tensor, start: int, stop: int) -> tuple[Operation, Tensor]:
        """Some channels of each group only."""
        by_group = inputs.unflatten(1, (self.groups, -1))[:, :, start:stop]
        return replace(self, features=(stop - start) * self.taps), by_group.flatten(1, 2)

    def output_rows(self, outputs: Tensor) -> Tensor:
        """``[groups, images · positions, channels]``."""
        per_group: Tensor = outputs.flatten(2).unflatten(1, (self.groups, -1))  # [images, groups, channels, positions]
        return per_group.permute(1, 0, 3, 2).flatten(1, 2)

    def transposed_norm(self, output_grad: Tensor) -> Tensor:
        """Every pixel is met from so many positions, or every position by so many taps, at most."""
        settings = zip(self.kernel_size, self.stride, self.dilation, strict=True)
        overlap = prod(-(-k // (s // gcd(s, d))) for k, s, d in settings)
        return super().transposed_norm(output_grad) * overlap


def each(size: Any, dims: int) -> tuple[int, ...]:
    """One number for each dimension."""
    return (
        (int(size),) * dims if isinstance(size, int) else tuple(int(s) for s in size) * (dims if len(size) == 1 else 1)
    )
