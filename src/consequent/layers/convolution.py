"""``nn.Conv1d``, ``nn.Conv2d`` and ``nn.Conv3d``: the product of the weight with the patches of an image (im2col)."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from consequent.gpu.moments import Window as Geometry
from consequent.layers.autocorrelation import Window, operations, patch_moment_by_autocorrelation
from consequent.layers.operation import Operation
from consequent.layers.patches import pad_sides, patch_moments, patch_rows, patch_sum, positions
from consequent.layers.windowed import Windowed
from consequent.maths.precision import at_least_float32

# Forming a patch costs about as much as this many multiplications per number.
COST_OF_COPYING = 64

_CONVOLVE = (torch.conv1d, torch.conv2d, torch.conv3d)


@dataclass(frozen=True)
class Convolution(Windowed):
    """A convolution.

    Attributes:
        padding: before and after the image, in each spatial dimension.
        padding_mode: what the padding consists of. The product itself takes zeros, the same number on both sides.
    """

    padding: tuple[tuple[int, int], ...]
    padding_mode: str = "zeros"

    module_types: ClassVar[tuple[type[nn.Module], ...]] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)

    @classmethod
    def of(cls, layer: Any) -> "Convolution":
        """The operation that the layer would do now."""
        shape = layer.weight.shape
        return cls(
            groups=layer.groups,
            features=prod(shape[1:]),
            outputs=shape[0],
            weight_shape=shape,
            kernel_size=layer.kernel_size,
            stride=layer.stride,
            padding=_sides(layer.padding, layer.kernel_size, layer.dilation),
            dilation=layer.dilation,
            padding_mode=layer.padding_mode,
        )

    def call_product(self, inputs: Tensor, product: Callable[[Operation, Tensor], Tensor]) -> Tensor:
        """Other padding than zeros, and more of it on one side, is put around the images first."""
        if self.padding_mode == "zeros" and all(before == after for before, after in self.padding):
            return super().call_product(inputs, product)
        mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
        geometry = (self.weight_shape, self.kernel_size, self.stride, self.dilation, ((0, 0),) * self.dims)
        unpadded = Convolution(self.groups, self.features, self.outputs, *geometry)
        if inputs.ndim == self.dims + 1:
            return unpadded.call_product(pad_sides(inputs[None], self.padding, mode), product)[0]
        return unpadded.call_product(pad_sides(inputs, self.padding, mode), product)

    def apply(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``Z``."""
        convolve = _CONVOLVE[self.dims - 1]
        return convolve(inputs, weight, bias, self.stride, self._zeros, self.dilation, self.groups)

    @property
    def _zeros(self) -> tuple[int, ...]:
        return tuple(before for before, _ in self.padding)

    def _backward_arguments(self) -> tuple[Any, ...]:
        return self.stride, self._zeros, self.dilation, False, (0,) * self.dims, self.groups

    def input_rows(self, inputs: Tensor) -> Tensor:
        """``[groups, images · positions, channels · taps]``."""
        padded = pad_sides(inputs, self.padding)
        return patch_rows(padded, self.kernel_size, self.stride, self.dilation, self.groups)

    def second_moment(self, inputs: Tensor, *, ones: bool) -> Tensor:
        """``[groups, D, D]``, or one larger with ``ones``; one operator for the compiler."""
        if not torch.compiler.is_compiling():
            return super().second_moment(inputs, ones=ones)
        sides = [side for pair in self.padding for side in pair]
        moment: Tensor = _moment(inputs, self.weight_shape, self.stride, sides, self.dilation, self.groups, ones)
        return moment

    def as_images(self, inputs: Tensor) -> tuple[Tensor, Geometry] | None:
        """Themselves, in two dimensions and one group."""
        if self.dims != 2 or self.groups > 1:
            return None
        return inputs, Geometry(self.kernel_size, self.stride, self._zeros, self.dilation)  # type: ignore[arg-type]

    def moments(self, inputs: Tensor, *, sums: bool = True) -> tuple[Tensor, Tensor | None, int]:
        """The second moment of patches, from the auto-correlation where that is less work."""
        images, padding = self._without_strides_of_points(inputs)
        stride = [s if k > 1 else 1 for s, k in zip(self.stride, self.kernel_size, strict=True)]
        geometry = (self.kernel_size, stride, self.dilation)
        space = [size + sum(sides) for size, sides in zip(images.shape[2:], padding, strict=True)]
        rows = images.shape[0] * prod(positions(space, *geometry))
        if images.is_cuda:
            return *patch_moments(pad_sides(images, padding), *geometry, self.groups, sums=sums), rows
        images = at_least_float32(images)
        window = Window(self.kernel_size, self.dilation, padding, self.groups)
        if _autocorrelation_pays(window, stride, images):
            moment = patch_moment_by_autocorrelation(images, window)
        else:
            moment, _ = patch_moments(pad_sides(images, padding), *geometry, self.groups)
        if not sums:
            return moment, None, rows
        return moment, patch_sum(pad_sides(_sum_of(images), padding)[0], *geometry).reshape(self.groups, -1), rows

    def _without_strides_of_points(self, inputs: Tensor) -> tuple[Tensor, tuple[tuple[int, int], ...]]:
        """The images and the zeros around them; where the window is a point, only the pixels that it meets."""
        skips = [s if k == 1 else 1 for s, k in zip(self.stride, self.kernel_size, strict=True)]
        if not any(skip > 1 for skip in skips):
            return inputs, self.padding
        images = pad_sides(inputs, self.padding)
        images = images[(slice(None), slice(None), *(slice(None, None, skip) for skip in skips))]
        return images, ((0, 0),) * len(skips)


