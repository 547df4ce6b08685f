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

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import gcd, prod
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from consequent.layers.convolution import Convolution
from consequent.layers.operation import Canonical, at_least_float32, with_ones
from consequent.layers.patches import Sides, Sizes, pad_sides, patch_rows
from consequent.layers.windowed import Windowed, each

_CONVOLVE = (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)


@dataclass(frozen=True)
class TransposedConvolution(Windowed):
    """Canonical inputs are ``[images, channels, *space]``, without zeros between the pixels.

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
    def of(cls, layer: Any) -> Self:
        """The operation that the layer would do now."""
        channels, outputs, *taps = layer.weight.shape
        return cls(
            groups=layer.groups,
            features=channels // layer.groups * prod(taps),
            outputs=outputs * layer.groups,
            weight_shape=(channels, outputs, *taps),
            kernel_size=tuple(layer.kernel_size),
            stride=tuple(layer.stride),
            padding=tuple(layer.padding),
            output_padding=tuple(layer.output_padding),
            dilation=tuple(layer.dilation),
            seen=cls._seen_in(layer),
        )

    @classmethod
    def _seen_in(cls, layer: Any) -> tuple[Any, ...]:
        return (layer.kernel_size, layer.stride, layer.padding, layer.output_padding, layer.dilation, layer.groups)

    def inputs_in(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The images; None if an ``output_size`` asks for another geometry than the layer's (:meth:`with_output_size`).

        Such a call stays plain.
        """
        given = {**dict(zip(("input", "output_size"), args, strict=False)), **kwargs}
        return given.get("input") if given.get("output_size") is None else None

    def canonical(self, inputs: Tensor, output_size: Sequence[int] | None = None) -> Canonical | None:
        """The call with these inputs, with or without a leading dimension of images.

        Args:
            inputs: the layer's.
            output_size: the second argument of the layer's ``forward``.
        """
        if inputs.ndim not in (self.spatial_dims + 1, self.spatial_dims + 2):
            return None
        is_batched = inputs.ndim > self.spatial_dims + 1
        images = inputs if is_batched else inputs.unsqueeze(0)
        operation = self.canonical_form if output_size is None else self.with_output_size(inputs, output_size)
        if operation is None:
            return None
        space = operation.output_space(images.shape[2:])
        if any(size <= 0 for size in space):
            return None  # torch has its own words for this
        samples = images.shape[0] if is_batched else 1
        return Canonical(operation, images, samples, None if is_batched else (self.outputs, *space))

    def with_output_size(self, inputs: Tensor, output_size: Sequence[int]) -> Self | None:
        """The same with the ``output_padding`` that makes outputs of this size; None where torch raises.

        Args:
            inputs: the layer's, of which only the shape is looked at.
            output_size: of the outputs, with or without what comes before their spatial dimensions.
        """
        if len(output_size) not in (self.spatial_dims, inputs.ndim):
            return None
        sizes = list(output_size)[-self.spatial_dims :]
        shortest = replace(self, output_padding=(0,) * self.spatial_dims, seen=())
        least = shortest.output_space(inputs.shape[-self.spatial_dims :])
        more = tuple(int(size) - minimum for size, minimum in zip(sizes, least, strict=True))
        if any(not 0 <= m < s for m, s in zip(more, self.stride, strict=True)):
            return None
        return replace(shortest, output_padding=more)

    @cached_property
    def canonical_form(self) -> Self:
        """The same, whatever layer it is of."""
        return replace(self, seen=())

    def output_space(self, space: Sizes) -> list[int]:
        """The size of the outputs in each spatial dimension, for inputs of these sizes."""
        settings = zip(
            space, self.kernel_size, self.stride, self.padding, self.output_padding, self.dilation, strict=True
        )
        return [(size - 1) * s - 2 * pad + d * (k - 1) + more + 1 for size, k, s, pad, more, d in settings]

    def product_called(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Canonical | None:
        """A call of ``F.conv_transpose·d``, whatever its settings."""
        if function is not _CONVOLVE[self.spatial_dims - 1]:
            return None
        names = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if not isinstance(given.get("input"), Tensor) or given.get("groups", 1) != self.groups:
            return None
        called = replace(
            self,
            stride=each(given.get("stride", 1), self.spatial_dims),
            padding=each(given.get("padding", 0), self.spatial_dims),
            output_padding=each(given.get("output_padding", 0), self.spatial_dims),
            dilation=each(given.get("dilation", 1), self.spatial_dims),
        )
        return called.canonical(given["input"])

    # ---- the product ------------------------------------------------------------------------------------------------

    def apply(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``Z``."""
        convolve = _CONVOLVE[self.spatial_dims - 1]
        geometry = (self.stride, self.padding, self.output_padding, self.groups, self.dilation)
        return convolve(inputs, weight, bias, *geometry)

    @cached_property
    def _geometry(self) -> tuple[Any, ...]:
        return self.stride, self.padding, self.dilation, True, self.output_padding, self.groups

    # ---- as matrices ------------------------------------------------------------------------------------------------

    def weight_matrix(self, weight: Tensor) -> Tensor:
        """``[groups, out_channels / groups, channels / groups · taps]``."""
        per_group: Tensor = weight.unflatten(0, (self.groups, -1))  # [groups, channels, out_channels, *taps]
        return per_group.transpose(1, 2).flatten(2)

    def shaped_like_weight(self, matrix: Tensor) -> Tensor:
        """``[channels, out_channels / groups, *taps]``, also for some output channels only."""
        per_group: Tensor = matrix.unflatten(-1, (-1, *self.kernel_size))  # [groups, out_channels, channels, *taps]
        return per_group.transpose(1, 2).flatten(0, 1)

    def input_rows(self, inputs: Tensor) -> Tensor:
        """``[groups, images · output positions, channels · taps]``."""
        spread = self._spread(inputs)
        rows = patch_rows(spread, self.kernel_size, (1,) * self.spatial_dims, self.dilation, self.groups)
        taps: Tensor = rows.unflatten(-1, (-1, *self.kernel_size))
        return taps.flip(list(range(3, 3 + self.spatial_dims))).flatten(2)

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

    def second_moment(self, inputs: Tensor, *, ones: bool) -> Tensor:
        """``[groups, D, D]``, or one larger with ``ones``: one small convolution for all taps that go together."""
        images = at_least_float32(inputs)
        channels, size = inputs.shape[1] // self.groups, self.features
        moment = images.new_zeros(self.groups, channels, *self.kernel_size, channels, *self.kernel_size)
        sums = images.new_zeros(self.groups, channels, *self.kernel_size)
        known: dict[tuple[tuple[int, int, int], ...], Tensor] = {}
        for together in product(*map(self._together, range(self.spatial_dims), inputs.shape[2:])):
            shape = tuple((taps.number, taps.before, taps.after) for taps in together)
            if shape not in known:
                known[shape] = self._moment_of(inputs, together, ones=ones)
            part = known[shape]
            counts = [taps.number for taps in together]
            chosen = (slice(None), *(slice(taps.first, None, taps.apart) for taps in together))
            features = channels * prod(counts)
            blocks = part[:, :features, :features].unflatten(2, (channels, *counts)).unflatten(1, (channels, *counts))
            turned = [*range(2, 2 + self.spatial_dims), *range(3 + self.spatial_dims, 3 + 2 * self.spatial_dims)]
            moment[(slice(None), *chosen, *chosen)] = blocks.flip(turned)  # the last tap meets the first pixel
            if ones:
                last = part[:, :features, features].unflatten(1, (channels, *counts))
                sums[(slice(None), *chosen)] = last.flip(turned[: self.spatial_dims])
        matrix = moment.view(self.groups, size, size)
        rows = images.shape[0] * prod(self.output_space(images.shape[2:]))
        return with_ones(matrix, sums.view(self.groups, size), rows) if ones else matrix

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
            stride=(1,) * self.spatial_dims,
            padding=tuple((zero, zero) for zero in zeros),
            dilation=tuple(taps.dilation for taps in together),
        )
        return convolution.second_moment(_fitted(inputs, rest), ones=ones)

    def _together(self, dim: int, size: int) -> list["_Taps"]:
        """The taps of a dimension, in sets that meet pixels at the same output positions."""
        s, d, k, pad = self.stride[dim], self.dilation[dim], self.kernel_size[dim], self.padding[dim]
        apart = s // gcd(s, d)
        dilation = d // gcd(s, d)
        output_size = self.output_space([size] * self.spatial_dims)[dim]
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

    @property
    def inputs_per_row(self) -> int:
        """There are more output positions than pixels, by the strides."""
        return max(1, self.weight_shape[0] // prod(self.stride))

    def interference(self, inputs: Tensor, samples: int, *, ones: bool) -> Tensor:
        """``[samples, samples]``: no rows are formed; a pixel that is met by m taps counts m times."""
        output_size = self.output_space(inputs.shape[2:])
        weighted = inputs
        for dim, (size, outputs) in enumerate(zip(inputs.shape[2:], output_size, strict=True)):
            pixels = torch.arange(size, device=inputs.device) * self.stride[dim] - self.padding[dim]
            taps = torch.arange(self.kernel_size[dim], device=inputs.device) * self.dilation[dim]
            place = pixels[:, None] + taps
            seen = ((place >= 0) & (place < outputs)).sum(1).to(inputs.dtype)
            weighted = weighted * seen.view(-1, *[1] * (self.spatial_dims - 1 - dim))
        correlations = weighted.flatten(1) @ inputs.flatten(1).T
        return correlations + prod(output_size) if ones else correlations


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
