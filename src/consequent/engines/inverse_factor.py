"""``(S + λI)⁻¹`` without waiting for the device: through ``W = L⁻¹`` of ``S + λI = L Lᵀ``.

``(S + λI)⁻¹ B = Wᵀ (W B)`` are two ordinary products, which a GPU does many times faster than triangular solves. Small
matrices are factorised by a kernel, large ones by blocks:

    ``W = [[W₁₁, 0], [−W₂₂ L₂₁ W₁₁, W₂₂]]``    with ``L₂₁ = S₂₁ W₁₁ᵀ``, and ``W₂₂`` from ``S₂₂ + λI − L₂₁ L₂₁ᵀ``

Features that others determine (the outputs of LayerNorm sum up to zero) leave pivots that are rounding errors, of
either sign, once λ is small beside them. Such a matrix is not given up, it gets more damping: the kernel adds it to the
feature in question (:mod:`consequent.engines.gpu.kernels.factor`), the plain form, which cannot, to all of the matrix.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from consequent.engines.gpu import kernels
from consequent.maths.damping import Level
from consequent.maths.ridge import has_pivots, more_damped
from consequent.maths.triangular_products import by_lower, by_transposed, lower_by, subtract_square

_MULTIPLE = 32  # blocks are cut at multiples of this, so that their rows are aligned
_LARGEST_BLOCK = 640  # of a matrix that is cut at all: the kernel's time grows faster than that of products


@dataclass(frozen=True)
class InverseFactor:
    """``W`` of one or several matrices, or the news that some could not be factorised.

    ``status`` has, for each: the trace of S, λ, whether it could be factorised, and how many of its pivots were raised.
    """

    inverse: Tensor  # [..., n, n], lower triangular
    status: Tensor  # [..., 4]

    def solve(self, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``(S + λI)⁻¹ right``, or ``right / (trace + λ)`` where there is no factor.

        The latter is the plain gradient, shortened until it cannot overshoot, as in
        :func:`consequent.maths.ridge.damped_solve_or_fall_back`.

        Args:
            right: ``[..., n, k]``.

        Returns:
            the solution, how many matrices needed more damping, and how many have no factor.
        """
        trace, level, is_good, _ = self.status[..., None, None].unbind(-3)
        solution = torch.where(is_good > 0, self.inverse.mT @ (self.inverse @ right), right / (trace + level))
        failed = (is_good == 0) & trace.isfinite()  # NaN or inf is no failure: it is told otherwise
        return solution, self.is_rescued.sum(), failed.sum()

    @property
    def is_rescued(self) -> Tensor:
        """Which matrices could be factorised with more damping only."""
        return (self.status[..., 2] > 0) & (self.status[..., 3] > 0)


def inverse_factor(
    matrix: Tensor,
    level: Level,
    *,
    largest_block: int | None = None,
    overwrite: bool = False,
    few_calls: bool = False,
) -> InverseFactor:
    """The inverse Cholesky factor of ``matrix + λI``. Never waits for the device, and may be in a CUDA graph.

    Args:
        matrix: ``[..., n, n]``, symmetric positive semi-definite, float32 or float64.
        level: λ.
        largest_block: that is factorised in one go (default: what is fastest on the device).
        overwrite: whether the matrix may be, which saves memory.
        few_calls: whether a GPU may take longer for a large matrix where that saves the host a hundred calls.
    """
    batch, size = matrix.shape[:-2], matrix.shape[-1]
    matrices = matrix.reshape(-1, size, size)
    by_kernel = matrix.dtype == torch.float32 and kernels.run_on(matrix.device) and matrix.numel() > 0
    if few_calls and by_kernel and size > _largest_by_kernel():
        by_kernel = False
    if largest_block is None:
        largest_block = _LARGEST_BLOCK if by_kernel and size > _largest_by_kernel() else size
    if by_kernel and size <= largest_block:
        inverse, status = _by_kernel(matrices, level)
        return InverseFactor(inverse.view(matrix.shape), status.view(*batch, 4))
    trace = matrices.diagonal(dim1=-2, dim2=-1).sum(-1)
    levels = level.at(trace)
    damped = matrices if overwrite else matrices.clone()
    damped.diagonal(dim1=-2, dim2=-1).add_(levels[:, None])
    diagonal = damped.diagonal(dim1=-2, dim2=-1)
    inverse, is_good, raised = _of_block(damped, diagonal, largest_block, by_kernel=by_kernel)
    status = torch.stack([trace, levels, is_good.to(trace.dtype), raised.to(trace.dtype)], dim=-1)
    return InverseFactor(inverse.view(matrix.shape), status.view(*batch, 4))


