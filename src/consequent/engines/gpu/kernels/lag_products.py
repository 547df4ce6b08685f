# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Products of neighbouring pixels with all that they reach, of all layers at once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from consequent.engines.gpu.kernels.lag_jobs import Cut, extent, region_of, slot_place
from consequent.engines.gpu.kernels.launch import launch


def multiply(turned: Tensor, layers: int, cut: Cut) -> Tensor:
    """The products of groups and what they reach, ``[layers, jobs, tiles, group · channels, slots · channels]``."""
    _, channels, height, width = cut.shape
    plan = cut.plan
    tile = plan.group * plan.channels * plan.slots * plan.channels
    products = torch.empty(layers * cut.jobs * cut.tiles * tile, dtype=torch.float32, device=turned.device)
    at_once = 3 if plan.rows else 1
    launch(
        _multiply,
        (cut.jobs * layers * cut.tiles // at_once,),
        (turned, products, cut.images, height, width, channels, layers, cut.share, *cut.splits),
        (plan.group, plan.channels, plan.slots, cut.depth, at_once),
        num_warps=plan.warps,
        num_stages=plan.stages,
    )
    return products


@triton.jit
def _job_of(program, tiles, layers, share, middle, along_row, along_column, height, groups_across):
    """What a program is to do: its tile, layer and job, and of which rows and groups it takes which ones.

    Neighbouring programs read the same pixels; the longest jobs come first.
    """
    tile = program % tiles
    layer = (program // tiles) % layers
    job = program // tiles // layers
    rows_region, groups_region, split = region_of(job, middle, along_row, along_column)
    first_row, rows = extent(rows_region, height)
    first_group, groups = extent(groups_region, groups_across)
    start = split * share
    return tile, layer, job, first_row, first_group, groups, start, tl.minimum(start + share, rows * groups)


@triton.jit(do_not_specialize=["height", "width", "channels", "layers", "share", "middle", "along_row", "along_column"])
def _multiply(
    turned,
    products,
    images,
    height,
    width,
    channels,
    layers,
    share,
    middle,
    along_row,
    along_column,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    DEPTH: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """One tile of one job of one layer, or three of them at once, where a tile is a row of all pixels in reach.

    Three are what is reached in one row, times groups there, in the row above and in the one above that. The job then
    says which row is reached, not where the groups are. That is the same where the first and last row matter.
    """
    STRIPS: tl.constexpr = (3 * GROUP + 9 + SLOTS) // SLOTS // AT_ONCE
    M: tl.constexpr = GROUP * BLOCK
    T: tl.constexpr = SLOTS * BLOCK
    blocks = tl.cdiv(channels, BLOCK)
    programs = blocks * blocks * STRIPS  # of one job of one layer
    tile, layer, job, first_row, first_group, groups, start, stop = _job_of(
        tl.program_id(0), programs, layers, share, middle, along_row, along_column, height, tl.cdiv(width, GROUP)
    )

    row = tl.arange(0, M)
    across = row // BLOCK
    channel = (tile // (STRIPS * blocks)) * BLOCK + row % BLOCK
    row = tl.arange(0, T)
    if AT_ONCE == 1:
        other_below, other_across = slot_place((tile % STRIPS) * SLOTS + row // BLOCK, GROUP, SLOTS)
    else:
        other_across = row // BLOCK - 2
    other_channel = (tile // STRIPS % blocks) * BLOCK + row % BLOCK
    if AT_ONCE == 1:
        other_rows = (other_below * width + other_across) * channels + other_channel
        other_below = tl.where((other_channel < channels) & (other_below < 3), other_below, height)
    image = tl.arange(0, DEPTH)
    here_places = ((across * channels + channel) * images)[:, None] + image[None, :]
    if AT_ONCE == 3:
        other_rows = other_across * channels + other_channel
    other_places = (other_rows * images)[:, None] + image[None, :]

    reach = tl.where(channel < channels, across, width)
    layer_start = turned + layer.to(tl.int64) * (height * width * channels) * images
    row_length = width * channels * images
    depths = images // DEPTH
    product = tl.zeros((M, T), tl.float32)
    product_1 = tl.zeros((M, T), tl.float32)  # of the row above
    product_2 = tl.zeros((M, T), tl.float32)
    for step in range(start * depths, stop * depths):
        unit = step // depths
        y = first_row + unit // groups
        x = (first_group + unit % groups) * GROUP
        base = layer_start + ((y * width + x).to(tl.int64) * (channels * images) + (step % depths) * DEPTH)
        if AT_ONCE == 1:
            here_inside = (x + across < width) & (channel < channels)
            here = tl.load(base + here_places, mask=here_inside[:, None], other=0.0)
            other_inside = (x + other_across >= 0) & (x + other_across < width) & (y + other_below < height)
            other = tl.load(base + other_places, mask=other_inside[:, None], other=0.0)
            product = tl.dot(here, tl.trans(other), product, input_precision="tf32")
        else:
            other_inside = (x + other_across >= 0) & (x + other_across < width) & (other_channel < channels)
            other = tl.trans(tl.load(base + other_places, mask=other_inside[:, None], other=0.0))
            inside = x + reach < width
            here = tl.load(base + here_places, mask=inside[:, None], other=0.0)
            product = tl.dot(here, other, product, input_precision="tf32")
            inside = x + tl.where(y > 0, reach, width) < width
            here = tl.load(base - row_length + here_places, mask=inside[:, None], other=0.0)
            product_1 = tl.dot(here, other, product_1, input_precision="tf32")
            inside = x + tl.where(y > 1, reach, width) < width
            here = tl.load(base - 2 * row_length + here_places, mask=inside[:, None], other=0.0)
            product_2 = tl.dot(here, other, product_2, input_precision="tf32")

    jobs = tl.num_programs(0) // (programs * layers)
    number = (layer * jobs + job) * (programs * AT_ONCE) + tile * AT_ONCE
    target = products + number.to(tl.int64) * (M * T) + tl.arange(0, M)[:, None] * T + tl.arange(0, T)[None, :]
    tl.store(target, product)
    if AT_ONCE == 3:
        tl.store(target + M * T, product_1)
        tl.store(target + 2 * M * T, product_2)
