r"""The second moment of all patches of an image from its auto-correlation, without forming the patches.

For stride 1, the block of the second moment that belongs to the taps a and b of a kernel,

    ``S[a, b] = Σ_p x[p + a] x[p + b]ᵀ``                       (p: positions of the kernel; zeros outside of the image)

would depend on ``b − a`` alone if p ran over all positions that touch the image. So it is the auto-correlation
``T[m] = Σ_r x[r] x[r + m]ᵀ`` of the image, of which ``T[−m] = T[m]ᵀ`` leaves 13 different blocks for a 3 × 3 kernel
where the second moment has 81, less the second moment of a thin frame: the positions that touch the image and are none
of the convolution's, because its padding is smaller than the kernel. In the frame few taps meet the image, so its
patches are few and short.

The auto-correlation is computed as the weight gradient of a convolution of x with itself, for which fast code exists
everywhere.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from consequent.patches import Sides, Sizes, pad_sides, patch_moment


@dataclass(frozen=True)
class Window:
    """The geometry of a convolution with stride 1."""

    kernel_size: Sizes
    dilation: Sizes
    padding: Sides
    groups: int = 1

    @property
    def reach(self) -> list[int]:
        """How far the last tap is from the first, in each dimension."""
        return [d * (k - 1) for d, k in zip(self.dilation, self.kernel_size, strict=True)]

    def positions(self, space: Sizes) -> list[int]:
        """Positions of the kernel in each dimension."""
        triples = zip(space, self.padding, self.reach, strict=True)
        return [size + sum(sides) - reach for size, sides, reach in triples]


def operations(window: Window, space: Sizes, channels: int) -> float:
    """Multiplications per image of :func:`patch_moment_by_autocorrelation`."""
    first, *others = window.kernel_size
    per_pair = channels * channels / window.groups
    frame = sum(
        prod(positions) * (taps * prod(window.kernel_size) / window.kernel_size[dim]) ** 2
        for dim, _, taps, positions in _frame(window, space)
    )
    return per_pair * (first * prod(2 * k - 1 for k in others) * prod(space) + frame)


def patch_moment_by_autocorrelation(images: Tensor, window: Window) -> Tensor:
    """``[groups, D, D]``: the sum of ``x xᵀ`` over all patches of a convolution with stride 1.

    Args:
        images: ``[images, channels, *space]``, without the zeros of the padding.
        window: the convolution.
    """
    space, channels = images.shape[2:], images.shape[1] // window.groups
    moment = _toeplitz(_autocorrelation(images, window), window)
    taps = tuple(window.kernel_size)
    blocks = moment.view(window.groups, channels, *taps, channels, *taps)
    for dim, places, active, _ in _frame(window, space):
        first, last, tap = places
        slab = images[(slice(None), slice(None), *[slice(None)] * dim, slice(first, last + 1, window.dilation[dim]))]
        kernel_size = [*taps[:dim], active, *taps[dim + 1 :]]
        # Each position of the frame belongs to the first dimension in which it is outside.
        before = [window.padding[other] for other in range(dim)]
        after = [(window.reach[other],) * 2 for other in range(dim + 1, len(taps))]
        padded = pad_sides(slab, [*before, (0, 0), *after])
        dilation = [*window.dilation[:dim], 1, *window.dilation[dim + 1 :]]
        part = patch_moment(padded, kernel_size, [1] * len(taps), dilation, window.groups)
        part = part.view(window.groups, channels, *kernel_size, channels, *kernel_size)
        blocks.narrow(2 + dim, tap, active).narrow(3 + len(taps) + dim, tap, active).sub_(part)
    return moment


def _frame(window: Window, space: Sizes) -> Iterator[tuple[int, tuple[int, int, int], int, list[int]]]:
    """The positions that touch the image and are none of the convolution's, in slabs of thickness one.

    Yields:
        the dimension in which the slab is outside; the first and last pixel that it meets there and the first tap that
        meets one; how many taps do; the slab's positions in the other dimensions.
    """
    inside = window.positions(space)
    for dim, (size, d, k) in enumerate(zip(space, window.dilation, window.kernel_size, strict=True)):
        before, _ = window.padding[dim]
        others = [inside[o] if o < dim else space[o] + window.reach[o] for o in range(len(space)) if o != dim]
        outside = (*range(before - window.reach[dim], 0), *range(inside[dim], size + before))
        for position in outside:
            pixels = [(tap, position + tap * d - before) for tap in range(k)]
            met = [(tap, pixel) for tap, pixel in pixels if 0 <= pixel < size]
            if met:
                yield dim, (met[0][1], met[-1][1], met[0][0]), len(met), others


def _autocorrelation(images: Tensor, window: Window) -> Tensor:
    """``T[m]`` as ``[channels, channels / groups, *lags]``: lags ≥ 0 in the first dimension, all lags in the others."""
    channels = images.shape[1]
    lags = [window.kernel_size[0], *(2 * k - 1 for k in window.kernel_size[1:])]
    if images.ndim == 4 and not images.is_cuda:
        images = images.contiguous(memory_format=torch.channels_last)  # oneDNN is up to twice as fast
    shape = (channels, channels // window.groups, *lags)
    padding = [0, *window.reach[1:]]
    seen = pad_sides(images, [(0, window.reach[0]), *[(0, 0)] * (len(lags) - 1)])
    stride, none = [1] * len(lags), [0] * len(lags)
    _, gradient, _ = torch.ops.aten.convolution_backward(
        images,
        seen,
        images.new_empty(shape),  # only its shape is looked at
        None,
        stride,
        padding,
        list(window.dilation),
        False,
        none,
        window.groups,
        [False, True, False],
    )
    assert isinstance(gradient, Tensor)
    return gradient


def _toeplitz(half: Tensor, window: Window) -> Tensor:
    """``[groups, D, D]`` with ``T[b − a]`` in the block of taps a and b."""
    groups, taps = window.groups, window.kernel_size
    channels, lags = half.shape[1], half.shape[2:]
    half = half.reshape(groups, channels, channels, *lags)
    turned = half.transpose(1, 2).flip(list(range(3, half.ndim)))  # T[−m] = T[m]ᵀ
    at_zero = (half[:, :, :, :1] + turned[:, :, :, -1:]) / 2  # equal up to rounding: the result is symmetric
    whole = torch.cat([turned[:, :, :, :-1], at_zero, half[:, :, :, 1:]], dim=3).flatten(3)
    index = _lag_index(tuple(taps)).to(half.device, non_blocking=True)
    blocks = whole[..., index]  # [groups, channels, channels, taps, taps]
    size = channels * prod(taps)
    return blocks.permute(0, 1, 3, 2, 4).reshape(groups, size, size)


def _lag_index(taps: tuple[int, ...]) -> Tensor:
    """``[a, b]`` ↦ the place of ``b − a`` among the lags, for taps and lags in row-major order."""
    index = torch.zeros(1, 1, dtype=torch.long)
    for k in taps:
        tap = torch.arange(k)
        lag = tap[None, :] - tap[:, None] + k - 1
        index = (index[:, None, :, None] * (2 * k - 1) + lag[None, :, None, :]).reshape(
            index.shape[0] * k, index.shape[1] * k
        )
    return index
