"""Solving with ``matrix + λI`` by Cholesky, and what happens where that fails.

Inputs that depend on each other leave pivots that are nothing but rounding errors, if λ is below these. Then the
matrix is solved by its eigenvalues in float64, without those that rounding explains: in exact arithmetic nothing would
come out of them. Where the host must not look (a GPU, compiled code), the answer is ``right / (trace + λ)`` instead:
the plain gradient, so short that no output can overshoot.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from consequent.gpu.inverses import LEAST_PIVOT, damped_inverses
from consequent.gpu.inverses import accepts as is_for_kernels
from consequent.maths.precision import may_sync

# Up to this size a product with the inverse is faster than two triangular solves for more right-hand sides.
SMALL = 128


class Solved(NamedTuple):
    """A solution, and how many of the factorisations failed: a number, or a tensor where the host did not look.

    Matrices with NaN or inf do not count: what comes out of them is NaN, as it would be anyway.
    """

    solution: Tensor
    failed: int | Tensor


def damped_solve(matrix: Tensor, right: Tensor, damping: Tensor, *, is_large: bool = False) -> Solved:
    """``(matrix + λI)⁻¹ right``.

    Args:
        matrix: ``[groups, n, n]``, symmetric, positive semi-definite up to rounding.
        right: ``[groups, n, k]``.
        damping: λ, ``[groups]``.
        is_large: whether λ is known to be above all rounding, so that pivots need not be looked at.
    """
    if is_large and torch.compiler.is_compiling() and matrix.is_cuda:
        inverse, failed = _inverse_in_graph(matrix, damping)
        return Solved(inverse @ right, failed)
    if is_large and is_for_kernels(matrix):
        inverse, failed = damped_inverses(matrix, damping)
        return Solved(inverse @ right, failed)
    factor, is_sound = _factor(matrix, damping, is_large)
    may_look = may_sync(matrix)
    if may_look and not bool(is_sound.all()):
        return Solved(_solve_by_eigenvalues(matrix, right, damping), int(_failed(matrix, is_sound)))
    if matrix.is_cuda and not torch.compiler.is_compiling():
        solution = _inverse_on_device(factor) @ right
    elif matrix.shape[-1] <= min(SMALL, right.shape[-1] - 1):
        solution = torch.cholesky_inverse(factor) @ right
    else:
        solution = torch.cholesky_solve(right, factor)
    if may_look:
        return Solved(solution, 0)
    shortened = right / _wide(_trace(matrix) + damping)
    return Solved(torch.where(_wide(is_sound), solution, shortened), _failed(matrix, is_sound))


def damped_inverse(matrix: Tensor, damping: Tensor, *, is_large: bool = False, whole: Tensor | None = None) -> Solved:
    """``(matrix + λI)⁻¹``; the arguments are those of :func:`damped_solve`.

    Args:
        matrix: as there.
        damping: as there.
        is_large: as there.
        whole: ``[groups, n]``, the diagonal that rounding is measured by, where the matrix is what is left of another.
    """
    if is_large and is_for_kernels(matrix):
        return Solved(*damped_inverses(matrix, damping))
    factor, is_sound = _factor(matrix, damping, is_large, whole)
    if not may_sync(matrix):
        inverse = _inverse_on_device(factor)
        shortened = inverse / _wide(_trace(matrix) + damping)
        return Solved(torch.where(_wide(is_sound), inverse, shortened), _failed(matrix, is_sound))
    inverse = torch.cholesky_inverse(factor)
    for place in (~is_sound).nonzero().flatten().tolist():
        eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
        one = slice(place, place + 1)
        scale = 0.0 if whole is None else whole[one].amax(-1, keepdim=True)
        inverse[one] = _solve_by_eigenvalues(matrix[one], eye[None], damping[one], scale)
    return Solved(inverse, int(_failed(matrix, is_sound)))


@torch.library.custom_op(
    "consequent::damped_inverse", mutates_args=(), schema="(Tensor a, Tensor b) -> (Tensor, Tensor)"
)
def _inverse_in_graph(matrix: Tensor, damping: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`damped_inverse` as one operator, into which ``torch.compile`` does not look."""
    inverse, failed = damped_inverse(matrix, damping, is_large=True)
    return inverse, torch.as_tensor(failed, dtype=damping.dtype, device=damping.device)


