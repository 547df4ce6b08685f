"""The sample side of many dense layers in three launches, whatever their number.

The plain-torch line is :func:`consequent.maths.ridge.update_from_samples`.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from consequent.gpu.inverses import LEAST
from consequent.gpu.launch import Addresses, launch, on_device, precision, takes

MOST = 128  # samples
# Outputs and features of an update that one program computes; features of a Gram matrix that are summed up at a time.
# They take up to 192 KiB of a multiprocessor's memory; where there is less, 64 KiB.
LARGE, SMALL = (64, 256, 64), (32, 64, 32)


class Call(NamedTuple):
    """One call of a layer.

    Attributes:
        inputs: X, ``[samples, features]``.
        output_grads: ΔZ, ``[samples, outputs]``.
        ones: whether there is a bias.
        scale: by which the update is multiplied.
    """

    inputs: Tensor
    output_grads: Tensor
    ones: bool
    scale: float


class Updates(NamedTuple):
    """What came of the calls.

    Attributes:
        weights: of each call, ``[outputs, features]``.
        biases: likewise.
        told: how many calls can be told of, how much outputs change, failed factorisations: ``[calls, 3]``.
    """

    weights: list[Tensor]
    biases: list[Tensor | None]
    told: Tensor


def accepts(inputs: Tensor, output_grads: Tensor, *, ones: bool) -> bool:
    """Whether a call may be solved here."""
    if inputs.ndim != 2 or not 0 < inputs.shape[0] <= min(MOST, inputs.shape[1] + ones):
        return False
    return takes(inputs) and output_grads.dtype is torch.float32


class _Layout(NamedTuple):
    sizes: Tensor
    tiles: Tensor
    scales: Tensor
    starts: tuple[int, ...]
    elements: int
    tiles_of_outputs: int


@lru_cache(maxsize=256)
def _layout(
    shapes: tuple[tuple[int, int, int, int, float], ...], tile: tuple[int, int, int], device: torch.device
) -> _Layout:
    sizes, tiles, starts, elements, first = [], [], [], 0, 0
    for place, (samples, features, outputs, ones, _) in enumerate(shapes):
        count = -(-outputs // tile[0])
        sizes.append((samples, features, outputs, ones, first, count))
        first += count
        tiles += [(place, o, d) for o in range(0, outputs, tile[0]) for d in range(0, features, tile[1])]
        for piece in (outputs * features, outputs):
            starts.append(elements)
            elements += -(-piece // 4) * 4  # at multiples of 16 bytes
    tables = [on_device(table, torch.int32, device) for table in (sizes, tiles)]
    scales = on_device([shape[-1] for shape in shapes], torch.float32, device)
    return _Layout(tables[0], tables[1], scales, tuple(starts), elements, first)


def _tile(size: int, device: torch.device) -> tuple[int, int, int]:
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    if getattr(properties, "shared_memory_per_block_optin", 0) < 200_000:
        return SMALL
    return (64, 128, 64) if size == MOST and precision() == "tf32x3" else LARGE


_addresses = Addresses()


def update_all(calls: Sequence[Call], damping: float, *, measured: bool) -> Updates:
    """The updates of all calls.

    Args:
        calls: of one device.
        damping: λ, relative to the mean eigenvalue, and above all rounding.
        measured: whether it is to be told how much outputs change.
    """
    from consequent.gpu import samples_kernels as kernels

    device = calls[0].inputs.device
    pairs = [(one.inputs.contiguous(), one.output_grads.contiguous()) for one in calls]
    shapes = tuple(
        [(*x.shape, dz.shape[1], int(one.ones), one.scale) for (x, dz), one in zip(pairs, calls, strict=True)]
    )
    size = max(16, 1 << (max(len(x) for x, _ in pairs) - 1).bit_length())
    tile = _tile(size, device)
    layout = _layout(shapes, tile, device)
    memory = torch.empty(layout.elements, device=device)
    weights, biases, addresses = [], [], []
    address = memory.data_ptr()
    for place, ((x, dz), one) in enumerate(zip(pairs, calls, strict=True)):
        outputs, features = dz.shape[1], x.shape[1]
        of_weight, of_bias = layout.starts[2 * place : 2 * place + 2]
        weights.append(memory.as_strided((outputs, features), (features, 1), of_weight))
        biases.append(memory.as_strided((outputs,), (1,), of_bias) if one.ones else None)
        addresses += [x.data_ptr(), dz.data_ptr(), address + 4 * of_weight, address + 4 * of_bias]
    table = _addresses(addresses, device)
    inverses = torch.empty(len(calls), size, size, device=device)
    numbers = torch.empty(6 * len(calls) + 2 * layout.tiles_of_outputs, device=device)
    notes, told, energies = numbers.split([3 * len(calls), 3 * len(calls), 2 * layout.tiles_of_outputs])
    with torch.cuda.device_of(memory):
        launch(
            *(kernels.inverses, len(calls), (table, layout.sizes, inverses, notes, damping)),
            (LEAST, precision(), size, tile[2]),
            num_warps=8 if size > 32 else 4,
        )
        launch(
            *(kernels.updates, len(layout.tiles)),
            (table, layout.sizes, layout.tiles, layout.scales, inverses, notes, energies),
            (measured, precision(), size, *tile[:2]),
            num_warps=8,
        )
        launch(kernels.tell, len(calls), (layout.sizes, notes, energies, told), (measured,), num_warps=1)
    return Updates(weights, biases, told.view(-1, 3))
