"""A symmetric matrix as half as many numbers, without an index for each: the rectangular full packed form.

For an even n, with h = n / 2 and blocks ``[[A, ·], [B, C]]`` of a symmetric matrix, the rectangle of n + 1 rows and h
columns holds A's lower triangle and B from its second row on, and C's lower triangle, transposed, above them.
An odd n is made even with a row of zeros.
"""

from torch import Tensor
from torch.nn.functional import pad


def packed(matrix: Tensor) -> Tensor:
    """The lower triangle of symmetric matrices.

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
    rectangle[:, :half] = rectangle[:, :half].tril(-1) + matrix[:, half:, half:].triu()
    return rectangle


def unpacked(rectangle: Tensor, size: int) -> Tensor:
    """The inverse of :func:`packed`, for matrices of n = ``size``."""
    groups, even, half = len(rectangle), rectangle.shape[1] - 1, rectangle.shape[2]
    matrix = rectangle.new_empty(groups, even, even)
    lower = rectangle[:, 1 : half + 1].tril()
    upper = rectangle[:, :half].triu()
    below = rectangle[:, half + 1 :]
    matrix[:, :half, :half] = lower + lower.tril(-1).mT
    matrix[:, half:, half:] = upper + upper.triu(1).mT
    matrix[:, half:, :half] = below
    matrix[:, :half, half:] = below.mT
    return matrix if even == size else matrix[:, :size, :size].contiguous()
