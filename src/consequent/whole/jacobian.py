"""The Jacobian J of all residuals, which is seldom formed: ``J Jᵀ`` parameter by parameter, ``JᵀJ``, ``Jᵀ v``.

By a weight, a residual's gradient is ``Σ_s g_s ⊗ x_s``, and the inner product of two of them is
``Σ_st (g_s · g_t)(x_s · x_t)``. So either columns of J are formed and multiplied, or the products of the x and those of
the g are: whichever is less work. The latter is for wide layers.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Size, Tensor

from consequent.whole.residuals import Part, Rows

TILE = 256  # rows and columns that are computed at a time where half of a product is enough
COST_OF_MEMORY = 8  # multiplications of a matrix product that take as long as one of numbers in memory


class Jacobian:
    """J, a row for each residual, a column for each element of the parameters.

    Args:
        rows: of the residuals, in their order.
        shapes: of the parameters, by name.
        room: bytes for what is formed at a time.
    """

    def __init__(self, rows: Sequence[Rows], shapes: dict[str, Size], room: float) -> None:
        self.rows, self.room, self.values = rows, room, torch.cat([one.values for one in rows])
        self.shapes = {name: tuple(shape) if len(shape) == 2 else (shape.numel(), 1) for name, shape in shapes.items()}
        self.columns = sum(shape.numel() for shape in shapes.values())
        self.is_wide = self.columns >= len(self.values)

    def smaller_system(self) -> Tensor:
        """``J Jᵀ`` or ``JᵀJ``, in float64: float32 has too few digits to solve it."""
        return _mirrored(self.gram() if self.is_wide else self.normal()).double()

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
        for name in self.shapes:
            if self._is_cheaper_by_products(name):
                self._add_products(total, name)
            else:
                for block in self.blocks(name):
                    _add_square(total, block)
        return total

    def normal(self) -> Tensor:
        """``JᵀJ``, on and below the diagonal, of some rows at a time."""
        total = self.values.new_zeros(self.columns, self.columns)
        for rows in self.rows:
            one = Jacobian([rows], {name: Size(shape) for name, shape in self.shapes.items()}, self.room)
            _add_square(total, torch.cat([block for name in self.shapes for block in one.blocks(name)], 1).mT)
        return total

    def transposed_times(self, vector: Tensor) -> Tensor:
        """``Jᵀ v``."""
        found = {name: vector.new_zeros(outputs * width) for name, (outputs, width) in self.shapes.items()}
        for rows, its in zip(self.rows, vector.split([len(one.values) for one in self.rows]), strict=True):
            for name, part in rows.parts.items():
                grads = (part.output_grads * its[:, None, None]).flatten(0, 1)
                found[name] += (grads.mT @ part.inputs.flatten(0, 1)).flatten()
        return torch.cat(list(found.values()))

    def blocks(self, name: str) -> Iterator[Tensor]:
        """J by one parameter, in parts if there is not room for all columns."""
        outputs, width = self.shapes[name]
        at_once = max(1, int(self.room / 2 / (len(self.values) * self.values.element_size() * width)))
        for start in range(0, outputs, at_once):
            some = slice(start, min(start + at_once, outputs))
            block = self.values.new_zeros(len(self.values), some.stop - start, width)
            for rows, its in zip(self.rows, block.split([len(one.values) for one in self.rows]), strict=True):
                part = rows.parts.get(name)
                if part is not None and part.inputs.shape[2] == width:
                    torch.bmm(part.output_grads[:, :, some].mT, part.inputs, out=its)
                elif part is not None:
                    its.copy_(part.output_grads.view(-1, outputs, width)[:, some])
            yield block.flatten(1)

    def _is_cheaper_by_products(self, name: str) -> bool:
        parts, (outputs, width) = [rows.parts[name] for rows in self.rows if name in rows.parts], self.shapes[name]
        uses = sum(part.inputs.shape[:2].numel() for part in parts)
        is_product = all(part.inputs.shape[2] == width for part in parts)
        return is_product and uses**2 * (outputs + width + COST_OF_MEMORY) < len(self.values) ** 2 * outputs * width

    def _add_products(self, total: Tensor, name: str) -> None:
        row = 0
        for place, one in enumerate(self.rows):
            column = 0
            for other in self.rows[: place + 1]:
                if name in one.parts and name in other.parts:
                    block = total[row : row + len(one.values), column : column + len(other.values)]
                    self._add_product(block, one.parts[name], other.parts[name], one is other)
                column += len(other.values)
            row += len(one.values)

    def _add_product(self, block: Tensor, one: Part, other: Part, is_same: bool) -> None:
        uses, others = one.inputs.shape[1], other.inputs.shape[1]
        x, g = (side.flatten(0, 1).mT for side in other)
        step = max(1, min(2 * TILE, int(self.room / 4 / (uses * x.shape[1] * x.element_size()))))
        for start in range(0, len(block), step):
            stop = min(start + step, len(block))
            until = stop if is_same else len(other.inputs)
            product = one.inputs[start:stop].flatten(0, 1) @ x[:, : until * others]
            product *= one.output_grads[start:stop].flatten(0, 1) @ g[:, : until * others]
            block[start:stop, :until] += product.view(-1, uses, until, others).sum((1, 3))


def _add_square(total: Tensor, matrix: Tensor) -> None:
    """Add ``A Aᵀ``, on and below the diagonal."""
    for start in range(0, len(total), TILE):
        total[start:, start : start + TILE].addmm_(matrix[start:], matrix[start : start + TILE].mT)


def _mirrored(total: Tensor) -> Tensor:
    """The symmetric matrix whose lower half this is."""
    for start in range(0, len(total), TILE):
        tile = total[start : start + TILE, start : start + TILE]
        tile.copy_(tile.tril() + tile.tril(-1).mT)
        total[start : start + TILE, start + TILE :] = total[start + TILE :, start : start + TILE].mT
    return total
