"""The bound on many layers with own inputs, in two launches.

The plain-torch line is in :mod:`consequent.optimizer_step`.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from consequent.gpu.launch import Addresses, is_dense, launch, on_device, takes

BLOCK = 4096  # numbers


class _Layout(NamedTuple):
    sizes: Tensor
    blocks: Tensor
    ranges: Tensor


@lru_cache(maxsize=64)
def _layout(sizes: tuple[tuple[int, ...], ...], device: torch.device) -> _Layout:
    flat: list[int] = []
    blocks: list[tuple[int, int, int]] = []
    ranges: list[tuple[int, int]] = []
    for layer, of_layer in enumerate(sizes):
        first = len(blocks)
        for size in of_layer:
            blocks += [(len(flat), start, layer) for start in range(0, size, BLOCK)]
            flat.append(size)
        ranges.append((first, len(blocks) - first))
    tables = [on_device(table, torch.int32, device) for table in (flat, blocks, ranges)]
    return _Layout(*tables)


@lru_cache(maxsize=256)
def _shares(shares: tuple[float, ...], device: torch.device) -> Tensor:
    return on_device(shares, torch.float32, device)


_addresses = Addresses()


def accepts(gradients: Sequence[Sequence[Tensor]]) -> bool:
    """Whether the gradients of these layers are shortened here."""
    return all(takes(one) and is_dense(one) for of_layer in gradients for one in of_layer)


def shorten_all(gradients: Sequence[Sequence[Tensor]], rates: Sequence[float], told: Tensor, limit: float) -> None:
    """Shorten what would change a layer's outputs too much.

    Args:
        gradients: of each layer.
        rates: of its parameters.
        told: of its passes (:mod:`consequent.minibatch.product`).
        limit: β.
    """
    from consequent.gpu import shorten_kernels as kernels

    device, highest = told.device, max(rates)
    layout = _layout(tuple([tuple([one.numel() for one in of_layer]) for of_layer in gradients]), device)
    table = _addresses([one.data_ptr() for of_layer in gradients for one in of_layer], device)
    shares = _shares(tuple([rate / highest if highest else 0.0 for rate in rates]), device)
    count = layout.blocks.shape[0]
    out = torch.empty(count, device=device)
    with torch.cuda.device_of(told):
        launch(kernels.squares, count, (table, layout.sizes, layout.blocks, out), (BLOCK,), num_warps=4)
        tensors = (table, layout.sizes, layout.blocks, layout.ranges, out, told, shares)
        launch(kernels.shorten, count, (*tensors, float(highest), float(limit)), (BLOCK,), num_warps=4)
