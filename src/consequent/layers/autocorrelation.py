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
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from consequent.layers.patches import Sizes, pad_sides, patch_moments

# Convolutions may sum pixel after pixel, and their rounding then grows with the number of pixels: so many keep float32
# within one part in 10⁷ of ‖S‖.
PIXELS_AT_ONCE = 2**17


@dataclass(frozen=True)
class Window:
    """The geometry of a convolution with stride 1."""

    kernel_size: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    groups: int = 1

    @property
    def reach(self) -> list[int]:
        """How far the last tap is from the first, in each dimension."""
        return [d * (k - 1) for d, k in zip(self.dilation, self.kernel_size, strict=True)]

    def positions(self, space: Sizes) -> list[int]:
        """Positions of the kernel in each dimension."""
        triples = zip(space, self.padding, self.reach, strict=True)
        return [size + sum(sides) - reach for size, sides, reach in triples]


def operations(window: Window, space: tuple[int, ...], channels: int) -> float:
    """Multiplications per image of :func:`patch_moment_by_autocorrelation`."""
    first, *others = window.kernel_size
    per_pair = channels * channels / window.groups
    frame = sum(
        slab.positions * (slab.taps * prod(window.kernel_size) / window.kernel_size[dim]) ** 2
        for dim in range(len(space))
        for slab in _frame(window, space, dim)
    )
    return per_pair * (first * prod(2 * k - 1 for k in others) * prod(space) + frame)


