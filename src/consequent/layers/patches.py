"""The patches of an image as rows of a matrix (im2col), in any number of dimensions."""

from collections.abc import Sequence
from math import prod

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from consequent.maths.products import moment_of_rows, sum_of_rows

# A patch matrix is up to kernel-size times larger than its image.
PATCH_ELEMENTS_AT_ONCE = 2**24

Sizes = Sequence[int]
Sides = Sequence[tuple[int, int]]  # zeros before and after, for each spatial dimension


def pad_sides(images: Tensor, sides: Sides, mode: str = "constant") -> Tensor:
    """The images ``[images, channels, *space]`` with so much padding on each side of each spatial dimension."""
    if not any(before or after for before, after in sides):
        return images
    amounts = [amount for side in reversed(sides) for amount in side]  # F.pad counts from the last dimension
    return F.pad(images, amounts, mode=mode)


def positions(space: Sizes, kernel_size: Sizes, stride: Sizes, dilation: Sizes) -> list[int]:
    """How many patches there are along each dimension of a padded image."""
    settings = zip(space, kernel_size, stride, dilation, strict=True)
    return [(size - d * (k - 1) - 1) // s + 1 for size, k, s, d in settings]


def patch_rows(padded: Tensor, kernel_size: Sizes, stride: Sizes, dilation: Sizes, groups: int = 1) -> Tensor:
    """``[groups, images · positions, channels · taps]``: one row per patch."""
    dims = len(kernel_size)
    view = _patch_view(padded, kernel_size, stride, dilation, groups)
    order = (1, 0, *range(3, 3 + dims), 2, *range(3 + dims, 3 + 2 * dims))
    return view.permute(order).reshape(groups, -1, view.shape[2] * prod(kernel_size))


def patch_sum(padded: Tensor, kernel_size: Sizes, stride: Sizes, dilation: Sizes) -> Tensor:
    """The sum of all patches of one image, ``[channels, *taps]``.

    Args:
        padded: ``[channels, *space]``, with its padding.
        kernel_size: of the patches; likewise the rest.
        stride: from one to the next.
        dilation: from one of their taps to the next.
    """
    counts = positions(padded.shape[1:], kernel_size, stride, dilation)
    sums = padded
    for dim, count in enumerate(counts, start=1):  # each tap meets so many pixels in each dimension
        k, s, d = kernel_size[dim - 1], stride[dim - 1], dilation[dim - 1]
        met = [sums[(*[slice(None)] * dim, slice(tap * d, tap * d + (count - 1) * s + 1, s))] for tap in range(k)]
        sums = torch.stack([pixels.sum(dim) for pixels in met], dim=dim)
    return sums


def patch_moments(
    padded: Tensor, kernel_size: Sizes, stride: Sizes, dilation: Sizes, groups: int = 1, *, sums: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The sum of ``x xᵀ`` over all patches, ``[groups, D, D]``, and if asked for of ``x``, ``[groups, D]``.

    Patches are formed a few images at a time.
    """
    channels, taps, dims = padded.shape[1] // groups, prod(kernel_size), len(kernel_size)
    view = _patch_view(padded, kernel_size, stride, dilation, groups)
    channels_last = padded.stride(1) == 1 and channels > 1
    # Patches are copied in long runs where the channels of a pixel, which lie together in memory, stay together.
    inner = (*range(3 + dims, 3 + 2 * dims), 2) if channels_last else (2, *range(3 + dims, 3 + 2 * dims))
    ordered = view.permute(1, 0, *range(3, 3 + dims), *inner)
    at_once = max(1, PATCH_ELEMENTS_AT_ONCE // max(1, ordered[:, :1].numel()))
    size = channels * taps
    moment = total = None
    for start in range(0, max(1, padded.shape[0]), at_once):
        rows = ordered[:, start : start + at_once].reshape(groups, -1, size)
        part = moment_of_rows(rows)
        moment = part if moment is None else moment + part
        if sums:
            total = sum_of_rows(rows) if total is None else total + sum_of_rows(rows)
    assert moment is not None
    if channels_last and taps > 1:
        by_tap = moment.view(groups, taps, channels, taps, channels)
        moment = by_tap.permute(0, 2, 1, 4, 3).reshape(groups, size, size)
        total = None if total is None else total.view(groups, taps, channels).mT.reshape(groups, size)
    return moment, total


def _patch_view(padded: Tensor, kernel_size: Sizes, stride: Sizes, dilation: Sizes, groups: int) -> Tensor:
    """``[images, groups, channels, *positions, *taps]``, a strided view.

    ``F.unfold`` would copy, one image after the other, and knows only two dimensions.
    """
    images, channels, *space = padded.shape
    per_image, per_channel, *per_pixel = padded.stride()
    counts = positions(space, kernel_size, stride, dilation)
    steps = [s * step for s, step in zip(stride, per_pixel, strict=True)]
    taps = [d * step for d, step in zip(dilation, per_pixel, strict=True)]
    per_group = channels // groups
    sizes = (images, groups, per_group, *counts, *kernel_size)
    strides = (per_image, per_group * per_channel, per_channel, *steps, *taps)
    return padded.as_strided(sizes, strides)
