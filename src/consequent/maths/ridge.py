"""The idea: a weight gradient that foresees what it does to the whole mini-batch.

Backpropagation changes a layer's weights by ``ΔZ Xᵀ``. On the very mini-batch it was computed from, that moves the
outputs by ``ΔZ XᵀX`` instead of ``ΔZ``: through the correlations ``XᵀX`` every sample disturbs every other.
Consequentialism solves for the weight change whose consequence is the wanted one,

    ``ΔŴ = ΔZ (XᵀX + λI)⁻¹ Xᵀ``                      (eq. "consequentialism formula" of the paper)

which the push-through identity writes in two ways. Here rows are samples, so ``inputs`` is the paper's ``Xᵀ``:

====================  ====================================  =====================================================
side                  what is solved                        when
====================  ====================================  =====================================================
samples (N × N)       ``(X Xᵀ + λI) A = ΔZ``, then ``Aᵀ X``  fewer samples than features: dense layers
features (D × D)      ``U (Xᵀ X + λI) = ΔZᵀ X``              more samples than features: convolutions, sequences
====================  ====================================  =====================================================

Everything in this file is a pure function on matrices; layers are brought to this form elsewhere.
"""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from consequent.maths.checks import check_damping
from consequent.maths.precision import in_full_precision
from consequent.maths.rounding import FEW_DIGITS, LEAST_PIVOT, MORE_DAMPING
from consequent.reports.errors import LinAlgError

__all__ = ["Side", "consequential_gradient"]

Side = Literal["auto", "samples", "features"]

# Up to this size a product with the inverse takes less time than two triangular solves for as many columns or more, and
# is as accurate.
_SMALL = 128


@in_full_precision
def consequential_gradient(
    inputs: Tensor,  # Xᵀ in the paper, one row per sample
    output_grads: Tensor,  # ΔZᵀ in the paper
    damping: float,  # λ in the paper
    *,
    side: Side = "auto",
) -> Tensor:
    """The consequentialist weight gradient of one linear map ``Z = W X``.

        ΔŴ = ΔZ (XᵀX + λI)⁻¹ Xᵀ

    It is the ridge regression of the output gradients on the inputs. With ``damping=0`` it is ``ΔZ X†``, computed with
    the pseudo-inverse (an SVD). There is no learning rate, sign or batch-size factor in it. Differentiable in
    ``inputs`` and ``output_grads`` (with ``damping=0``: where the rank of the inputs is locally constant).

    Args:
        inputs: ``[..., N, D]``, a row per sample, float32 or float64 (lower precisions are computed in float32).
        output_grads: ``[..., N, O]``, the gradient of the loss in the layer's outputs.
        damping: λ ≥ 0, absolute: added to the diagonal of the un-normalised Gram matrix.
        side: which of the two equal forms to solve; ``"auto"`` takes the smaller matrix.

    Returns:
        ``[..., O, D]``, shaped like the weight of ``torch.nn.Linear``.

    Raises:
        ValueError: for shapes that do not fit, or a damping that is negative or not finite.
        TypeError: for integer or complex tensors, or two different dtypes.
        torch.linalg.LinAlgError: if the factorisation fails in float64 too.

    Example:
        >>> import torch
        >>> X = torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]])   # two correlated samples
        >>> dZ = torch.tensor([[1.0], [0.0]])                      # only the first one's output should move
        >>> X @ (dZ.T @ X).T                                       # backpropagation moves both
        tensor([[1.],
                [1.]])
        >>> (X @ consequential_gradient(X, dZ, damping=0.0).T).round(decimals=4).abs()
        tensor([[1.],
                [0.]])
    """
    _check_arguments(inputs, output_grads, damping, side)
    dtype = torch.promote_types(inputs.dtype, torch.float32)
    inputs, output_grads = inputs.to(dtype), output_grads.to(dtype)
    if damping == 0:
        update: Tensor = torch.linalg.pinv(inputs) @ output_grads
        return update.mT
    if side == "auto":
        side = "samples" if inputs.shape[-2] < inputs.shape[-1] else "features"
    try:
        return solve_on(side, inputs, output_grads, damping)
    except LinAlgError:
        pass
    try:
        return solve_on(side, inputs.double(), output_grads.double(), damping).to(dtype)
    except LinAlgError as error:
        size = inputs.shape[-2 if side == "samples" else -1]
        raise LinAlgError(
            f"the {size}×{size} Gram matrix plus damping={damping:g} could not be factorised, not even in float64: "
            "the inputs hold NaN or inf, or the damping is too small for their size. "
            "Check the inputs, raise the damping, or use damping=0 (pseudo-inverse)."
        ) from error


