"""The gradients of many layers times their inverses, in two launches for all of them.

The plain-torch line is :func:`consequent.maths.inverse.multiplied`. Layer by layer a GPU's host would need as long for
these as for the whole training step.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from consequent.gpu.launch import Addresses, index_of, is_dense, launch, on_device, precision, takes

AT_ONCE = 2**26  # elements of the products that are kept between the launches
TILE = (128, 128, 32)  # rows and columns of a product that one program computes, and how many inner ones at a time
BLOCK = (8, 256)  # rows that one program writes, and how many columns at a time


class Problem(NamedTuple):
    """One layer.

    Attributes:
        weight: a tensor of the shape, and the order in memory, of the gradients of the layer's weight.
        has_bias: whether there are gradients of a bias.
        matrix: K of :mod:`consequent.maths.inverse`, ``[1, D, D]``,
        shift: m,
        unit: κ,
        trace: and the trace of the moment.
        scale: by which updates are multiplied.
    """

    weight: Tensor
    has_bias: bool
    matrix: Tensor
    shift: Tensor
    unit: Tensor
    trace: Tensor
    scale: float

    @property
    def taps(self) -> int:
        """Of a weight whose channels lie last in memory; otherwise 1."""
        return 1 if self.weight.is_contiguous() else self.weight.shape[2] * self.weight.shape[3]

    @property
    def is_simple(self) -> bool:
        """Whether rows of the gradient begin at multiples of 64 bytes, and lie in their order."""
        return self.taps == 1 and self.matrix.shape[-1] % 16 == 0

    @property
    def share(self) -> float:
        """``√(columns / outputs)``, by which the bound goes."""
        return sqrt((self.matrix.shape[-1] + self.has_bias) / self.weight.shape[0])


Gradients = Sequence[tuple[Tensor, Tensor | None]]  # of weights and biases


def accepts(weight: Tensor) -> bool:
    """Whether gradients like this weight are multiplied here: in float32, in a usual order, on a GPU with Triton."""
    return takes(weight) and is_dense(weight)


class Multiplication:
    """The same layers, step after step.

    Args:
        problems: the layers.
    """

    def __init__(self, problems: Sequence[Problem]) -> None:
        by_kind: dict[bool, list[int]] = {True: [], False: []}
        for place, problem in enumerate(problems):
            by_kind[problem.is_simple].append(place)
        chunks = [chunk for places in by_kind.values() for chunk in _chunks(places, problems)]
        self._launches = [(places, _Launch([problems[place] for place in places])) for places in chunks]

    def __call__(self, gradients: Gradients, rates: Sequence[float] | None = None, limit: float = 0.0) -> None:
        """Replace the gradients.

        Args:
            gradients: of each layer.
            rates: of each layer's parameters; None: they are not bounded.
            limit: β of the bound.
        """
        for places, launch_these in self._launches:
            of_these = None if rates is None else [rates[place] for place in places]
            launch_these([gradients[place] for place in places], of_these, limit)

    def with_changes(self, gradients: Gradients) -> Tensor:
        """Replace the gradients; how much one of length 1 changes the outputs of each layer, relative to its inputs."""
        changes = torch.empty(len(gradients), device=gradients[0][0].device)
        for places, launch_these in self._launches:
            found = launch_these([gradients[place] for place in places], None, 0.0, told=True)
            assert found is not None
            changes[index_of(tuple(places), changes.device)] = found
        return changes


def _chunks(places: Sequence[int], problems: Sequence[Problem]) -> list[list[int]]:
    chunks: list[list[int]] = []
    size = AT_ONCE
    for place in places:
        if size + problems[place].weight.numel() > AT_ONCE:
            chunks.append([])
            size = 0
        chunks[-1].append(place)
        size += problems[place].weight.numel()
    return chunks


class _Layout(NamedTuple):
    """What depends on shapes alone: tiles of products, blocks of rows, and where those of each problem begin."""

    tiles: Tensor
    blocks: Tensor
    starts: list[int]
    first_tiles: list[int]
    counts: list[int]
    first_blocks: list[int]
    block_counts: list[int]
    elements: int


@lru_cache(maxsize=64)
def _layout(shapes: tuple[tuple[int, int], ...], device: torch.device) -> _Layout:
    tiles: list[tuple[int, int, int]] = []
    blocks: list[tuple[int, int]] = []
    starts, first_tiles, counts, first_blocks, block_counts, elements = [], [], [], [], [], 0
    for place, (rows, columns) in enumerate(shapes):
        starts.append(elements)
        first_tiles.append(len(tiles))
        tiles += [(place, row, column) for column in range(0, columns, TILE[1]) for row in range(0, rows, TILE[0])]
        counts.append(len(tiles) - first_tiles[-1])
        first_blocks.append(len(blocks))
        blocks += [(place, row) for row in range(0, rows, BLOCK[0])]
        block_counts.append(len(blocks) - first_blocks[-1])
        elements += -(-rows * columns // 16) * 16
    tables = [torch.tensor(table, dtype=torch.int32, device=device) for table in (tiles, blocks)]
    return _Layout(tables[0], tables[1], starts, first_tiles, counts, first_blocks, block_counts, elements)


class _Launch:
    """Layers that are multiplied by the same two launches."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self._problems, self._is_simple = list(problems), problems[0].is_simple
        self._device = problems[0].weight.device
        shapes = tuple([(one.weight.shape[0], one.matrix.shape[-1]) for one in problems])
        layout = self._layout = _layout(shapes, self._device)
        fields: list[int] = []
        for place, one in enumerate(problems):
            matrices = (one.matrix, one.shift, one.unit, one.trace)
            fields += [*(part.data_ptr() for part in matrices), *shapes[place], one.taps, int(one.has_bias)]
            fields += [layout.starts[place], layout.first_tiles[place], layout.counts[place]]
            fields += [layout.first_blocks[place], layout.block_counts[place]]
        self._fields = on_device(fields, torch.int64, self._device)
        self._addresses = Addresses()
        self._numbers: dict[tuple[float, ...], Tensor] = {}

    def __call__(
        self, gradients: Gradients, rates: Sequence[float] | None, limit: float, *, told: bool = False
    ) -> Tensor | None:
        from consequent.gpu import multiply_kernels as kernels

        layout, highest, of_rates = self._layout, 0.0, (1.0,) * len(self._problems)
        if rates is not None:
            highest = max(rates)
            of_rates = tuple([rate / highest if highest else 0.0 for rate in rates])
        numbers = self._numbers.get(of_rates)
        if numbers is None:
            pairs = zip(self._problems, of_rates, strict=True)
            values = [number for one, rate in pairs for number in (one.scale, one.share * rate)]
            numbers = self._numbers[of_rates] = on_device(values, torch.float32, self._device)
        addresses = [0 if one is None else one.data_ptr() for pair in gradients for one in pair]
        table = self._addresses(addresses, self._device)
        tiles, blocks = len(layout.tiles), len(layout.blocks)
        scratch = torch.empty(layout.elements + tiles + blocks, device=self._device)
        energies, squares = scratch[layout.elements :], scratch[layout.elements + tiles :]
        with torch.cuda.device_of(scratch):
            launch(
                *(kernels.products, tiles, (table, self._fields, layout.tiles, scratch, energies)),
                (self._is_simple, precision(), *TILE),
                num_warps=4,
                num_stages=3,
            )
            tensors = (table, self._fields, layout.blocks, numbers, scratch, energies, squares)
            launch(
                *(kernels.write, blocks, (*tensors, float(highest), float(limit))),
                (self._is_simple, rates is not None, told, *BLOCK),
                num_warps=4,
            )
            if not told:
                return None
            changes = torch.empty(len(self._problems), device=self._device)
            found = (self._fields, numbers, energies, squares, changes)
            launch(kernels.tell, len(self._problems), found, (), num_warps=1)
        return changes
