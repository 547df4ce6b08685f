# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Products of equal lag added up, and what is missing at the border taken off: the second moments."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from consequent.engines.gpu.kernels.lag_jobs import MOST_JOBS, Cut, region_of, slot_of
from consequent.engines.gpu.kernels.launch import launch

LAGS = 13  # (0, 0), (0, 1), (0, 2), (1, −2), …, (2, 2)
PART = 16  # pairs of channels that one program puts together: few, since all wait for the memory
INTERPRETED_PART = 4096  # on a CPU, where a program costs more than its size


def put_together(products: Tensor, sums: Tensor, layers: int, cut: Cut, ones: bool) -> Tensor:
    """``[layers, features, features]``."""
    images, channels, height, width = cut.shape
    plan = cut.plan
    moments = torch.empty((layers, cut.features, cut.features), dtype=torch.float32, device=products.device)
    part = PART if products.device.type == "cuda" else INTERPRETED_PART
    launch(
        _put_lags,
        (-(-channels * channels // part), LAGS + 9 * ones, layers),
        (products, sums, moments, images, height, width, channels, cut.jobs, *cut.splits),
        (
            *(ones, plan.group, plan.channels, plan.slots, LAGS),
            *(products.numel() // layers >= 2**31, part, MOST_JOBS, 16 if channels > 4 else 4),
        ),
        num_warps=1,
    )
    return moments


@triton.jit(do_not_specialize=["images", "height", "width", "jobs", "middle", "along_row", "along_column"])
def _put_lags(
    products,
    sums,
    moments,
    images,
    height,
    width,
    channels,
    jobs,
    middle,
    along_row,
    along_column,
    ONES: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    LAGS: tl.constexpr,
    WIDE: tl.constexpr,
    PART: tl.constexpr,
    JOBS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Some pairs of channels of one lag: the sums over jobs and groups, written to all pairs of taps, and mirrored."""
    features = 9 * channels + ONES
    lag = tl.program_id(1)
    layer = tl.program_id(2)
    moment = moments + layer.to(tl.int64) * (features * features)
    if lag < LAGS:
        lag_y = (lag + 2) // 5
        lag_x = (lag + 2) % 5 - 2
        element = tl.program_id(0) * PART + tl.arange(0, PART)
        channel = element // channels
        other_channel = element % channels
        real = element < channels * channels
        T: tl.constexpr = SLOTS * BLOCK
        TILE: tl.constexpr = GROUP * BLOCK * T
        STRIPS: tl.constexpr = (3 * GROUP + 9 + SLOTS) // SLOTS
        blocks = tl.cdiv(channels, BLOCK)
        job_size = blocks * blocks * (STRIPS * TILE)
        tile = ((channel // BLOCK) * blocks + other_channel // BLOCK) * STRIPS
        within = tile * TILE + (channel % BLOCK) * T + other_channel % BLOCK
        job = tl.arange(0, JOBS)
        row_region, group_region, _ = region_of(job, middle, along_row, along_column)
        in_first_row = (row_region == 0)[:, None]
        in_last_row = (row_region == tl.where(height > 1, 2, 0))[:, None]
        there = (job < jobs)[:, None] & real[None, :]
        places = products + layer.to(tl.int64) * jobs * job_size
        if WIDE:
            job = job.to(tl.int64)
        places += (job * job_size)[:, None] + within[None, :]
        everything, first_row, last_row, first_column, last_column, first_first, first_last, last_first, last_last = (
            _sums_of_lag(
                places, there, in_first_row, in_last_row, group_region, lag_y, lag_x, width, GROUP, BLOCK, SLOTS
            )
        )
        for row_tap in tl.static_range(3):
            for column_tap in tl.static_range(3):
                value = everything
                if row_tap == 0:  # does not see the last row
                    value -= last_row
                if row_tap == 2:
                    value -= first_row
                if column_tap == 0:
                    value -= last_column
                if column_tap == 2:
                    value -= first_column
                if row_tap == 0 and column_tap == 0:
                    value += last_last
                if row_tap == 0 and column_tap == 2:
                    value += last_first
                if row_tap == 2 and column_tap == 0:
                    value += first_last
                if row_tap == 2 and column_tap == 2:
                    value += first_first
                other_row = row_tap + lag_y
                other_column = column_tap + lag_x
                if (other_row < 3) & (other_column >= 0) & (other_column < 3):
                    feature = channel * 9 + (row_tap * 3 + column_tap)
                    other = other_channel * 9 + other_row * 3 + other_column
                    # Lag 0 has every value twice: one of them is taken, so that the moment is symmetric.
                    wanted = real & (channel <= other_channel + lag * channels)
                    tl.store(moment + feature.to(tl.int64) * features + other, value, mask=wanted)
                    tl.store(moment + other.to(tl.int64) * features + feature, value, mask=wanted)
    elif ONES:
        _put_ones(sums, moment, lag - LAGS, layer, images, height, width, channels, WIDTH)


@triton.jit
def _offset_of(lag_y, lag_x, across, GROUP: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr):
    """Where in a job's tiles the products of this lag are, of the pixel that many columns across the group."""
    T: tl.constexpr = SLOTS * BLOCK
    slot = slot_of(lag_y, lag_x, across, GROUP, SLOTS)
    return (slot // SLOTS) * (GROUP * BLOCK * T) + across * (BLOCK * T) + (slot % SLOTS) * BLOCK


@triton.jit
def _sums_of_lag(
    places,
    there,
    in_first_row,
    in_last_row,
    group_region,
    lag_y,
    lag_x,
    width,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """The sum over all pixels, the first and last row, the first and last column, and the corners (row, column).

    Those of a row are 0 where the lag leads out of it, and so on: nothing is to be taken off.
    """
    values = tl.zeros(there.shape, tl.float32)
    for across in tl.static_range(GROUP):
        values += tl.load(places + _offset_of(lag_y, lag_x, across, GROUP, BLOCK, SLOTS), mask=there, other=0.0)
    everything = tl.sum(values, 0)
    nothing = tl.zeros_like(everything)
    first_row, last_row, first_column, last_column = nothing, nothing, nothing, nothing
    first_first, first_last, last_first, last_last = nothing, nothing, nothing, nothing
    if lag_y == 0:
        first_row = tl.sum(tl.where(in_first_row, values, 0.0), 0)
        last_row = tl.sum(tl.where(in_last_row, values, 0.0), 0)
    if lag_x == 0:
        offset = _offset_of(lag_y, lag_x, 0, GROUP, BLOCK, SLOTS)
        firsts = tl.load(places + offset, mask=there & (group_region == 0)[:, None], other=0.0)
        first_column = tl.sum(firsts, 0)
        if lag_y == 0:
            first_first = tl.sum(tl.where(in_first_row, firsts, 0.0), 0)
            last_first = tl.sum(tl.where(in_last_row, firsts, 0.0), 0)
        offset = _offset_of(lag_y, lag_x, (width - 1) % GROUP, GROUP, BLOCK, SLOTS)
        in_last_group = group_region == tl.where(width > GROUP, 2, 0)
        lasts = tl.load(places + offset, mask=there & in_last_group[:, None], other=0.0)
        last_column = tl.sum(lasts, 0)
        if lag_y == 0:
            first_last = tl.sum(tl.where(in_first_row, lasts, 0.0), 0)
            last_last = tl.sum(tl.where(in_last_row, lasts, 0.0), 0)
    return everything, first_row, last_row, first_column, last_column, first_first, first_last, last_first, last_last


@triton.jit
def _put_ones(sums, moment, tap, layer, images, height, width, channels, WIDTH: tl.constexpr):
    """One tap's part of the last row and column: all that it sees, from the sums over the images."""
    PIXELS: tl.constexpr = 256
    features = 9 * channels + 1
    area = height * width
    source = sums + layer.to(tl.int64) * (area * channels)
    if tl.program_id(0) + tap == 0:
        tl.store(moment + (features * features - 1), (images * area).to(tl.float32))
    for first in range(tl.program_id(0) * WIDTH, channels, tl.num_programs(0) * WIDTH):
        channel = first + tl.arange(0, WIDTH)
        real = channel < channels
        total = tl.zeros((WIDTH,), tl.float32)
        for start in range(0, area, PIXELS):
            pixel = start + tl.arange(0, PIXELS)
            y = pixel // width + 1 - tap // 3  # the output from which the tap sees this pixel
            x = pixel % width + 1 - tap % 3
            seen = (pixel < area) & (y >= 0) & (y < height) & (x >= 0) & (x < width)
            places = source + pixel[:, None] * channels + channel[None, :]
            total += tl.sum(tl.load(places, mask=seen[:, None] & real[None, :], other=0.0), 0)
        feature = channel * 9 + tap
        tl.store(moment + feature.to(tl.int64) * features + (features - 1), total, mask=real)
        tl.store(moment + (features - 1) * features + feature, total, mask=real)