def solve_on(side: str, inputs: Tensor, output_grads: Tensor, damping: float | Tensor) -> Tensor:
    """The formula on one side, differentiable; raises if the factorisation fails."""
    if side == "samples":
        factor = torch.linalg.cholesky(add_to_diagonal(inputs @ inputs.mT, damping))
        return torch.cholesky_solve(output_grads, factor).mT @ inputs
    factor = torch.linalg.cholesky(add_to_diagonal(inputs.mT @ inputs, damping))
    return torch.cholesky_solve(inputs.mT @ output_grads, factor).mT


class Solved(NamedTuple):
    """What :func:`damped_solve_or_fall_back` found."""

    solution: Tensor
    rescued: int = 0  # that failed, and were repeated in float64
    fallen_back: int = 0  # that failed there too


def damped_solve_or_fall_back(matrix: Tensor, right: Tensor, damping: float | Tensor) -> Solved:
    """``(matrix + λI)⁻¹ right`` by Cholesky, for use inside a training step: never raises, but looks at the outcome.

    A matrix that cannot be factorised is repeated in float64 (see :func:`_solve_beyond_rounding`); one whose pivots are
    rounding errors, of the right sign, gets more damping. If the former fails as well the answer is
    ``right / (λ + trace)``: the plain gradient, shortened until it cannot overshoot. All eigenvalues of
    ``matrix / (λ + trace)`` are below 1, so such a step moves every output toward its target and not past it, at the
    learning rates the method uses, where the unscaled plain gradient would diverge. On a GPU in full flight
    :mod:`consequent.engines.inverse_factor` does the same, with more damping for the retry.

    Args:
        matrix: ``[..., m, m]``, symmetric positive semi-definite.
        right: ``[..., m, k]``.
        damping: λ, a number or a tensor that broadcasts with ``[..., 1, 1]``.
    """
    damped = add_to_diagonal(matrix, damping)
    diagonal = damped.diagonal(dim1=-2, dim2=-1)
    factor, info = torch.linalg.cholesky_ex(damped)
    is_rounding = (info == 0) & ~has_pivots(factor, diagonal)
    if is_rounding.any():
        chosen = torch.where(is_rounding[..., None, None], more_damped(damped, diagonal), damped)
        factor, info = torch.linalg.cholesky_ex(chosen)
    failed = info > 0
    solution = torch.cholesky_solve(right, factor)
    if not failed.any():
        return Solved(solution, rescued=int(is_rounding.sum()))
    try:
        return Solved(_solve_beyond_rounding(matrix, right, damping), rescued=int(failed.sum()))
    except LinAlgError:
        shortened = right / (_trace(matrix) + damping)
        return Solved(torch.where(failed[..., None, None], shortened, solution), fallen_back=int(failed.sum()))


def quick_solve(matrix: Tensor, right: Tensor, damping: float | Tensor, *, with_digits: bool) -> Tensor | None:
    """``(matrix + λI)⁻¹ right`` where nothing is wrong, with few calls; None where anything is, or may be.

    The matrix is overwritten. Looks at the outcome: not for a busy GPU.

    Args:
        matrix: as in :func:`damped_solve_or_fall_back`.
        right: as there.
        damping: as there.
        with_digits: whether a result that has lost nearly all of them counts as wrong: where another way has more.
    """
    factor = quick_cholesky(matrix, damping, with_digits=with_digits)
    if factor is None:
        return None
    size = matrix.shape[-1]
    if size <= _SMALL and size < right.shape[-1]:
        return torch.cholesky_inverse(factor) @ right
    # From the right, which LAPACK does in two thirds of the time.
    half = torch.linalg.solve_triangular(factor.mT, right.mT, upper=True, left=False)
    solution: Tensor = torch.linalg.solve_triangular(factor, half, upper=False, left=False)
    return solution.mT


