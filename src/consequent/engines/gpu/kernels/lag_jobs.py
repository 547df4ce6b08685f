# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""How the second moments by lags are cut up: tiles of channels, jobs of rows and groups, slots of pixels in reach."""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from consequent.engines.gpu.kernels.moment import geometry_of, multiprocessors

MOST_JOBS = 64  # of a layer: they are added up by one program, at once


@dataclass(frozen=True)
class Tiling:
    """How the work is cut up; a simple rule instead of a search at run time."""

    group: int  # pixels side by side that are multiplied at a time
    channels: int  # of each of them in a tile
    slots: int  # pixels they are multiplied with, in a tile
    depth: int  # images at a time
    warps: int
    stages: int
    programs: int  # to a multiprocessor
    rows: bool = False  # three tiles at once, see lag_products.py


def tiling(channels: int) -> Tiling:
    """The tiling for so many channels: as many pixels together as make a large tile."""
    if channels <= 16:
        return Tiling(group=4, channels=16, slots=8, depth=32, warps=4, stages=3, programs=1, rows=True)
    if channels <= 32:
        return Tiling(group=2, channels=32, slots=4, depth=32, warps=4, stages=3, programs=3)
    return Tiling(group=1, channels=64, slots=2, depth=32, warps=4, stages=4, programs=2)


class Cut(NamedTuple):
    """All that a launch needs to know but addresses; worked out once for every shape."""

    plan: Tiling
    shape: tuple[int, int, int, int]
    features: int
    depth: int  # images at a time
    images: int  # rounded up to that
    share: int  # groups in a job
    splits: tuple[int, int, int]  # jobs of the middle, of the first or last row, of the first or last group's column
    jobs: int
    tiles: int


@lru_cache(maxsize=1024)
def cut_up(shape: tuple[int, int, int, int], layers: int, ones: bool, device: torch.device) -> Cut:
    """That of so many layers with inputs of one shape."""
    images, channels, height, width = shape
    geometry_of(shape, (3, 3), (1, 1), (1, 1), (1, 1))  # not too large
    plan = tiling(channels)
    depth = min(plan.depth, max(16, triton.next_power_of_2(images)))
    blocks = -(-channels // plan.channels)
    tiles = blocks * blocks * -(-(3 * plan.group + 10) // plan.slots)
    groups = -(-width // plan.group)
    wanted = plan.programs * multiprocessors(device) // (layers * (blocks * blocks if plan.rows else tiles))
    share = max(1, -(-height * groups // max(9, wanted)))
    while (jobs := _splits(height, groups, share)[1]) > MOST_JOBS:
        share += 1
    splits = _splits(height, groups, share)[0]
    return Cut(plan, shape, 9 * channels + ones, depth, -(-images // depth) * depth, share, splits, jobs, tiles)


def _splits(height: int, groups: int, share: int) -> tuple[tuple[int, int, int], int]:
    rows, columns = max(0, height - 2), max(0, groups - 2)
    middle, along_row, along_column = -(-rows * columns // share), -(-columns // share), -(-rows // share)
    return (middle, along_row, along_column), middle + 2 * along_row + 2 * along_column + 4


@triton.jit
def slot_place(slot, GROUP: tl.constexpr, SLOTS: tl.constexpr):
    """Rows below and columns right of a group's first pixel, of the pixels that it reaches; a row below 2 is none.

    A lag within the row leads to the right alone. Where a tile has a slot for every pixel in reach of a row, all three
    rows are nevertheless alike, and a tile is a row.
    """
    BEFORE: tl.constexpr = 2 if SLOTS == GROUP + 4 else 0
    FIRST: tl.constexpr = BEFORE + GROUP + 2
    beyond = slot - FIRST
    below = tl.where(slot < FIRST, 0, 1 + beyond // (GROUP + 4))
    return below, tl.where(slot < FIRST, slot - BEFORE, beyond % (GROUP + 4) - 2)


@triton.jit
def slot_of(lag_y, lag_x, across, GROUP: tl.constexpr, SLOTS: tl.constexpr):
    """The slot of the pixel with this lag from the one that many columns across the group."""
    BEFORE: tl.constexpr = 2 if SLOTS == GROUP + 4 else 0
    return across + lag_x + tl.where(lag_y == 0, BEFORE, BEFORE + lag_y * (GROUP + 4))


@triton.jit
def region_of(job, middle, along_row, along_column):
    """Which rows and groups a job is of (0 the first, 1 those between, 2 the last), and how many jobs of it precede."""
    in_row = job - middle
    in_column = in_row - 2 * along_row
    corner = in_column - 2 * along_column
    last_row = in_row >= along_row
    last_column = in_column >= along_column
    rows = tl.where(in_row < 0, 1, tl.where(in_column < 0, last_row * 2, tl.where(corner < 0, 1, corner // 2 * 2)))
    groups = tl.where(in_column < 0, 1, tl.where(corner < 0, last_column * 2, corner % 2 * 2))
    row_split = in_row - tl.where(last_row, along_row, 0)
    column_split = in_column - tl.where(last_column, along_column, 0)
    split = tl.where(in_row < 0, job, tl.where(in_column < 0, row_split, tl.where(corner < 0, column_split, 0)))
    return rows, groups, split


@triton.jit
def extent(region, size):
    """The first of the rows or groups of this region, and how many there are."""
    start = tl.where(region == 0, 0, tl.where(region == 1, 1, size - 1))
    inner = tl.where(region == 1, tl.maximum(size - 2, 0), tl.minimum(size - 1, 1))
    return start, tl.where(region == 0, 1, inner)
