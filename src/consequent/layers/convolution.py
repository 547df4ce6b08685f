"""``nn.Conv1d``, ``nn.Conv2d`` and ``nn.Conv3d``: the product of the weight with the patches of an image (im2col)."""

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from consequent.engines.gpu.kernels.choice import patch_moment_by_kernel, patch_moments_by_kernel
from consequent.layers.autocorrelation import Window, operations, patch_moment_by_autocorrelation
from consequent.layers.operation import Canonical, at_least_float32, fill_ones
from consequent.layers.patches import pad_sides, patch_moment, patch_rows, patch_sum, positions
from consequent.layers.windowed import Windowed, each

# Forming a patch costs about as much as this many multiplications per entry.
COST_OF_COPYING = 64

_CONVOLVE = (torch.conv1d, torch.conv2d, torch.conv3d)


@dataclass(frozen=True)
class Convolution(Windowed):
    """Canonical inputs are ``[images, channels, *space]``, with zeros around them as ``padding`` says, if any.

    Attributes:
        padding: before and after the image, in each spatial dimension.
        padding_mode: what the padding consists of; canonical operations have zeros, the same number on both sides.
    """

    padding: tuple[tuple[int, int], ...]
    padding_mode: str = "zeros"

    module_types: ClassVar[tuple[type[nn.Module], ...]] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)

    # ---- from a layer ---------------------------------------------------------------------------------------------

    @classmethod
    def of(cls, layer: Any) -> Self:
        """The operation that the layer would do now."""
        shape = tuple(layer.weight.shape)
        return cls(
            groups=layer.groups,
            features=prod(shape[1:]),
            outputs=shape[0],
            weight_shape=shape,
            kernel_size=tuple(layer.kernel_size),
            stride=tuple(layer.stride),
            padding=tuple(_sides(layer.padding, layer.kernel_size, layer.dilation)),
            dilation=tuple(layer.dilation),
            padding_mode=layer.padding_mode,
            seen=cls._seen_in(layer),
        )

    @classmethod
    def _seen_in(cls, layer: Any) -> tuple[Any, ...]:
        return (layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.groups, layer.padding_mode)

    def canonical(self, inputs: Tensor) -> Canonical | None:
        """The call with these inputs, with or without a leading dimension of images."""
        further_dims = inputs.ndim - self.spatial_dims
        if further_dims not in (1, 2):
            return None
        is_batched = further_dims == 2
        images = inputs if is_batched else inputs.unsqueeze(0)
        operation = self.canonical_form
        if operation.padding != self.padding or self.padding_mode != "zeros":
            images = self._padded(images)
        if is_batched:
            return Canonical(operation, images, images.shape[0], None)
        space = positions(self._space_of(images, operation), self.kernel_size, self.stride, self.dilation)
        return Canonical(operation, images, 1, (self.outputs, *space))

    @cached_property
    def canonical_form(self) -> "Convolution":
        """The same on images that are padded already, if they have to be."""
        if self.padding_mode == "zeros" and all(before == after for before, after in self.padding):
            return replace(self, seen=())
        return replace(self, padding=((0, 0),) * self.spatial_dims, padding_mode="zeros", seen=())

    def _padded(self, images: Tensor) -> Tensor:
        mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
        return pad_sides(images, self.padding, mode)

    @staticmethod
    def _space_of(images: Tensor, operation: "Convolution") -> list[int]:
        return [size + sum(sides) for size, sides in zip(images.shape[2:], operation.padding, strict=True)]

    def product_called(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Canonical | None:
        """A call of ``F.conv·d``, whatever its settings."""
        if function is not _CONVOLVE[self.spatial_dims - 1]:
            return None
        names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if not isinstance(given.get("input"), Tensor) or given.get("groups", 1) != self.groups:
            return None
        dilation = each(given.get("dilation", 1), self.spatial_dims)
        called = replace(
            self,
            stride=each(given.get("stride", 1), self.spatial_dims),
            padding=tuple(_sides(given.get("padding", 0), self.kernel_size, dilation)),
            dilation=dilation,
            padding_mode="zeros",
        )
        return called.canonical(given["input"])

    # ---- the product ------------------------------------------------------------------------------------------------

    def apply(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``Z``."""
        convolve = _CONVOLVE[self.spatial_dims - 1]
        return convolve(inputs, weight, bias, self.stride, self._zeros, self.dilation, self.groups)

    @cached_property
    def _zeros(self) -> tuple[int, ...]:
        return tuple(before for before, _ in self.padding)

    @cached_property
    def _geometry(self) -> tuple[Any, ...]:
        none = (0,) * self.spatial_dims
        return self.stride, self._zeros, self.dilation, False, none, self.groups

    # ---- as matrices ------------------------------------------------------------------------------------------------

    def input_rows(self, inputs: Tensor) -> Tensor:
        """``[groups, images · positions, channels · taps]``."""
        padded = pad_sides(inputs, self.padding)
        return patch_rows(padded, self.kernel_size, self.stride, self.dilation, self.groups)

    def second_moment(self, inputs: Tensor, *, ones: bool) -> Tensor:
        """``[groups, D, D]``, or one larger with ``ones``: from the auto-correlation where that is less work."""
        moment = patch_moment_by_kernel(self, inputs, ones=ones)
        if moment is not None:
            return moment
        images, padding = self._without_strides_of_points(at_least_float32(inputs))
        stride = [s if k > 1 else 1 for s, k in zip(self.stride, self.kernel_size, strict=True)]
        window = Window(self.kernel_size, self.dilation, padding, self.groups)
        if _autocorrelation_pays(window, stride, images):
            moment = patch_moment_by_autocorrelation(images, window, room=int(ones))
        else:
            padded = pad_sides(images, padding)
            moment = patch_moment(padded, self.kernel_size, stride, self.dilation, self.groups, room=int(ones))
        if ones:
            sums, rows = patch_sum(pad_sides(_sum_of(images), padding)[0], self.kernel_size, stride, self.dilation)
            fill_ones(moment, sums.view(self.groups, -1), images.shape[0] * rows)
        return moment

    @property
    def inputs_per_row(self) -> int:
        """The pixels from one position of the window to the next."""
        return self.weight_shape[1] * self.groups * prod(self.stride)

    def second_moments(self, inputs: list[Tensor], *, ones: bool) -> Tensor:
        """``[layers, groups, D, D]``."""
        together = patch_moments_by_kernel(self, inputs, ones=ones)
        return super().second_moments(inputs, ones=ones) if together is None else together

    def _without_strides_of_points(self, inputs: Tensor) -> tuple[Tensor, tuple[tuple[int, int], ...]]:
        """The images and the zeros around them; where the window is a point, only the pixels that it meets."""
        skips = [s if k == 1 else 1 for s, k in zip(self.stride, self.kernel_size, strict=True)]
        if not any(skip > 1 for skip in skips):
            return inputs, self.padding
        images = pad_sides(inputs, self.padding)
        images = images[(slice(None), slice(None), *(slice(None, None, skip) for skip in skips))]
        return images, ((0, 0),) * len(skips)

    def interference(self, inputs: Tensor, samples: int, *, ones: bool) -> Tensor:
        """``[samples, samples]``: no patches are formed; a pixel that is seen by m patch entries counts m times."""
        images = pad_sides(inputs, self.padding)
        output_size = positions(images.shape[2:], self.kernel_size, self.stride, self.dilation)
        weighted = images
        for dim in range(self.spatial_dims):
            seen = images.new_zeros(images.shape[2 + dim])
            for tap in range(self.kernel_size[dim]):
                start = tap * self.dilation[dim]
                seen[start : start + (output_size[dim] - 1) * self.stride[dim] + 1 : self.stride[dim]] += 1
            weighted = weighted * seen.view(-1, *[1] * (self.spatial_dims - 1 - dim))
        correlations = weighted.flatten(1) @ images.flatten(1).T
        return correlations + prod(output_size) if ones else correlations


def _sides(padding: Any, kernel_size: Any, dilation: Any) -> list[tuple[int, int]]:
    """The padding before and after the image, in each dimension."""
    if padding == "same":
        totals = [d * (k - 1) for d, k in zip(dilation, kernel_size, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    if padding == "valid":
        return [(0, 0)] * len(kernel_size)
    return [(p, p) for p in each(padding, len(kernel_size))]


def _autocorrelation_pays(window: Window, stride: list[int], images: Tensor) -> bool:
    if any(s > 1 for s in stride) or prod(window.kernel_size) == 1 or 0 in images.shape:
        return False
    if images.is_cuda:  # by default cuDNN rounds to TF32, and the difference of two rounded sums may be indefinite
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