def quick_cholesky(matrix: Tensor, damping: float | Tensor, *, with_digits: bool) -> Tensor | None:
    """The Cholesky factor for :func:`quick_solve`; None where anything is wrong, or may be."""
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    diagonal.add_(damping[..., 0] if isinstance(damping, Tensor) else damping)
    factor: Tensor
    factor, info = torch.linalg.cholesky_ex(matrix)
    if matrix.shape[-1] == 0 or any(info.tolist()):
        return None
    is_good = keeps_digits(matrix, factor) if with_digits else has_pivots(factor, diagonal)
    return factor if all(is_good.tolist()) else None


def has_pivots(factor: Tensor, diagonal: Tensor) -> Tensor:
    """Whether all pivots are more than rounding errors. Infinity, which Cholesky takes for a good one, is none.

    Args:
        factor: of Cholesky.
        diagonal: of the matrix.
    """
    pivots = factor.diagonal(dim1=-2, dim2=-1).square()
    least = LEAST_PIVOT * torch.finfo(factor.dtype).eps * diagonal
    return ((pivots >= least) & (pivots < math.inf)).all(-1)


def more_damped(damped: Tensor, diagonal: Tensor) -> Tensor:
    """With so much more of this diagonal added that rounding errors make no pivots."""
    more = damped.clone()
    more.diagonal(dim1=-2, dim2=-1).add_(
        diagonal, alpha=MORE_DAMPING * damped.shape[-1] * torch.finfo(damped.dtype).eps
    )
    return more


def keeps_digits(damped: Tensor, factor: Tensor) -> Tensor:
    """Whether a factorisation left about three digits or more: no pivot is near the rounding of the largest entry.

    Infinity, which Cholesky takes for a good pivot, leaves none: the quotient is NaN, and not above anything.
    """
    smallest_pivot = factor.diagonal(dim1=-2, dim2=-1).amin(-1).square()
    largest = damped.diagonal(dim1=-2, dim2=-1).amax(-1)
    return smallest_pivot / largest >= FEW_DIGITS * torch.finfo(damped.dtype).eps


def _solve_beyond_rounding(matrix: Tensor, right: Tensor, damping: float | Tensor) -> Tensor:
    """The answer for a matrix with negative eigenvalues, which only rounding can have made, in float64.

    The eigenvalues of dependent inputs are rounding errors of either sign. They are taken as zero, and a damping below
    their size, which would mean nothing, is raised to it.
    """
    eigenvalues, vectors = torch.linalg.eigh(matrix.double())
    rounding = (-eigenvalues[..., :1]).clamp(min=0).unsqueeze(-1)
    levels = eigenvalues.clamp(min=0).unsqueeze(-1) + rounding + damping
    solution: Tensor = vectors @ ((vectors.mT @ right.double()) / levels)
    return solution.to(right.dtype)


def _trace(matrix: Tensor) -> Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]


def add_to_diagonal(matrix: Tensor, damping: float | Tensor) -> Tensor:
    """``matrix + λI``; λ is a number or broadcasts with ``[..., 1, 1]``."""
    damped = matrix.clone()
    damped.diagonal(dim1=-2, dim2=-1).add_(damping[..., 0] if isinstance(damping, Tensor) else damping)
    return damped


def _check_arguments(inputs: Tensor, output_grads: Tensor, damping: float, side: str) -> None:
    for name, tensor in (("inputs", inputs), ("output_grads", output_grads)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
        if not tensor.is_floating_point():
            raise TypeError(f"{name} must be floating point, got {tensor.dtype}; convert it with .float()")
        if tensor.ndim < 2:
            raise ValueError(
                f"{name} must be [..., samples, features], got shape {list(tensor.shape)}; "
                "a single sample is one row: use .unsqueeze(0)"
            )
    if inputs.dtype != output_grads.dtype:
        raise TypeError(f"inputs are {inputs.dtype} but output_grads are {output_grads.dtype}; convert one of them")
    if inputs.shape[:-1] != output_grads.shape[:-1]:
        raise ValueError(
            f"inputs {list(inputs.shape)} and output_grads {list(output_grads.shape)} must agree in every dimension "
            "but the last: the same samples, a row each"
        )
    if side not in ("auto", "samples", "features"):
        raise ValueError(f'side must be "auto", "samples" or "features", got {side!r}')
    check_damping(damping)
