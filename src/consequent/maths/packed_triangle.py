"""A symmetric or triangular matrix as half as many numbers, without an index for each: rectangular full packed form.

For an even n, with h = n / 2 and blocks ``[[A, ·], [B, C]]`` of the matrix, the rectangle of n + 1 rows and h
columns holds A's lower triangle and B from its second row on, and C's lower triangle, transposed, above them.
An odd n is made even with a row of zeros.
"""

from torch import Tensor
from torch.nn.functional import pad


def packed(matrix: Tensor) -> Tensor:
    """The lower triangle of matrices, which are symmetric or nothing but that triangle.

    Args:
        matrix: ``[groups, n, n]``.

    Returns:
        ``[groups, n + 1, n / 2]`` for an even n.

    Example:
        >>> import torch
        >>> packed(torch.tensor([[[1.0, 2.0], [2.0, 3.0]]]))
        tensor([[[3.],
                 [1.],
                 [2.]]])
    """
    odd = matrix.shape[-1] % 2
    if odd:
        matrix = pad(matrix, (0, 1, 0, 1))
    size = matrix.shape[-1]
    half = size // 2
    rectangle = matrix.new_empty(len(matrix), size + 1, half)
    rectangle[:, 1:] = matrix[:, :, :half]
    rectangle[:, :half] = rectangle[:, :half].tril(-1) + matrix[:, half:, half:].mT.triu()
    return rectangle


def unpacked(rectangle: Tensor, size: int) -> Tensor:
    """The inverse of :func:`packed`, for symmetric matrices of n = ``size``."""
    upper_left, lower_left, lower_right = _blocks(rectangle)
    half = upper_left.shape[-1]
    matrix = rectangle.new_empty(len(rectangle), 2 * half, 2 * half)
    matrix[:, :half, :half] = upper_left + upper_left.tril(-1).mT
    matrix[:, half:, half:] = lower_right + lower_right.tril(-1).mT
    matrix[:, half:, :half] = lower_left
    matrix[:, :half, half:] = lower_left.mT
    return _cut(matrix, size)


def unpacked_triangle(rectangle: Tensor, size: int) -> Tensor:
    """The inverse of :func:`packed`, for lower triangular matrices of n = ``size``."""
    upper_left, lower_left, lower_right = _blocks(rectangle)
    half = upper_left.shape[-1]
    matrix = rectangle.new_zeros(len(rectangle), 2 * half, 2 * half)
    matrix[:, :half, :half] = upper_left
    matrix[:, half:, half:] = lower_right
    matrix[:, half:, :half] = lower_left
    return _cut(matrix, size)


def _blocks(rectangle: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A, B and C, of A and C the lower triangles."""
    half = rectangle.shape[2]
    return rectangle[:, 1 : half + 1].tril(), rectangle[:, half + 1 :], rectangle[:, :half].triu().mT


def _cut(matrix: Tensor, size: int) -> Tensor:
    return matrix if matrix.shape[-1] == size else matrix[:, :size, :size].contiguous()
