"""A layer's second moment ``Σ x xᵀ`` straight from its input: the patches of a convolution are never written down.

The D × D result is cut into square tiles, of which those on and below the diagonal are computed. A tile is the product
of two strips of the patch matrix, which are gathered from the image on the fly; the rows (images × positions) are split
among programs until the device is full. A second launch adds up the splits, in a fixed order: the result is the same
bit for bit every time. It also mirrors the tiles and brings the features into the weight's order.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from consequent.engines.gpu.kernels.launch import launch
from consequent.engines.gpu.kernels.moment_programs import _add_splits, _multiply_strips
from consequent.engines.gpu.kernels.table import device_guard

__all__ = ["Precision", "patch_moment"]

Precision = Literal["tf32", "tf32x3", "ieee"]
PRECISIONS = ("tf32", "tf32x3", "ieee")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

SPLITS_AT_ONCE = 64  # that a program adds up

_MOST_ROWS = 2**31 - 2**17  # positions are counted in 32 bits, and counted a little past their end


def patch_moment(
    inputs: Tensor,
    kernel_size: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    *,
    ones: bool,
    precision: Precision = "tf32",
) -> Tensor:
    """``Σ x xᵀ`` over the patches ``x`` that a two-dimensional convolution of one group sees, zeros around the image.

    Never waits for the device, and may be captured in a CUDA graph.

    Args:
        inputs: ``[N, C, H, W]`` with any strides, float32, bfloat16 or float16.
        kernel_size: of the convolution, ``(height, width)``; likewise the following three.
        stride: its steps.
        padding: rows and columns of zeros on each side.
        dilation: pixels from one tap of the kernel to the next.
        ones: whether every patch gets a last entry 1, whose weight is the bias.
        precision: of the products of float32 numbers: rounded to ``"tf32"``, made of three TF32 products (``"tf32x3"``,
            nearly float32), or ``"ieee"`` float32, which is slow. Sums are always float32.

    Returns:
        ``[D + ones, D + ones]`` in float32, ``D = C · height · width`` in the order of ``weight.flatten(1)``.

    Raises:
        ValueError: for shapes that do not fit, an unknown precision, or more than 2³¹ positions.
        TypeError: for another dtype.
    """
    check_inputs(inputs)
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
    inputs, precision = _suited(inputs, precision)
    strides = inputs.stride()
    cut = _cut(inputs.shape, strides, kernel_size, stride, padding, dilation, ones, inputs.device)
    geometry, plan, features = cut.geometry, cut.plan, cut.features
    if geometry.rows == 0 or features == 0:
        return inputs.new_zeros((features, features), dtype=torch.float32)
    channels_first = strides[1] > strides[3]
    partial = torch.empty(cut.splits * cut.tiles * plan.block**2, dtype=torch.float32, device=inputs.device)
    moment = torch.empty((features, features), dtype=torch.float32, device=inputs.device)
    with device_guard(inputs.device):
        launch(
            _multiply_strips,
            (cut.tiles * cut.splits,),
            (
                *(inputs, partial, *strides, geometry.height, geometry.width, geometry.out_height, geometry.out_width),
                *(geometry.channels, geometry.rows, cut.share, cut.tiles),
            ),
            (
                *(geometry.kernel, ones, channels_first, cut.wide, precision),
                *(cut.blocks == 1, plan.block, plan.depth),
            ),
            num_warps=plan.warps,
            num_stages=plan.stages,
        )
        taps = 1 if channels_first else geometry.kernel[0] * geometry.kernel[1]
        launch(
            _add_splits,
            (cut.tiles, plan.block**2 // cut.part),
            (partial, moment, features, cut.splits, cut.tiles, geometry.channels, taps),
            (plan.block, cut.part, SPLITS_AT_ONCE),
            num_warps=4,
        )
    return moment


def check_inputs(inputs: Tensor) -> None:
    """That they are images, of a type that the kernels take."""
    if inputs.dtype not in DTYPES:
        raise TypeError(f"the inputs must be float32, bfloat16 or float16, got {inputs.dtype}; convert them")
    if inputs.ndim != 4:
        raise ValueError(f"the inputs must have 4 dimensions, got shape {list(inputs.shape)}")


class Geometry(NamedTuple):
    """What a convolution does to images of one shape."""

    channels: int
    height: int
    width: int
    kernel: tuple[int, ...]  # height, width, steps (2), padding (2), dilation (2)
    out_height: int
    out_width: int
    features: int
    rows: int


def geometry_of(
    shape: tuple[int, ...],
    kernel_size: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
) -> Geometry:
    """The geometry, checked."""
    count, channels, height, width = shape
    (ky, kx), (sy, sx), (py, px), (dy, dx) = kernel_size, stride, padding, dilation
    if min(ky, kx, sy, sx, dy, dx) < 1 or min(py, px) < 0:
        raise ValueError(
            f"no such convolution: kernel_size={kernel_size}, stride={stride}, padding={padding}, dilation={dilation}"
        )
    spans = height + 2 * py - dy * (ky - 1), width + 2 * px - dx * (kx - 1)
    if min(spans) < 1:
        raise ValueError(
            f"a kernel of {kernel_size} with dilation {dilation} does not fit into {height}×{width} pixels"
        )
    out_height, out_width = (spans[0] - 1) // sy + 1, (spans[1] - 1) // sx + 1
    rows = count * out_height * out_width
    if rows > _MOST_ROWS:
        raise ValueError(
            f"{rows} positions are more than can be counted in 32 bits; split the batch and add the moments"
        )
    kernel = (ky, kx, sy, sx, py, px, dy, dx)
    return Geometry(channels, height, width, kernel, out_height, out_width, channels * ky * kx, rows)


@dataclass(frozen=True)
class Tiling:
    """How the work is cut up; a simple rule instead of a search at run time."""

    block: int  # features in a tile, each way
    depth: int  # rows at a time
    warps: int
    stages: int
    programs: int = 3  # to a multiprocessor, so that they hide each other's waiting


def tiling(features: int) -> Tiling:
    """The tiling for so many features: one tile if they fit, large tiles only where that wastes little of them."""
    if features <= 32:
        return Tiling(block=32, depth=64, warps=4, stages=3)
    if features <= 320:
        return Tiling(block=64, depth=32, warps=4, stages=3)
    return Tiling(block=128, depth=32, warps=8, stages=3)


def multiprocessors(device: torch.device) -> int:
    """How many programs run side by side, at least; the interpreter has but one."""
    return _multiprocessors(device.index or 0) if device.type == "cuda" else 1


@lru_cache
def _multiprocessors(index: int) -> int:
    count: int = torch.cuda.get_device_properties(index).multi_processor_count
    return count


def _suited(inputs: Tensor, precision: Precision) -> tuple[Tensor, Precision]:
    """The inputs and the precision as the kernels want them."""
    if inputs.device.type != "cuda" and inputs.dtype == torch.bfloat16:
        return inputs.float(), "ieee"  # the interpreter is made of NumPy, which has no bfloat16
    if inputs.dtype != torch.float32:
        return inputs, "ieee"  # they are multiplied as they are: one kernel for all precisions
    return inputs, precision


class Cut(NamedTuple):
    """All that a launch needs to know but the inputs' address; worked out once for every shape."""

    geometry: Geometry
    plan: Tiling
    features: int
    blocks: int
    tiles: int
    splits: int
    share: int  # rows in a split
    part: int  # elements of a tile that one program adds up: few, since all wait for the memory
    wide: bool  # whether the last element is farther from the first than 32 bits can say


@lru_cache(maxsize=1024)
def _cut(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    kernel_size: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    ones: bool,
    device: torch.device,
) -> Cut:
    geometry = geometry_of(shape, kernel_size, stride, padding, dilation)
    features = geometry.features + ones
    plan = tiling(features)
    blocks = -(-features // plan.block)
    tiles = max(1, blocks * (blocks + 1) // 2)
    most_splits = -(-geometry.rows // (4 * plan.depth))  # with less to do, adding up would cost more
    splits = max(1, min(most_splits, plan.programs * multiprocessors(device) // tiles))
    share = max(1, -(-geometry.rows // (splits * plan.depth))) * plan.depth
    splits = -(-geometry.rows // share)
    part = 64 if device.type == "cuda" else plan.block**2  # the interpreter has but one program
    wide = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) >= 2**31
    return Cut(geometry, plan, features, blocks, tiles, splits, share, part, wide)
