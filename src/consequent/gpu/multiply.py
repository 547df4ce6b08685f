"""The gradients of many layers times their inverses, in two launches for all of them.

The plain-torch line is :func:`consequent.maths.inverse.multiplied`. Layer by layer a GPU's host would need as long for
these as for the whole training step.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor

from consequent.gpu.launch import Addresses, is_dense, launch, on_device, precision, takes
from consequent.maths.inverse import Inverse

AT_ONCE = 2**26  # elements of the products that are kept between the launches
TILE = (128, 128, 32)  # rows and columns of a product that one program computes, and how many inner ones at a time
BLOCK = (8, 256)  # rows that one program writes, and how many columns at a time


class Problem(NamedTuple):
    """One layer.

    Attributes:
        weight: the layer's, which has a gradient at each step, in the same order in memory.
        bias: the layer's, too, if its gradient is to be replaced.
        inverse: of the layer's inputs, in one group.
        scale: by which updates are multiplied.
    """

    weight: Tensor
    bias: Tensor | None
    inverse: Inverse
    scale: float

    @property
    def taps(self) -> int:
        """Of a weight whose channels lie last in memory; otherwise 1."""
        return 1 if self.weight.is_contiguous() else self.weight.shape[2] * self.weight.shape[3]

    @property
    def is_simple(self) -> bool:
        """Whether rows of the gradient begin at multiples of 64 bytes, and lie in their order."""
        return self.taps == 1 and self.inverse.matrix.shape[-1] % 16 == 0

    @property
    def share(self) -> float:
        """``√(columns / outputs)``, by which the bound goes."""
        return sqrt((self.inverse.matrix.shape[-1] + (self.bias is not None)) / self.weight.shape[0])


def accepts(weight: Tensor) -> bool:
    """Whether gradients of this weight are multiplied here: in float32, in a usual order, on a GPU with Triton."""
    return takes(weight) and is_dense(weight)


class Multiplication:
    """The same layers, step after step.

    Args:
        problems: the layers.
    """

    def __init__(self, problems: Sequence[Problem]) -> None:
        alike = [[one for one in problems if one.is_simple is simple] for simple in (True, False)]
        self._launches = [_Launch(chunk) for group in alike for chunk in _chunks(group)]

    def __call__(self, rates: dict[int, float] | None, limit: float | None) -> None:
        """Replace the gradients.

        Args:
            rates: of each weight with its bias, by the weight's id; None without a bound.
            limit: β of the bound; None: no bound.
        """
        for launch in self._launches:
            launch(rates, limit)


def _chunks(problems: Sequence[Problem]) -> list[list[Problem]]:
    chunks: list[list[Problem]] = []
    size = AT_ONCE
    for problem in problems:
        if size + problem.weight.numel() > AT_ONCE:
            chunks.append([])
            size = 0
        chunks[-1].append(problem)
        size += problem.weight.numel()
    return chunks


class _Layout(NamedTuple):
    """What depends on shapes alone: tiles of products, blocks of rows, and where those of each problem begin."""

    tiles: Tensor
    blocks: Tensor
    starts: list[int]
    first_tiles: list[int]
    counts: list[int]
    elements: int


@lru_cache(maxsize=64)
def _layout(shapes: tuple[tuple[int, int], ...], device: torch.device) -> _Layout:
    tiles: list[tuple[int, int, int]] = []
    blocks: list[tuple[int, int]] = []
    starts, first_tiles, counts, elements = [], [], [], 0
    for place, (rows, columns) in enumerate(shapes):
        starts.append(elements)
        first_tiles.append(len(tiles))
        tiles += [(place, row, column) for column in range(0, columns, TILE[1]) for row in range(0, rows, TILE[0])]
        counts.append(len(tiles) - first_tiles[-1])
        blocks += [(place, row) for row in range(0, rows, BLOCK[0])]
        elements += -(-rows * columns // 16) * 16
    tables = [torch.tensor(table, dtype=torch.int32, device=device) for table in (tiles, blocks)]
    return _Layout(tables[0], tables[1], starts, first_tiles, counts, elements)


class _Launch:
    """Layers that are multiplied by the same two launches."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self._problems, self._is_simple = list(problems), problems[0].is_simple
        self._device = problems[0].weight.device
        shapes = tuple([(one.weight.shape[0], one.inverse.matrix.shape[-1]) for one in problems])
        layout = self._layout = _layout(shapes, self._device)
        fields: list[int] = []
        for place, one in enumerate(problems):
            matrices = (one.inverse.matrix, one.inverse.shift, one.inverse.unit, one.inverse.trace)
            fields += [*(part.data_ptr() for part in matrices), *shapes[place], one.taps, int(one.bias is not None)]
            fields += [layout.starts[place], layout.first_tiles[place], layout.counts[place]]
        self._fields = on_device(fields, torch.int64, self._device)
        self._addresses = Addresses()
        self._numbers: dict[tuple[float, ...], Tensor] = {}

    def __call__(self, rates: dict[int, float] | None, limit: float | None) -> None:
        from consequent.gpu import multiply_kernels as kernels

        layout = self._layout
        of_rates = (1.0,) * len(self._problems)
        highest = 0.0
        if rates is not None:
            found = [rates[id(one.weight)] for one in self._problems]
            highest = max(found)
            of_rates = tuple([rate / highest if highest else 0.0 for rate in found])
        numbers = self._numbers.get(of_rates)
        if numbers is None:
            pairs = zip(self._problems, of_rates, strict=True)
            values = [number for one, rate in pairs for number in (one.scale, one.share * rate)]
            numbers = self._numbers[of_rates] = on_device(values, torch.float32, self._device)
        gradients = [0 if one is None else one.grad.data_ptr() for p in self._problems for one in p[:2]]
        table = self._addresses(gradients, self._device)
        scratch = torch.empty(layout.elements, device=self._device)
        energies = torch.empty(len(layout.tiles), device=self._device)
        with torch.cuda.device_of(scratch):
            launch(
                *(kernels.products, layout.tiles.shape[0]),
                *((table, self._fields, layout.tiles, scratch, energies), (self._is_simple, precision(), *TILE)),
                num_warps=4,
                num_stages=3,
            )
            tensors = (table, self._fields, layout.blocks, numbers, scratch, energies)
            launch(
                *(kernels.write, layout.blocks.shape[0], (*tensors, float(highest), float(limit or 0))),
                (self._is_simple, limit is not None, *BLOCK),
                num_warps=4,
            )