@_inverse_in_graph.register_fake
def _(matrix: Tensor, damping: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(matrix), damping.new_empty(())


def improved_inverse(matrix: Tensor, damping: Tensor, start: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Newton–Schulz steps, ``Y ← 2Y − Y(matrix + λI)Y``: products alone, of which GPUs are capable of many.

    Args:
        matrix: ``[groups, n, n]``, symmetric.
        damping: λ, ``[groups]``.
        start: Y.
        steps: how many, at least one.

    Returns:
        Y, and about how far it was from the inverse before the last step, ``‖I − (matrix + λI) Y‖``, of all groups the
        largest. The last step squares it.
    """
    damped = matrix.clone()
    damped.diagonal(dim1=-2, dim2=-1).add_(damping[:, None])
    inverse = product = start
    for _ in range(steps):
        product = damped @ inverse
        inverse = torch.baddbmm(inverse, inverse, product, beta=2, alpha=-1)
    # Power iteration, from any vector that no structure of a network is orthogonal to.
    vector = torch.arange(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device).sin()[None, :, None]
    vector = vector.expand(len(matrix), -1, -1)
    for _ in range(3):
        vector = vector / torch.linalg.vector_norm(vector, dim=1, keepdim=True)
        vector = vector - product @ vector
    return inverse, torch.linalg.vector_norm(vector, dim=1).amax()


def _inverse_on_device(factor: Tensor) -> Tensor:
    """``(L Lᵀ)⁻¹``; ``torch.cholesky_inverse`` takes one matrix after the other on a GPU."""
    eye = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
    half: Tensor = torch.linalg.solve_triangular(factor, eye.expand_as(factor), upper=False)
    return half.mT @ half


def _failed(matrix: Tensor, is_sound: Tensor) -> Tensor:
    return (~is_sound & _trace(matrix).isfinite()).sum()


def _factor(matrix: Tensor, damping: Tensor, is_large: bool, whole: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The Cholesky factor, and for each group whether all of its pivots are more than rounding errors.

    Where the host does not look, what has failed gets the factor of the identity matrix, with which one can go on.
    """
    damped = matrix.clone()
    damped.diagonal(dim1=-2, dim2=-1).add_(damping[:, None])
    factor, info = torch.linalg.cholesky_ex(damped)
    is_sound = info == 0
    if not is_large:
        pivots = factor.diagonal(dim1=-2, dim2=-1).square()
        diagonal = damped.diagonal(dim1=-2, dim2=-1) if whole is None else whole + damping[:, None]
        least = LEAST_PIVOT * torch.finfo(matrix.dtype).eps * diagonal
        is_sound = is_sound & (pivots >= least).all(-1) & (pivots < torch.inf).all(-1)
    if not may_sync(matrix):
        eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
        factor = torch.where(_wide(is_sound), factor, eye)
    return factor, is_sound


def _solve_by_eigenvalues(matrix: Tensor, right: Tensor, damping: Tensor, scale: Tensor | float = 0.0) -> Tensor:
    """The same in float64, without the eigenvalues that rounding explains; NaN where the matrix is not finite.

    Numbers have been rounded to those of the largest eigenvalue, or of the scale if that is larger.
    """
    is_finite = matrix.isfinite().all(-1).all(-1)
    values, vectors = torch.linalg.eigh(torch.where(_wide(is_finite), matrix, 0).double())
    largest = torch.maximum(values.amax(-1, keepdim=True), torch.as_tensor(scale, dtype=values.dtype))
    rounding = matrix.shape[-1] * torch.finfo(matrix.dtype).eps * largest
    inverse = torch.where(values > rounding, 1 / (values + damping[:, None].double()), 0)
    solution = vectors @ (inverse[..., None] * (vectors.mT @ right.double()))
    return torch.where(_wide(is_finite), solution.to(right.dtype), torch.nan)


def _trace(matrix: Tensor) -> Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1).sum(-1)


def _wide(of_groups: Tensor) -> Tensor:
    """``[groups]`` as ``[groups, 1, 1]``."""
    return of_groups[:, None, None]
