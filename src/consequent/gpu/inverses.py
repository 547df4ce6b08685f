"""The damped inverses of many matrices, without a factorisation, for which a GPU takes one column after the other.

The plain-torch line is :func:`consequent.maths.factorisation.damped_inverse`.
"""

import torch
from torch import Tensor

from consequent.gpu.launch import launch, takes

LARGEST = 1024  # rows
TILE = 64
# A pivot below so many roundings of its own diagonal entry may be a fraction of the true one.
LEAST_PIVOT = 128
LEAST = LEAST_PIVOT * torch.finfo(torch.float32).eps


def accepts(matrix: Tensor) -> bool:
    """Whether such matrices are inverted here."""
    return (
        0 < matrix.shape[-1] <= LARGEST and matrix.numel() > 0 and takes(matrix) and not torch.compiler.is_compiling()
    )


def damped_inverses(matrix: Tensor, damping: Tensor) -> tuple[Tensor, Tensor]:
    """``(matrix + λI)⁻¹``, and how many failed.

    Args:
        matrix: ``[groups, n, n]``, symmetric, positive semi-definite up to rounding.
        damping: λ, ``[groups]``, which is above all rounding.
    """
    from consequent.gpu import inverses_kernels as kernels

    matrix, damping, device = matrix.contiguous(), damping.contiguous(), matrix.device
    groups, size = matrix.shape[:2]
    tiles = -(-size // TILE)
    programs, width = groups * tiles * tiles, tiles * TILE
    source, target = torch.empty(2, groups, width, width, device=device).unbind()
    inverse, pivots = torch.empty_like(matrix), torch.empty(groups, tiles, device=device)
    small, failed = torch.empty(groups, TILE, TILE, device=device), torch.zeros(groups, device=device)
    with torch.cuda.device_of(matrix):
        launch(kernels.start, programs, (matrix, damping, source, size, tiles, 0), (TILE,), num_warps=4)
        for step in range(tiles):
            launch(kernels.invert_pivot, groups, (source, small, pivots, size, tiles, step), (TILE,), num_warps=4)
            launch(kernels.eliminate, programs, (source, target, small, size, tiles, step), (TILE,), num_warps=4)
            source, target = target, source
        tensors = (source, matrix, damping, pivots, inverse, failed)
        launch(kernels.finish, programs, (*tensors, size, tiles, 0), (LEAST, TILE), num_warps=4)
    return inverse, failed.sum()
