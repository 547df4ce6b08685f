"""What convolutions and transposed convolutions have in common: the taps of a window meet the pixels of an image."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from consequent.layers.operation import Operation


@dataclass(frozen=True)
class Windowed(Operation):
    """An operation on images ``[images, channels, *space]``; a row of X for each image and position of the outputs.

    Attributes:
        kernel_size: of the window, in each spatial dimension; likewise the following two.
        stride: from one position of the window to the next, in pixels of the larger image.
        dilation: from one tap of the window to the next, likewise.
    """

    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]

    @property
    def dims(self) -> int:
        """How many dimensions the space has."""
        return len(self.kernel_size)

    def accepts(self, inputs: Tensor) -> bool:
        """Images, or one image."""
        return inputs.ndim - self.dims in (1, 2)

    def samples_in(self, inputs: Tensor) -> int:
        """The images."""
        return inputs.shape[0] if inputs.ndim == self.dims + 2 else 1

    def call_product(self, inputs: Tensor, product: Callable[[Operation, Tensor], Tensor]) -> Tensor:
        """One image is a batch of one."""
        if inputs.ndim == self.dims + 1:
            return self.call_product(inputs[None], product)[0]
        return product(self, inputs)

    def _backward_arguments(self) -> tuple[Any, ...]:
        """As torch's backward pass wants it: stride, padding, dilation, whether transposed, output padding, groups."""
        raise NotImplementedError

    def input_gradient(self, output_grad: Tensor, weight: Tensor, inputs: Tensor) -> Tensor:
        """``Wᵀ ΔZ``."""
        return self._backward(output_grad, inputs, weight, 0)

    def weight_gradient(self, inputs: Tensor, output_grad: Tensor) -> Tensor:
        """``ΔZ Xᵀ``."""
        weight = output_grad.new_empty(self.weight_shape)  # only its shape is looked at
        return self._backward(output_grad, inputs.to(output_grad.dtype), weight, 1)

    def bias_gradient(self, output_grad: Tensor) -> Tensor:
        """The sum of ``ΔZ`` over images and positions."""
        return output_grad.sum((0, *range(2, output_grad.ndim)))

    def _backward(self, output_grad: Tensor, inputs: Tensor, weight: Tensor, which: int) -> Tensor:
        wanted = [which == 0, which == 1, False]
        arguments = (output_grad, inputs, weight, None, *self._backward_arguments(), wanted)
        gradients = torch.ops.aten.convolution_backward(*arguments)
        gradient: Tensor = gradients[which]
        return gradient

    def output_rows(self, outputs: Tensor) -> Tensor:
        """``[groups, images · positions, channels]``."""
        per_group: Tensor = outputs.flatten(2).unflatten(1, (self.groups, -1))  # [images, groups, channels, positions]
        return per_group.permute(1, 0, 3, 2).flatten(1, 2)
