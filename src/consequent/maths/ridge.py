"""The idea: a weight gradient that foresees what it does to the whole mini-batch.

Backpropagation changes a layer's weights by ``ΔZ Xᵀ``. On the very mini-batch it was computed from, that moves the
outputs by ``ΔZ XᵀX`` instead of ``ΔZ``: through the correlations ``XᵀX`` every sample disturbs every other.
Consequentialism solves for the weight change whose consequence is the wanted one,

    ``ΔŴ = ΔZ (XᵀX + λI)⁻¹ Xᵀ``                      (eq. "consequentialism formula" of the paper)

which the push-through identity writes in two ways. Here rows are samples, so ``inputs`` is the paper's ``Xᵀ``:

====================  ====================================  =====================================================
side                  what is solved                        when
====================  ====================================  =====================================================
samples (N × N)       ``(X Xᵀ + λI) A = ΔZ``, then ``Aᵀ X``  no more rows than columns: most dense layers
features (D × D)      ``U (Xᵀ X + λI) = ΔZᵀ X``              more rows than columns: convolutions, sequences
====================  ====================================  =====================================================

A bias is the weight of a constant input 1, a further column of X.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from consequent.maths.checks import check_nonnegative, check_positive
from consequent.maths.damping import Damping
from consequent.maths.factorisation import damped_solve

Side = Literal["auto", "samples", "features"]

# How a loss sums up over samples: "mean", "sum", or what it is divided by, a number or a function of their number.
LossReduction = str | float | Callable[[Any], Any]


class Update(NamedTuple):
    """A weight gradient that foresees, ``U = ΔZ (XᵀX + λI)⁻¹ Xᵀ``.

    Attributes:
        weight: ``[groups, out_features, features]``.
        bias: ``[groups, out_features]``; None without one.
        change: how much it changes the outputs: energy, squared size and trace, ``[3, groups]``, of which
            :func:`consequent.maths.bound.relative_change` takes a layer's sums. None if not asked for.
        failed: how many factorisations failed.
    """

    weight: Tensor
    bias: Tensor | None
    change: Tensor | None
    failed: int | Tensor


def update_from_samples(
    inputs: Tensor, output_grads: Tensor, damping: Damping, *, ones: bool, measured: bool = False
) -> Update:
    """The formula with the Gram matrix of samples: ``A = (XXᵀ + λI)⁻¹ ΔZ``, then ``U = Aᵀ X``.

    Args:
        inputs: X, ``[groups, rows, features]``.
        output_grads: ΔZ, ``[groups, rows, out_features]``.
        damping: λ.
        ones: whether every row has a further entry 1, for the bias.
        measured: whether the change is asked for.
    """
    rows, columns = inputs.shape[1], inputs.shape[2] + ones
    gram = inputs @ inputs.mT
    if ones:
        gram = gram + 1
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    level = damping.level(trace, rows, columns)
    coefficients, failed = damped_solve(gram, output_grads, level, is_large=damping.is_large(rows, columns, gram.dtype))
    change = None
    if measured:
        kept = output_grads - level[:, None, None] * coefficients  # XXᵀ A
        change = torch.stack(((kept * output_grads).sum((1, 2)), (kept * coefficients).sum((1, 2)), trace))
    return Update(coefficients.mT @ inputs, coefficients.sum(-2) if ones else None, change, failed)


def update_from_moment(
    moment: Tensor, gradient: Tensor, damping: Damping, rows: int, *, ones: bool, measured: bool = False
) -> Update:
    """The formula with the second moment of features: ``U = G (XXᵀ + λI)⁻¹``.

    Args:
        moment: ``XXᵀ`` summed over rows, ``[groups, columns, columns]``; with ``ones`` the last column is the bias's.
        gradient: G, the plain gradient, ``[groups, out_features, columns]``.
        damping: λ.
        rows: N.
        ones: whether there is a bias.
        measured: whether the change is asked for.
    """
    columns = moment.shape[-1]
    trace = moment.diagonal(dim1=-2, dim2=-1).sum(-1)
    level = damping.level(trace, rows, columns)
    is_large = damping.is_large(rows, columns, moment.dtype)
    solution, failed = damped_solve(moment, gradient.mT, level, is_large=is_large)
    update, change = solution.mT, None
    if measured:
        change = torch.stack(((update * gradient).sum((1, 2)), update.square().sum((1, 2)), trace))
    weight, bias = (update[..., :-1], update[..., -1]) if ones else (update, None)
    return Update(weight, bias, change, failed)


def loss_divisor(reduction: LossReduction, samples: Any) -> Any:
    """c: what a loss over so many samples is divided by, and its corrections are multiplied by.

    So the learning rate keeps the paper's meaning, whose losses are sums.

    Example:
        >>> loss_divisor("mean", 32), loss_divisor("sum", 32), loss_divisor(lambda n: n * 10 / 2, 32)
        (32, 1, 160.0)
    """
    if reduction == "mean":
        return samples
    if reduction == "sum":
        return 1
    if not callable(reduction):
        return reduction
    divisor = reduction(samples)
    if not torch.compiler.is_compiling() and not isinstance(divisor, Tensor) and samples:
        check_positive(f"loss_reduction({samples})", divisor, "it is what the loss divides a sum over samples by")
    return divisor


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
        side = "samples" if inputs.shape[-2] <= inputs.shape[-1] else "features"
    try:
        return _solve_on(side, inputs, output_grads, damping)
    except LinAlgError:
        pass
    try:
        return _solve_on(side, inputs.double(), output_grads.double(), damping).to(dtype)
    except LinAlgError as error:
        size = inputs.shape[-2 if side == "samples" else -1]
        raise LinAlgError(
            f"the {size}×{size} Gram matrix plus damping={damping:g} could not be factorised, not even in float64: "
            "the inputs hold NaN or inf, or the damping is too small for their size. "
            "Check the inputs, raise the damping, or use damping=0 (pseudo-inverse)."
        ) from error


def _solve_on(side: str, inputs: Tensor, output_grads: Tensor, damping: float) -> Tensor:
    """The formula on one side, differentiable; raises if the factorisation fails."""
    gram = inputs @ inputs.mT if side == "samples" else inputs.mT @ inputs
    factor = torch.linalg.cholesky(gram + damping * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device))
    if side == "samples":
        return torch.cholesky_solve(output_grads, factor).mT @ inputs
    return torch.cholesky_solve(inputs.mT @ output_grads, factor).mT


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
    check_nonnegative("damping", damping, "the paper uses 0.001 to 0.03")
