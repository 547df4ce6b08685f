"""Second moments of the inputs of many layers in two launches, without forming patches.

The plain-torch line is :meth:`consequent.layers.Operation.moments`.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from consequent.gpu.launch import Addresses, is_in_reach, launch, on_device, precision

LARGEST = 2**22  # elements of inputs that are summed up here,
MOST = 2**32  # and multiplications. The products of torch are faster than these; but for small ones the host is slow
TILE, BLOCK, PART = 64, 16, 2048  # features of a tile; rows at a time; rows of one program
OFFSET = 2**14  # of coordinates, as some are below zero; also in moments_kernels.py
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class Window(NamedTuple):
    """How patches lie in images; each pair is vertical and horizontal. Without further ado patches are pixels."""

    taps: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)


class Source(NamedTuple):
    """Inputs of a layer, and where their sums go.

    Attributes:
        inputs: ``[images, channels, height, width]``.
        window: of the patches.
        moment: to which ``Σ x xᵀ`` is added, ``[D, D]``,
        sums: and ``Σ x``.
    """

    inputs: Tensor
    window: Window
    moment: Tensor
    sums: Tensor


def accepts(inputs: Tensor, rows: int, features: int) -> bool:
    """Whether moments of such inputs are summed up here."""
    is_small = (
        0 < inputs.numel() <= LARGEST and rows * features**2 <= MOST and max(inputs.shape[2:], default=0) < OFFSET
    )
    return is_small and inputs.dtype in DTYPES and is_in_reach(inputs)


class _Layout(NamedTuple):
    sizes: Tensor
    positions: Tensor
    programs: Tensor
    tiles: Tensor


@lru_cache(maxsize=64)
def _layout(shapes: tuple[tuple[tuple[int, ...], tuple[int, ...], Window], ...], device: torch.device) -> _Layout:
    sizes: list[tuple[int, ...]] = []
    programs: list[tuple[int, ...]] = []
    tiles: list[tuple[int, ...]] = []
    positions: list[int] = []
    known: dict[tuple[object, ...], int] = {}
    for problem, (shape, strides, window) in enumerate(shapes):
        images, channels, *space = shape
        taps, stride, padding, dilation = window
        counts = [
            (size + 2 * pad - apart * (tap - 1) - 1) // step + 1
            for size, tap, step, pad, apart in zip(space, *window, strict=True)
        ]
        lines, pixels = (
            range(-pad, count * step - pad, step) for count, step, pad in zip(counts, stride, padding, strict=True)
        )
        if (lines, pixels) not in known:
            known[lines, pixels] = len(positions)
            positions += [((y + OFFSET) << 16) + x + OFFSET for y in lines for x in pixels]
        rows, features = images * len(lines) * len(pixels), channels * taps[0] * taps[1]
        sizes.append(
            (
                *(channels, *space, len(lines) * len(pixels), known[lines, pixels]),
                *(taps[0] * taps[1], taps[1], *dilation, *strides),
            )
        )
        for first in range(0, features, TILE):
            for second in range(0, first + 1, TILE):
                starts = range(0, rows, PART)
                tiles.append((problem, first, second, len(programs), len(starts)))
                programs += [(problem, first, second, start, min(start + PART, rows)) for start in starts]
    return _Layout(*(on_device(table, torch.int32, device) for table in (sizes, positions, programs, tiles)))


_addresses = Addresses()


def add_moments(sources: Sequence[Source]) -> None:
    """Add the moments of all sources; no two of them go to the same place."""
    for dtype in dict.fromkeys(source.inputs.dtype for source in sources):
        _add([source for source in sources if source.inputs.dtype is dtype], dtype)


def _add(sources: Sequence[Source], dtype: torch.dtype) -> None:
    import triton.language as tl

    from consequent.gpu import moments_kernels as kernels

    device = sources[0].inputs.device
    shapes = tuple([(tuple(one.inputs.shape), one.inputs.stride(), one.window) for one in sources])
    layout = _layout(shapes, device)
    tensors = [tensor for one in sources for tensor in (one.inputs, one.moment, one.sums)]
    table = _addresses([tensor.data_ptr() for tensor in tensors], device)
    scratch = torch.empty(len(layout.programs) * (TILE + 1) * TILE, device=device)
    with torch.cuda.device_of(scratch):
        launch(
            *(kernels.parts, len(layout.programs), (table, layout.sizes, layout.positions, layout.programs, scratch)),
            (getattr(tl, DTYPES[dtype]), precision(), TILE, BLOCK),
            num_warps=4,
            num_stages=4,
        )
        launch(kernels.combine, len(layout.tiles), (table, layout.sizes, layout.tiles, scratch), (TILE,), num_warps=4)
