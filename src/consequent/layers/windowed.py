"""What convolutions and transposed convolutions have in common: the taps of a window meet the pixels of an image."""

from abc import abstractmethod
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import gcd, prod
from typing import Any

import torch
from torch import Tensor

from consequent.layers.operation import Operation

_convolution_backward = torch.ops.aten.convolution_backward.default


@dataclass(frozen=True)
class Windowed(Operation):
    """An operation on images ``[images, channels, *space]``.

    Attributes:
        kernel_size: of the window, in each spatial dimension; likewise the following two.
        stride: from one position of the window to the next, in pixels of the larger image.
        dilation: from one tap of the window to the next, likewise.
        seen: the layer's own settings, to tell whether they have changed.
    """

    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    seen: tuple[Any, ...] = field(default=(), kw_only=True)

    @classmethod
    @abstractmethod
    def _seen_in(cls, layer: Any) -> tuple[Any, ...]:
        """The layer's settings, by which a change is noticed."""

    def is_current(self, layer: Any) -> bool:
        """Whether the layer has the same settings still."""
        is_same: bool = self.seen == self._seen_in(layer) and layer._parameters["weight"].shape == self.weight_shape
        return is_same

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

    @property
    @abstractmethod
    def _geometry(self) -> tuple[Any, ...]:
        """As torch's backward pass wants it: stride, padding, dilation, whether transposed, output padding, groups."""

    def input_gradient(self, output_grad: Tensor, weight: Tensor, inputs: Tensor) -> Tensor:
        """``Wᵀ ΔZ``."""
        return self._backward(output_grad, inputs, weight, (True, False, False))[0]

    def weight_gradient(self, inputs: Tensor, output_grad: Tensor) -> Tensor:
        """``ΔZ Xᵀ``."""
        weight = output_grad.new_empty(self.weight_shape)  # only its shape is looked at
        return self._backward(output_grad, inputs, weight, (False, True, False))[1]

    def gradients(
        self, output_grad: Tensor, inputs: Tensor, weight: Tensor, with_bias: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """``Wᵀ ΔZ``, ``ΔZ Xᵀ`` and the sum of ``ΔZ``."""
        return self._backward(output_grad, inputs, weight, (True, True, with_bias))

    def bias_gradient(self, output_grad: Tensor) -> Tensor:
        """The sum of ``ΔZ`` over images and positions."""
        return output_grad.sum((0, *range(2, output_grad.ndim)))

    def _backward(
        self, output_grad: Tensor, inputs: Tensor, weight: Tensor, wanted: tuple[bool, bool, bool]
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradients: tuple[Tensor, Tensor, Tensor] = _convolution_backward(
            output_grad, inputs, weight, (self.outputs,), *self._geometry, wanted
        )
        return gradients

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
