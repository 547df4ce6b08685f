"""Products with lower triangular matrices, without most of the multiplications by zero, and symmetric products.

A product is computed by parts of its columns (or rows), each with the part of the triangle that is not zero. Many parts
save most, nearly half of the work; as long as each of them still keeps a GPU busy. Of a product that is symmetric, the
triangle is computed so, and mirrored.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

ENTRIES = 2**20  # of a part of the result, at least
WIDTH = 256  # of a part, at least
SQUARE_BY_PARTS = 128  # columns, at least


def by_transposed(left: Tensor, lower: Tensor) -> Tensor:
    """``left lowerᵀ``.

    Args:
        left: ``[batch, m, n]``.
        lower: ``[batch, n, n]``, zero above the diagonal.
    """
    product = torch.empty_like(left, memory_format=torch.contiguous_format)
    for start, stop in _parts(product):
        torch.bmm(left[:, :, :stop], lower[:, start:stop, :stop].mT, out=product[:, :, start:stop])
    return product


def by_lower(left: Tensor, lower: Tensor, *, out: Tensor | None = None) -> Tensor:
    """``left lower``.

    Args:
        left: ``[batch, m, n]``.
        lower: ``[batch, n, n]``, zero above the diagonal.
        out: where to put it; not the left matrix.
    """
    product = torch.empty_like(left, memory_format=torch.contiguous_format) if out is None else out
    for start, stop in _parts(product):
        torch.bmm(left[:, :, start:], lower[:, start:, start:stop], out=product[:, :, start:stop])
    return product


def lower_by(lower: Tensor, right: Tensor, *, out: Tensor) -> Tensor:
    """``lower right``.

    Args:
        lower: ``[batch, n, n]``, zero above the diagonal.
        right: ``[batch, n, m]``.
        out: where to put it; not the right matrix.
    """
    for start, stop in _parts(out.mT):
        torch.bmm(lower[:, start:stop, :stop], right[:, :stop], out=out[:, start:stop])
    return out


def lower_square(root: Tensor) -> Tensor:
    """``root rootᵀ``, of which the part above the diagonal is not to be used.

    Args:
        root: ``[batch, n, m]``.
    """
    product = root.new_zeros(len(root), root.shape[1], root.shape[1])
    for start, stop in _parts(product):
        torch.bmm(root[:, start:], root[:, start:stop].mT, out=product[:, start:, start:stop])
    return product


def subtract_square(matrix: Tensor, root: Tensor) -> Tensor:
    """``matrix − root rootᵀ``, of which the part above the diagonal is not to be used.

    Args:
        matrix: ``[batch, n, n]``.
        root: ``[batch, n, m]``.
    """
    difference = torch.empty_like(matrix, memory_format=torch.contiguous_format)
    for start, stop in _parts(difference):
        below = difference[:, start:, start:stop]
        torch.baddbmm(matrix[:, start:, start:stop], root[:, start:], root[:, start:stop].mT, alpha=-1, out=below)
    return difference


def square(rows: Tensor) -> Tensor:
    """``rowsᵀ rows``, of which on a CPU only what is on and below the diagonal is multiplied out, or little more.

    Args:
        rows: ``[batch, m, n]``.

    Returns:
        ``[batch, n, n]``.
    """
    size = rows.shape[-1]
    if rows.is_cuda or size < SQUARE_BY_PARTS:
        return rows.mT @ rows
    product = rows.new_empty(len(rows), size, size)
    width = -(-size // (16 * (4 if size >= 2 * SQUARE_BY_PARTS else 3))) * 16
    for start in range(0, size, width):
        stop = min(start + width, size)
        torch.bmm(rows[:, :, start:].mT, rows[:, :, start:stop], out=product[:, start:, start:stop])
        product[:, start:stop, stop:] = product[:, stop:, start:stop].mT
    return product


def _parts(product: Tensor) -> Iterator[tuple[int, int]]:
    """From which column to which each part goes; their widths are multiples of 32, so that they are aligned."""
    size = product.shape[-1]
    parts = max(1, min(product.numel() // ENTRIES, size // WIDTH))
    width = -(-size // (parts * 32)) * 32
    for start in range(0, size, max(width, 1)):
        yield start, min(start + width, size)
