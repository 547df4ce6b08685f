"""``nn.ConvTranspose1d``, ``nn.ConvTranspose2d`` and ``nn.ConvTranspose3d``: a product with patches of spread pixels.

At output position q, a transposed convolution with stride s, padding π and dilation d computes

    ``z[o, q] = Σ_{c,k} W[c, o, k] · x̃[c, k, q]``,    ``x̃[c, k, q] = x[c, p]`` where ``p · s = q + π − k · d``, else 0

(c: channels, k: taps, p: pixels). So a row of X is an output position, and its features are the x̃ of all channels and
taps: a patch, last tap first, of the image with s − 1 zeros between its pixels.

Most of these features are zeros. Two taps meet pixels at the same output positions only if ``(k − k') · d`` is a
multiple of s. Otherwise their block of the second moment is zero. The taps that do go together are an ordinary
convolution, with stride 1, of the image without zeros between its pixels; so the second moment is a few second moments
of small convolutions (for a 4 × 4 kernel with stride 2: four of 2 × 2 kernels).
"""

from dataclasses import dataclass
from itertools import product
from math import gcd, prod
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from consequent.layers.convolution import Convolution
from consequent.layers.operation import Operation
from consequent.layers.patches import Sides, Sizes, pad_sides, patch_rows
from consequent.layers.windowed import Windowed
from consequent.maths.precision import at_least_float32

_CONVOLVE = (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)