_Factorised = tuple[Tensor, Tensor, Tensor]  # W, whether it is one, and how many pivots were raised; for each matrix


def _of_block(damped: Tensor, diagonal: Tensor, largest: int, *, by_kernel: bool) -> _Factorised:
    """Of what is left of a part of the matrix; the diagonal is that of the whole damped matrix, for this part."""
    size = damped.shape[-1]
    if size <= largest:
        return _part_by_kernel(damped, diagonal) if by_kernel else _by_torch(damped, diagonal)
    half = -(-size // (2 * _MULTIPLE)) * _MULTIPLE if size > _MULTIPLE else size // 2
    upper, upper_is_good, upper_raised = _of_block(
        damped[:, :half, :half].contiguous(), diagonal[:, :half], largest, by_kernel=by_kernel
    )
    beside = by_transposed(damped[:, half:, :half], upper)
    rest = subtract_square(damped[:, half:, half:], beside)
    lower, lower_is_good, lower_raised = _of_block(rest, diagonal[:, half:], largest, by_kernel=by_kernel)
    inverse = torch.empty_like(damped)
    inverse[:, :half, :half] = upper
    inverse[:, :half, half:] = 0
    inverse[:, half:, half:] = lower
    lower_by(lower, by_lower(beside, upper).neg_(), out=inverse[:, half:, :half])
    return inverse, upper_is_good & lower_is_good, upper_raised + lower_raised


def _by_torch(damped: Tensor, diagonal: Tensor) -> _Factorised:
    """Factorised twice, the second time with more damping: which one is taken is chosen on the device."""
    size = damped.shape[-1]
    factor, info = _cholesky(damped)
    safer, safer_info = _cholesky(more_damped(damped, diagonal))
    is_rough = (info != 0) | ~has_pivots(factor, diagonal)
    rescued = is_rough & (safer_info == 0)
    factor = torch.where(rescued[:, None, None], safer, factor)
    identity = torch.eye(size, dtype=damped.dtype, device=damped.device)
    inverse = torch.linalg.solve_triangular(factor, identity.expand_as(factor), upper=False)
    is_finite = factor.diagonal(dim1=-2, dim2=-1).isfinite().all(-1)  # to a CPU's Cholesky inf is as good as any number
    return inverse, ((info == 0) | rescued) & is_finite, rescued * size


def _part_by_kernel(damped: Tensor, diagonal: Tensor) -> _Factorised:
    from consequent.engines.gpu.kernels.factor import factor_by, plan_team

    inverse, status = factor_by(plan_team(damped), damped, 0.0, diagonal=diagonal)
    return inverse, status[:, 2] > 0, status[:, 3]


def _by_kernel(matrices: Tensor, level: Level) -> tuple[Tensor, Tensor]:
    from consequent.engines.gpu.kernels.factor import inverse_factor as factorise

    return factorise(matrices, level.value, of_trace=level.of_trace)


def _largest_by_kernel() -> int:
    from consequent.engines.gpu.kernels.factor import LARGEST

    return LARGEST


def _cholesky(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """L of each, and where it failed."""
    if _are_large(matrices):
        factors, failures = zip(*[torch.linalg.cholesky_ex(matrix) for matrix in matrices], strict=True)
        return torch.stack(factors), torch.stack(failures)
    with _capturable_solvers(matrices):
        factor, failed = torch.linalg.cholesky_ex(matrices)
    return factor, failed


def _are_large(matrices: Tensor) -> bool:
    """Whether they go one by one on a GPU: cuSOLVER takes a single one without torch being asked for it."""
    return matrices.is_cuda and len(matrices) > 1 and matrices.shape[-1] > _LARGEST_BLOCK


@contextmanager
def _capturable_solvers(matrix: Tensor) -> Iterator[None]:
    """On a GPU, cuSOLVER: for several matrices torch may prefer MAGMA, which waits and cannot be in a CUDA graph."""
    if not matrix.is_cuda or len(matrix) == 1:
        yield
        return
    before = torch.backends.cuda.preferred_linalg_library("cusolver")
    try:
        yield
    finally:
        torch.backends.cuda.preferred_linalg_library(before)
