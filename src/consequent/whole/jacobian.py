"""The Jacobian J of all residuals, some rows at a time: ``J Jᵀ`` parameter by parameter, ``JᵀJ``, ``Jᵀ v``.

By a weight, a residual's gradient is ``Σ_s g_s ⊗ x_s``, and the inner product of two of them is
``Σ_st (g_s · g_t)(x_s · x_t)``. So either rows of J are formed and multiplied, or the products of the x and those of
the g are: whichever is less work. The latter is for wide layers.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from consequent.whole.residuals import Part, Rows

TILE = 256  # rows or columns at a time
COST_OF_MEMORY = 8  # multiplications of a matrix product that take as long as one of numbers in memory


class Jacobian:
    """J, a row for each residual, a column for each element of the parameters.

    Args:
        rows: of the residuals, in their order.
        sizes: of the parameters, by name.
        room: bytes for what is formed at a time.
    """

    def __init__(self, rows: Sequence[Rows], sizes: dict[str, int], room: float) -> None:
        self.sizes, self.values = sizes, torch.cat([one.values for one in rows])
        self.columns = sum(sizes.values())
        self.is_wide = self.columns >= len(self.values)
        parts = {name: [one.parts[name] for one in rows if name in one.parts] for name in sizes}
        self.products = [name for name in sizes if self.is_wide and all(map(_is_cheaper_by_products, parts[name]))]
        self.formed = {name: size for name, size in sizes.items() if name not in self.products}
        fitting = room / (4 * self.values.element_size() * max(1, sum(self.formed.values())))  # rows
        self.fits = fitting >= len(self.values)
        self.tiles = [one for its in rows for one in _split(its, max(1, min(TILE, int(fitting))))]
        self.numbers = [len(one.values) for one in self.tiles]

    def smaller_system(self) -> Tensor:
        """``J Jᵀ`` or ``JᵀJ``, in float64: float32 has too few digits to solve it."""
        total = self.gram() if self.is_wide else self.normal()
        return (total.tril() + total.tril(-1).mT).double()

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
        form = functools.cache(self._form) if self.fits else self._form
        for i, (one, blocks) in enumerate(zip(self.tiles, total.split(self.numbers), strict=True)):
            J = form(i)
            for j, (other, block) in enumerate(zip(self.tiles[: i + 1], blocks.split(self.numbers, 1), strict=False)):
                block.addmm_(J, (J if i == j else form(j)).mT)
                for name in self.products:
                    if name in one.parts and name in other.parts:
                        block += _inner_products(one.parts[name], other.parts[name])
        return total

    def normal(self) -> Tensor:
        """``JᵀJ``, on and below the diagonal."""
        total = self.values.new_zeros(self.columns, self.columns)
        for i in range(len(self.tiles)):
            J = self._form(i)
            for start in range(0, self.columns, TILE):
                total[start:, start : start + TILE].addmm_(J[:, start:].mT, J[:, start : start + TILE])
        return total

    def transposed_times(self, vector: Tensor) -> Tensor:
        """``Jᵀ v``."""
        found = {name: vector.new_zeros(size) for name, size in self.sizes.items()}
        for one, its in zip(self.tiles, vector.split(self.numbers), strict=True):
            for name, part in one.parts.items():
                grads = (part.output_grads * its[:, None, None]).flatten(0, 1)
                found[name] += (grads.mT @ part.inputs.flatten(0, 1)).flatten()
        return torch.cat(list(found.values()))

    def _form(self, tile: int) -> Tensor:
        """Rows of J, without the columns that are not to be formed."""
        one = self.tiles[tile]
        J = self.values.new_zeros(len(one.values), sum(self.formed.values()))
        for name, block in zip(self.formed, J.split(list(self.formed.values()), 1), strict=True):
            if name in one.parts:
                inputs, output_grads = one.parts[name]
                torch.bmm(output_grads.mT, inputs, out=block.unflatten(1, (-1, inputs.shape[2])))
        return J


def _is_cheaper_by_products(part: Part) -> bool:
    (_, uses, width), outputs = part.inputs.shape, part.output_grads.shape[2]
    return uses**2 * (outputs + width + COST_OF_MEMORY) < outputs * width


def _inner_products(one: Part, other: Part) -> Tensor:
    products = one.inputs.flatten(0, 1) @ other.inputs.flatten(0, 1).mT
    products *= one.output_grads.flatten(0, 1) @ other.output_grads.flatten(0, 1).mT
    return products.view(len(one.inputs), -1, len(other.inputs), other.inputs.shape[1]).sum((1, 3))


def _split(rows: Rows, size: int) -> list[Rows]:
    split = {name: (part.inputs.split(size), part.output_grads.split(size)) for name, part in rows.parts.items()}
    return [
        Rows(values, {name: Part(x[place], g[place]) for name, (x, g) in split.items()})
        for place, values in enumerate(rows.values.split(size))
    ]
