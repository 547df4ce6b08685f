"""The Jacobian J of all residuals, which is never there as a whole: ``J Jᵀ``, ``JᵀJ``, ``Jᵀ v``.

By a weight, a residual's gradient is ``Σ_s g_s ⊗ x_s``, and the inner product of two of them is
``Σ_st (g_s · g_t)(x_s · x_t)``. So either the weight's columns of J are formed and multiplied, or the products of the x
and those of the g are: whichever is less work. The latter is for wide layers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from consequent.whole.residuals import Part, Rows

TILE = 256  # rows at a time; on a GPU, four times as many
COST_OF_MEMORY = 8  # multiplications of a matrix product that take as long as one of numbers in memory


class Jacobian:
    """J, a row for each residual, a column for each element of the parameters.

    Args:
        rows: of the residuals, in their order.
        sizes: of the parameters, by name.
    """

    def __init__(self, rows: Sequence[Rows], sizes: dict[str, int]) -> None:
        self.sizes, self.values = sizes, torch.cat([one.values for one in rows])
        self.is_wide = sum(sizes.values()) >= len(self.values)
        self.tiles = [tile for one in rows for tile in _split(one)]
        self.numbers = [len(tile.values) for tile in self.tiles]

    def smaller_system(self) -> Tensor:
        """``J Jᵀ`` or ``JᵀJ`` on and below the diagonal, in float64: float32 has too few digits to solve it."""
        return (self.gram() if self.is_wide else self.normal()).double()

    def into_system(self, residuals: Tensor) -> Tensor:
        """What the system is solved for: the residuals, or ``Jᵀ r``."""
        return (residuals if self.is_wide else self.transposed_times(residuals)).double()

    def out_of_system(self, solution: Tensor) -> Tensor:
        """The change of the parameters that a solution means: ``Jᵀ s``, or s."""
        solution = solution.to(self.values.dtype)
        return self.transposed_times(solution) if self.is_wide else solution

    def gram(self) -> Tensor:
        """``J Jᵀ``, on and below the diagonal."""
        total = self.values.new_zeros(len(self.values), len(self.values))
        for name in self.sizes:
            parts = [tile.parts.get(name) for tile in self.tiles]
            if not all(part is None or is_cheaper_by_products(part) for part in parts):
                _add_half_of_gram(total, torch.cat([self._formed(tile, name) for tile in self.tiles]))
                continue
            for i, (one, blocks) in enumerate(zip(parts, total.split(self.numbers), strict=True)):
                for other, block in zip(parts[: i + 1], blocks.split(self.numbers, 1), strict=False):
                    if one is not None and other is not None:
                        block += _inner_products(one, other)
        return total

    def normal(self) -> Tensor:
        """``JᵀJ``, on and below the diagonal."""
        columns = sum(self.sizes.values())
        total = self.values.new_zeros(columns, columns)
        for tile in self.tiles:
            _add_half_of_gram(total, torch.cat([self._formed(tile, name) for name in self.sizes], 1).mT)
        return total

    def transposed_times(self, vector: Tensor) -> Tensor:
        """``Jᵀ v``."""
        found = {name: vector.new_zeros(size) for name, size in self.sizes.items()}
        for tile, its in zip(self.tiles, vector.split(self.numbers), strict=True):
            for name, part in tile.parts.items():
                grads = (part.output_grads * its[:, None, None]).flatten(0, 1)
                found[name] += (grads.mT @ part.inputs.flatten(0, 1)).flatten()
        return torch.cat(list(found.values()))

    def _formed(self, tile: Rows, name: str) -> Tensor:
        """The columns of a parameter."""
        if name not in tile.parts:
            return tile.values.new_zeros(len(tile.values), self.sizes[name])
        inputs, output_grads = tile.parts[name]
        return torch.bmm(output_grads.mT, inputs).flatten(1)


def is_cheaper_by_products(part: Part) -> bool:
    """Whether gradients by a parameter are multiplied with less work if they are not formed."""
    (_, uses, width), outputs = part.inputs.shape, part.output_grads.shape[2]
    return uses**2 * (outputs + width + COST_OF_MEMORY) < outputs * width


def _add_half_of_gram(total: Tensor, matrix: Tensor) -> None:
    tile = _tile(matrix)
    for start in range(0, len(matrix), tile):
        total[start:, start : start + tile].addmm_(matrix[start:], matrix[start : start + tile].mT)


def _inner_products(one: Part, other: Part) -> Tensor:
    products = one.inputs.flatten(0, 1) @ other.inputs.flatten(0, 1).mT
    products *= one.output_grads.flatten(0, 1) @ other.output_grads.flatten(0, 1).mT
    return products.view(len(one.inputs), -1, len(other.inputs), other.inputs.shape[1]).sum((1, 3))


def _tile(matrix: Tensor) -> int:
    return TILE if matrix.device.type == "cpu" else 4 * TILE


def _split(rows: Rows) -> list[Rows]:
    tile = _tile(rows.values)
    split = {name: zip(*(side.split(tile) for side in part), strict=True) for name, part in rows.parts.items()}
    return [Rows(one, {name: Part(*next(its)) for name, its in split.items()}) for one in rows.values.split(tile)]