_SIGNATURE = (
    "(Tensor inputs, SymInt[] weight_shape, SymInt[] stride, SymInt[] sides, SymInt[] dilation, SymInt groups, "
    "bool ones) -> Tensor"
)


@torch.library.custom_op("consequent::patch_moment", mutates_args=(), schema=_SIGNATURE)
def _moment(
    inputs: Tensor,
    weight_shape: list[int],
    stride: list[int],
    sides: list[int],
    dilation: list[int],
    groups: int,
    ones: bool,
) -> Tensor:
    """:meth:`Convolution.second_moment` as one operator, into which ``torch.compile`` does not look."""
    shape, padding = tuple(weight_shape), tuple(zip(sides[::2], sides[1::2], strict=True))
    geometry = (shape[2:], tuple(stride), tuple(dilation), padding)
    return Convolution(groups, prod(shape[1:]), shape[0], shape, *geometry).second_moment(inputs, ones=ones)


@_moment.register_fake
def _(
    inputs: Tensor,
    weight_shape: list[int],
    stride: list[int],
    sides: list[int],
    dilation: list[int],
    groups: int,
    ones: bool,
) -> Tensor:
    size = prod(weight_shape[1:]) + ones
    return at_least_float32(inputs.new_empty(groups, size, size))


def _sides(padding: Any, kernel_size: Any, dilation: Any) -> tuple[tuple[int, int], ...]:
    """The padding before and after the image, in each dimension."""
    if padding == "same":
        totals = [d * (k - 1) for d, k in zip(dilation, kernel_size, strict=True)]
        return tuple((total // 2, total - total // 2) for total in totals)
    if padding == "valid":
        return ((0, 0),) * len(kernel_size)
    return tuple((p, p) for p in padding)


def _autocorrelation_pays(window: Window, stride: list[int], images: Tensor) -> bool:
    if any(s > 1 for s in stride) or prod(window.kernel_size) == 1 or 0 in images.shape:
        return False
    channels, space = images.shape[1], tuple(images.shape[2:])
    features = channels // window.groups * prod(window.kernel_size)
    patch_elements = features * window.groups * prod(window.positions(space))
    return operations(window, space, channels) < patch_elements * (features + COST_OF_COPYING)


def _sum_of(images: Tensor) -> Tensor:
    """``images.sum(0, keepdim=True)``, through memory in its own order, which torch's sum does not always find."""
    if images.stride(1) == 1:
        return images.movedim(1, -1).flatten(1).sum(0).view(1, *images.shape[2:], images.shape[1]).movedim(-1, 1)
    return images.sum(0, keepdim=True)