def patch_moment_by_autocorrelation(images: Tensor, window: Window) -> Tensor:
    """``[groups, D, D]``: the sum of ``x xᵀ`` over all patches of a convolution with stride 1.

    Args:
        images: ``[images, channels, *space]``, without the zeros of the padding.
        window: the convolution.
    """
    at_once = max(1, PIXELS_AT_ONCE // max(1, prod(images.shape[2:])))
    if images.shape[0] <= at_once:
        return _moment_of(images, window)
    total = _moment_of(images[:at_once], window).double()
    for start in range(at_once, images.shape[0], at_once):
        total += _moment_of(images[start : start + at_once], window)
    return total.to(images.dtype)


def _moment_of(images: Tensor, window: Window) -> Tensor:
    taps, groups = window.kernel_size, window.groups
    channels, dims = images.shape[1] // groups, len(taps)
    size = channels * prod(taps)
    moment = images.new_empty(groups, size, size)
    blocks = moment.unflatten(2, (channels, *taps)).unflatten(1, (channels, *taps))
    _fill_toeplitz(blocks, _autocorrelation(images, window), window)
    for dim, alike in _alike(window, tuple(images.shape[2:])):
        active, step = alike[0].taps, window.dilation[dim]
        slabs = [
            images[(*[slice(None)] * (2 + dim), slice(s.pixel, s.pixel + (active - 1) * step + 1, step))] for s in alike
        ]
        # Each position of the frame belongs to the first dimension in which it is outside.
        before = [window.padding[other] for other in range(dim)]
        after = [(window.reach[other],) * 2 for other in range(dim + 1, dims)]
        padded = pad_sides(torch.cat(slabs, dim=1), [*before, (0, 0), *after])
        kernel_size = [*taps[:dim], active, *taps[dim + 1 :]]
        dilation = [*window.dilation[:dim], 1, *window.dilation[dim + 1 :]]
        parts, _ = patch_moments(padded, kernel_size, [1] * dims, dilation, len(slabs) * groups)
        for slab, part in zip(alike, parts.split(groups), strict=True):
            met = blocks.narrow(2 + dim, slab.tap, active).narrow(3 + dims + dim, slab.tap, active)
            met.sub_(part.view(groups, channels, *kernel_size, channels, *kernel_size))
    return moment


class Slab(NamedTuple):
    """Positions of the kernel outside of the convolution's, in a layer of thickness one."""

    pixel: int  # the first that they meet, in the dimension in which they are outside
    tap: int  # that meets it
    taps: int  # that meet any
    positions: int  # in the other dimensions


def _alike(window: Window, space: tuple[int, ...]) -> Iterator[tuple[int, list[Slab]]]:
    """The slabs in which as many taps meet the image, which can go together, with their dimension."""
    for dim in range(len(space)):
        slabs = _frame(window, space, dim)
        for taps in {slab.taps for slab in slabs}:
            yield dim, [slab for slab in slabs if slab.taps == taps]


@lru_cache(maxsize=1024)
def _frame(window: Window, space: tuple[int, ...], dim: int) -> list[Slab]:
    """The positions that touch the image and are none of the convolution's, as they are outside in this dimension."""
    inside = window.positions(space)
    size, step, taps = space[dim], window.dilation[dim], window.kernel_size[dim]
    before, _ = window.padding[dim]
    others = [inside[o] if o < dim else space[o] + window.reach[o] for o in range(len(space)) if o != dim]
    slabs = []
    for position in (*range(before - window.reach[dim], 0), *range(inside[dim], size + before)):
        pixels = [(position + tap * step - before, tap) for tap in range(taps)]
        met = [(pixel, tap) for pixel, tap in pixels if 0 <= pixel < size]
        if met:
            slabs.append(Slab(*met[0], len(met), prod(others)))
    return slabs


def _autocorrelation(images: Tensor, window: Window) -> Tensor:
    """``T[m]`` as ``[channels, channels / groups, *lags]``: lags ≥ 0 in the first dimension, all lags in the others."""
    channels = images.shape[1]
    lags = [window.kernel_size[0], *(2 * k - 1 for k in window.kernel_size[1:])]
    if images.ndim == 4 and not images.is_cuda:
        images = images.contiguous(memory_format=torch.channels_last)  # oneDNN is up to twice as fast
    shape = (channels, channels // window.groups, *lags)
    padding = [0, *window.reach[1:]]
    seen = _with_zeros_below(images, window.reach[0])
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


def _with_zeros_below(images: Tensor, count: int) -> Tensor:
    """More rows in the first dimension of space; ``F.pad`` would write zeros everywhere first."""
    is_channels_last = images.ndim == 4 and images.is_contiguous(memory_format=torch.channels_last)
    memory_format = torch.channels_last if is_channels_last else torch.contiguous_format
    height = images.shape[2]
    shape = (*images.shape[:2], height + count, *images.shape[3:])
    larger = torch.empty(shape, dtype=images.dtype, device=images.device, memory_format=memory_format)
    larger.narrow(2, height, count).zero_()
    larger.narrow(2, 0, height).copy_(images)
    return larger


def _fill_toeplitz(blocks: Tensor, half: Tensor, window: Window) -> None:
    """``T[b − a]`` for the taps a and b.

    Args:
        blocks: ``[groups, channels, *taps, channels, *taps]``, which is written to.
        half: of the auto-correlation.
        window: the convolution.
    """
    groups, channels, dims = *blocks.shape[:2], len(window.kernel_size)
    by_group = half.unflatten(0, (groups, channels))  # [groups, c, c', *lags]
    ahead = by_group.movedim(2, -1)
    behind = by_group.flip(list(range(3, 3 + dims))).movedim(1, -1)  # T[−m] = T[m]ᵀ
    at_zero = (ahead[:, :, :1] + behind[:, :, -1:]) / 2  # equal up to rounding: the result is symmetric
    whole = torch.cat([behind[:, :, :-1], at_zero, ahead[:, :, 1:]], dim=2).flatten(2, 1 + dims)
    pairs = whole.index_select(2, _lag_index(window.kernel_size, half.device))  # [groups, c, a · b, c']
    taps = window.kernel_size
    blocks.copy_(pairs.unflatten(2, (*taps, *taps)).movedim(-1, 2 + dims))


@lru_cache(maxsize=256)
def _lag_index(taps: tuple[int, ...], device: torch.device) -> Tensor:
    """For each pair of taps a and b, in row-major order, the place of ``b − a`` among the lags."""
    index = torch.zeros(1, 1, dtype=torch.long)
    for k in taps:
        tap = torch.arange(k)
        lag = tap[None, :] - tap[:, None] + k - 1
        index = (index[:, None, :, None] * (2 * k - 1) + lag[None, :, None, :]).flatten(2, 3).flatten(0, 1)
    return index.flatten().to(device)