@dataclass(frozen=True)
class TransposedConvolution(Windowed):
    """A transposed convolution of images without zeros between their pixels.

    The weight is ``[channels, out_channels / groups, *kernel_size]``. Features are in the order (channel of the group,
    tap), as in the weight.

    Attributes:
        stride: from one pixel of the input to the next, in pixels of the output (s).
        dilation: from one tap to the next, in pixels of the output (d).
        padding: pixels of the output that are left out at either end, in each spatial dimension (π).
        output_padding: pixels that the output is longer at its end, likewise.

    Example:
        >>> operation = TransposedConvolution.of(nn.ConvTranspose1d(1, 1, 2, stride=2))
        >>> operation.input_rows(torch.tensor([[[3.0, 5.0]]]))  # tap 0 meets the even positions, tap 1 the odd ones
        tensor([[[3., 0.],
                 [0., 3.],
                 [5., 0.],
                 [0., 5.]]])
        >>> operation.second_moment(torch.tensor([[[3.0, 5.0]]]), ones=False)
        tensor([[[34.,  0.],
                 [ 0., 34.]]])
    """

    padding: tuple[int, ...]
    output_padding: tuple[int, ...]

    has_rows_of_outputs: ClassVar[bool] = False  # the weight is [channels, outputs, …]
    module_types: ClassVar[tuple[type[nn.Module], ...]] = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)

    # ---- from a layer ---------------------------------------------------------------------------------------------

    @classmethod
    def of(cls, layer: Any) -> "TransposedConvolution":
        """The operation that the layer would do now."""
        return cls._of(layer, layer.output_padding)

    @classmethod
    def _of(cls, layer: Any, output_padding: tuple[int, ...]) -> "TransposedConvolution":
        channels, outputs, *taps = shape = layer.weight.shape
        return cls(
            groups=layer.groups,
            features=channels // layer.groups * prod(taps),
            outputs=outputs * layer.groups,
            weight_shape=shape,
            kernel_size=layer.kernel_size,
            stride=layer.stride,
            padding=layer.padding,
            output_padding=output_padding,
            dilation=layer.dilation,
        )

    @classmethod
    def of_call(cls, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Operation, Any] | None:
        """The operation with the ``output_padding`` that makes outputs of the ``output_size`` that is asked for."""
        inputs = args[0] if args else kwargs.get("input")
        output_size = args[1] if len(args) > 1 else kwargs.get("output_size")
        if output_size is None or inputs is None:
            return cls.of(layer), inputs
        dims = len(layer.kernel_size)
        sizes, least = list(output_size)[-dims:], cls._of(layer, (0,) * dims).output_space(inputs.shape[-dims:])
        more = tuple(size - minimum for size, minimum in zip(sizes, least, strict=False))
        if len(more) < dims or any(not 0 <= m < s for m, s in zip(more, layer.stride, strict=True)):
            return None  # torch has its own words for this
        return cls._of(layer, more), inputs

    def accepts(self, inputs: Tensor) -> bool:
        """Images, or one image, of which something is left."""
        return super().accepts(inputs) and all(size > 0 for size in self.output_space(inputs.shape[-self.dims :]))

    def output_space(self, space: Sizes) -> list[int]:
        """The size of the outputs in each spatial dimension, for inputs of these sizes."""
        settings = zip(
            space, self.kernel_size, self.stride, self.padding, self.output_padding, self.dilation, strict=True
        )
        return [(size - 1) * s - 2 * pad + d * (k - 1) + more + 1 for size, k, s, pad, more, d in settings]

    # ---- the product ------------------------------------------------------------------------------------------------

    def apply(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``Z``."""
        convolve = _CONVOLVE[self.dims - 1]
        geometry = (self.stride, self.padding, self.output_padding, self.groups, self.dilation)
        return convolve(inputs, weight, bias, *geometry)

    def _backward_arguments(self) -> tuple[Any, ...]:
        return self.stride, self.padding, self.dilation, True, self.output_padding, self.groups

    # ---- as matrices ------------------------------------------------------------------------------------------------

    def weight_matrix(self, weight: Tensor) -> Tensor:
        """``[groups, out_channels / groups, channels / groups · taps]``."""
        per_group: Tensor = weight.unflatten(0, (self.groups, -1))  # [groups, channels, out_channels, *taps]
        return per_group.transpose(1, 2).flatten(2)

    def shaped_like_weight(self, matrix: Tensor) -> Tensor:
        """``[channels, out_channels / groups, *taps]``."""
        per_group: Tensor = matrix.unflatten(-1, (-1, *self.kernel_size))  # [groups, out_channels, channels, *taps]
        return per_group.transpose(1, 2).flatten(0, 1)

    def input_rows(self, inputs: Tensor) -> Tensor:
        """``[groups, images · output positions, channels · taps]``."""
        spread = self._spread(inputs)
        rows = patch_rows(spread, self.kernel_size, (1,) * self.dims, self.dilation, self.groups)
        taps: Tensor = rows.unflatten(-1, (-1, *self.kernel_size))
        return taps.flip(list(range(3, 3 + self.dims))).flatten(2)

    def _spread(self, inputs: Tensor) -> Tensor:
        """The pixels with s − 1 zeros between them and zeros around, so that every output position is a patch."""
        reach = [d * (k - 1) for d, k in zip(self.dilation, self.kernel_size, strict=True)]
        sizes = [size + r for size, r in zip(self.output_space(inputs.shape[2:]), reach, strict=True)]
        to, of = [], []
        for size, pixels, s, pad, r in zip(sizes, inputs.shape[2:], self.stride, self.padding, reach, strict=True):
            start = r - pad  # of pixel 0; below 0 there is no place for it
            first = max(0, -(start // s))
            place = start + first * s
            count = max(0, min(pixels - first, -((place - size) // s)))
            to.append(slice(place, place + count * s, s) if count else slice(0))
            of.append(slice(first, first + count))
        spread = inputs.new_zeros(*inputs.shape[:2], *sizes)
        spread[(slice(None), slice(None), *to)] = inputs[(slice(None), slice(None), *of)]
        return spread

    def moments(self, inputs: Tensor, *, sums: bool = True) -> tuple[Tensor, Tensor | None, int]:
        """The second moment of patches: one small convolution for all taps that go together."""
        images = at_least_float32(inputs)
        channels, size = inputs.shape[1] // self.groups, self.features
        moment = images.new_zeros(self.groups, channels, *self.kernel_size, channels, *self.kernel_size)
        total = images.new_zeros(self.groups, channels, *self.kernel_size)
        known: dict[tuple[tuple[int, int, int], ...], Tensor] = {}
        for together in product(*map(self._taps_that_meet, range(self.dims), inputs.shape[2:])):
            shape = tuple((taps.number, taps.before, taps.after) for taps in together)
            if shape not in known:
                known[shape] = self._moment_of(inputs, together, ones=sums)
            part = known[shape]
            counts = [taps.number for taps in together]
            chosen = (slice(None), *(slice(taps.first, None, taps.apart) for taps in together))
            features = channels * prod(counts)
            blocks = part[:, :features, :features].unflatten(2, (channels, *counts)).unflatten(1, (channels, *counts))
            turned = [*range(2, 2 + self.dims), *range(3 + self.dims, 3 + 2 * self.dims)]
            moment[(slice(None), *chosen, *chosen)] = blocks.flip(turned)  # the last tap meets the first pixel
            if sums:
                last = part[:, :features, features].unflatten(1, (channels, *counts))
                total[(slice(None), *chosen)] = last.flip(turned[: self.dims])
        rows = images.shape[0] * prod(self.output_space(images.shape[2:]))
        return moment.view(self.groups, size, size), total.view(self.groups, size) if sums else None, rows

    def _moment_of(self, inputs: Tensor, together: tuple["_Taps", ...], *, ones: bool) -> Tensor:
        """The second moment of an ordinary convolution that has only these taps."""
        zeros = [max(0, min(taps.before, taps.after)) for taps in together]  # what the convolution itself adds
        rest = [(taps.before - zero, taps.after - zero) for taps, zero in zip(together, zeros, strict=True)]
        kernel_size = tuple(taps.number for taps in together)
        channels = inputs.shape[1] // self.groups
        convolution = Convolution(
            groups=self.groups,
            features=channels * prod(kernel_size),
            outputs=self.outputs,
            weight_shape=(self.outputs, channels, *kernel_size),
            kernel_size=kernel_size,
            stride=(1,) * self.dims,
            padding=tuple((zero, zero) for zero in zeros),
            dilation=tuple(taps.dilation for taps in together),
        )
        return convolution.second_moment(_fitted(inputs, rest), ones=ones)

    def _taps_that_meet(self, dim: int, size: int) -> list["_Taps"]:
        """The taps of a dimension, in sets that meet pixels at the same output positions."""
        s, d, k, pad = self.stride[dim], self.dilation[dim], self.kernel_size[dim], self.padding[dim]
        apart = s // gcd(s, d)
        dilation = d // gcd(s, d)
        output_size = self.output_space([size] * self.dims)[dim]
        sets = []
        for first in range(min(k, apart)):
            number = len(range(first, k, apart))
            start = (first * d - pad) % s  # the first output position at which these taps meet pixels
            positions = len(range(start, output_size, s))
            pixel = (start + pad - first * d) // s  # that the first tap meets there
            before = dilation * (number - 1) - pixel
            after = positions - 1 + pixel - (size - 1)
            if positions:
                sets.append(_Taps(first, apart, number, dilation, before, after))
        return sets


class _Taps(NamedTuple):
    """Taps of one dimension that meet pixels at the same output positions, as an ordinary convolution."""

    first: int
    apart: int  # from one of these taps to the next, in taps
    number: int
    dilation: int  # from one of these taps to the next, in pixels of the input
    before: int  # zeros before the image; below 0, so many pixels are left out
    after: int  # zeros behind it


def _fitted(images: Tensor, sides: Sides) -> Tensor:
    """The images with so many zeros on each side, or so many pixels less where the number is below 0."""
    padded = pad_sides(images, [(max(before, 0), max(after, 0)) for before, after in sides])
    kept = [slice(max(-b, 0), size - max(-a, 0)) for (b, a), size in zip(sides, padded.shape[2:], strict=True)]
    return padded[(slice(None), slice(None), *kept)]
