"""The adaptive filters the paper starts from: LMS, NLMS and the affine projection algorithm (APA).

One linear layer ``z = W x`` is trained online: sample ``t`` is predicted with the weights known so far, then the
weights are changed. The three filters share that loop and differ only in the change:

    LMS     ΔW = μ e xᵀ                    (eq. mu lms)
    NLMS    ΔW = μ e xᵀ / (‖x‖² + ε)       (eq. nlms)
    APA     ΔW = μ E (XᵀX + εI)⁻¹ Xᵀ       (eq. consequentialism formula)

where ``e = t − W x``. NLMS is consequentialism with a batch of one sample; APA is consequentialism of one linear layer
over its most recent samples.

A step size that is too large for LMS makes it diverge; the history then shows it, up to ``inf`` and ``nan``.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from consequent.maths.checks import check_nonnegative

__all__ = ["FilterResult", "apa", "lms", "nlms"]


@dataclass(frozen=True, eq=False)
class FilterResult:
    """What a filter did over a stream of T samples with D features, for one output or for O outputs.

    Predictions and errors are *a priori*: those of sample ``t`` are made before the update of sample ``t``.

    Attributes:
        predictions: ``W_t x_t`` (z in the paper), [T] for one output, [T, O] for several.
        errors: ``targets − predictions`` (e in the paper), in the same shape.
        weights: The history of W, [T + 1, D] for one output, [T + 1, O, D] for several. Entry 0 is the initial
            weights, entry ``t`` is what predicted sample ``t``, the last entry is the trained filter.
    """

    predictions: Tensor
    errors: Tensor
    weights: Tensor


@torch.no_grad()
def lms(inputs: Tensor, targets: Tensor, step_size: float, *, weights: Tensor | None = None) -> FilterResult:
    """Least mean squares (μ-LMS): gradient descent on the squared error of each sample in turn.

        ΔW = μ e xᵀ        (eq. mu lms)

    The error of the very same sample becomes ``(1 − μ‖x‖²) e``: it grows as soon as ``μ‖x‖² > 2``.

    Args:
        inputs: A sample per row (x in the paper), [T, D], float32 or float64.
        targets: What the outputs should be (t in the paper), [T] for one output or [T, O] for several.
        step_size: Learning rate, ≥ 0 (μ in the paper). Stable below ``2 / ‖x‖²``.
        weights: Initial weights (W in the paper), [D] or [O, D] as the targets are; zeros if not given.

    Returns:
        A-priori predictions and errors, and the weight history of T + 1 entries.

    Raises:
        ValueError: For shapes, lengths or dtypes that do not fit, a bad step size, NaN or inf in the stream.

    Example:
        >>> import torch
        >>> inputs = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
        >>> result = lms(inputs, torch.tensor([4.0, 8.0]), step_size=0.5)
        >>> result.errors
        tensor([4., 8.])
        >>> result.weights
        tensor([[0., 0.],
                [2., 0.],
                [2., 8.]])
    """
    check_nonnegative("step_size", step_size, "LMS is stable for 0 < step_size < 2 / ‖x‖²")

    def change(sample: int, weights: Tensor, errors: Tensor) -> Tensor:
        return step_size * torch.outer(errors, inputs[sample])

    return _run(inputs, targets, weights, change)


@torch.no_grad()
def nlms(
    inputs: Tensor, targets: Tensor, step_size: float, *, damping: float = 0.0, weights: Tensor | None = None
) -> FilterResult:
    """Normalised least mean squares (α-LMS): the error of each sample shrinks by a factor that is the same for all.

        ΔW = μ e xᵀ / (‖x‖² + ε), which is μ e x† for ε = 0        (eq. nlms)

    The error of the very same sample becomes ``(1 − μ) e`` for ε = 0, whatever its size ‖x‖. (The paper prints the
    change of the error as ``Δe = +μe``, eq. "ideal error change"; with its own ``Δe = −ΔW x`` it is ``−μe``.)

    A sample of zeros with ``damping=0`` makes no update, since the pseudo-inverse of 0 is 0.

    Args:
        inputs: A sample per row (x in the paper), [T, D], float32 or float64.
        targets: What the outputs should be (t in the paper), [T] for one output or [T, O] for several.
        step_size: Learning rate, ≥ 0 (μ in the paper). Stable below 2; 1 meets each sample exactly.
        damping: Added to the squared norm of each sample, ≥ 0 (ε in the paper).
        weights: Initial weights (W in the paper), [D] or [O, D] as the targets are; zeros if not given.

    Returns:
        A-priori predictions and errors, and the weight history of T + 1 entries.

    Raises:
        ValueError: For shapes, lengths or dtypes that do not fit, a bad step size or damping, NaN or inf in the stream.

    Example:
        >>> import torch
        >>> inputs = torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0]])
        >>> result = nlms(inputs, torch.tensor([4.0, 8.0, 1.0]), step_size=1.0)
        >>> result.weights
        tensor([[0., 0.],
                [4., 0.],
                [4., 4.],
                [4., 4.]])
    """
    check_nonnegative("step_size", step_size, "NLMS is stable for 0 < step_size < 2")
    check_nonnegative("damping", damping, "use 0 or a small positive number")

    def change(sample: int, weights: Tensor, errors: Tensor) -> Tensor:
        return step_size * torch.outer(errors, _normalised(inputs[sample], damping))

    return _run(inputs, targets, weights, change)


@torch.no_grad()
def apa(
    inputs: Tensor,
    targets: Tensor,
    step_size: float,
    *,
    order: int,
    damping: float = 0.0,
    weights: Tensor | None = None,
) -> FilterResult:
    """Affine projection algorithm (APA): the errors of the last ``order`` samples shrink together.

        ΔW = μ E (XᵀX + εI)⁻¹ Xᵀ        (eq. consequentialism formula)

    where the columns of ``X`` are the last ``order`` samples (fewer at the start of the stream) and ``E`` are their
    errors under the present weights; no sample disturbs another. With ``damping=0`` it is ``ΔW = μ E X†`` (eq. ideal
    weight update rule) with the pseudo-inverse, so that repeated samples, samples of zeros and ``order > D`` are well
    defined.
    ``order=1`` is :func:`nlms`.

    Args:
        inputs: A sample per row (x in the paper), [T, D], float32 or float64.
        targets: What the outputs should be (t in the paper), [T] for one output or [T, O] for several.
        step_size: Learning rate, ≥ 0 (μ in the paper). Stable below 2; 1 meets the last ``order`` samples exactly.
        order: How many samples one update foresees, ≥ 1 (the batch size N in the paper).
        damping: Added to the diagonal of ``XᵀX``, ≥ 0 (λ in the paper, ε in the literature on filters).
        weights: Initial weights (W in the paper), [D] or [O, D] as the targets are; zeros if not given.

    Returns:
        A-priori predictions and errors, and the weight history of T + 1 entries.

    Raises:
        ValueError: For shapes, lengths or dtypes that do not fit, a bad step size, damping or order, NaN or inf in the
            stream.

    Example:
        Two samples that point almost the same way; the second update still meets both.

        >>> import torch
        >>> inputs, targets = torch.tensor([[1.0, 0.0], [1.0, 1.0]]), torch.tensor([2.0, 5.0])
        >>> result = apa(inputs, targets, step_size=1.0, order=2)
        >>> torch.allclose(inputs @ result.weights[-1], targets)
        True
    """
    check_nonnegative("step_size", step_size, "APA is stable for 0 < step_size < 2")
    check_nonnegative("damping", damping, "use 0 (pseudo-inverse) or a small positive number")
    if order < 1 or order != int(order):
        raise ValueError(f"order must be an integer >= 1, got {order}; order=1 is NLMS.")
    columns = targets if targets.ndim == 2 else targets.unsqueeze(-1)

    def change(sample: int, weights: Tensor, errors: Tensor) -> Tensor:
        recent = slice(max(0, sample + 1 - int(order)), sample + 1)
        recent_errors = columns[recent] - inputs[recent] @ weights.mT
        return step_size * (_damped_pseudo_inverse(inputs[recent], damping) @ recent_errors).mT

    return _run(inputs, targets, weights, change)


def _run(
    inputs: Tensor, targets: Tensor, weights: Tensor | None, change: Callable[[int, Tensor, Tensor], Tensor]
) -> FilterResult:
    """Predicts each sample, then adds ``change(sample, weights [O, D], errors [O])`` to the weights."""
    _require_stream(inputs, targets)
    single_output = targets.ndim == 1
    columns = targets.unsqueeze(-1) if single_output else targets
    samples, features, outputs = *inputs.shape, columns.shape[1]

    history = inputs.new_zeros(samples + 1, outputs, features)
    if weights is not None:
        _require_weights(weights, inputs, (features,) if single_output else (outputs, features))
        history[0] = weights
    predictions = torch.empty_like(columns)
    errors = torch.empty_like(columns)
    for sample in range(samples):
        predictions[sample] = history[sample] @ inputs[sample]
        errors[sample] = columns[sample] - predictions[sample]
        history[sample + 1] = history[sample] + change(sample, history[sample], errors[sample])

    if single_output:
        return FilterResult(predictions.squeeze(-1), errors.squeeze(-1), history.squeeze(1))
    return FilterResult(predictions, errors, history)


def _normalised(sample: Tensor, damping: float) -> Tensor:
    """``x / (‖x‖² + ε)``, [D] -> [D]; 0 for x = 0."""
    # The largest entry is divided out first, so that the square neither overflows nor vanishes.
    peak = sample.abs().amax()
    scaled = sample / peak
    normalised = scaled / (scaled.dot(scaled) * peak + damping / peak)
    return torch.where(peak >= torch.finfo(sample.dtype).tiny, normalised, 0.0)


def _damped_pseudo_inverse(samples: Tensor, damping: float) -> Tensor:
    """``X (XᵀX + εI)⁻¹`` for rows of samples, [P, D] -> [D, P]; the pseudo-inverse for ε = 0."""
    # By singular values, each becoming σ / (σ² + ε): one formula for both cases, which never fails on repeated samples.
    left, singular, right = torch.linalg.svd(samples, full_matrices=False)
    precision = torch.finfo(samples.dtype)
    cutoff = (max(samples.shape) * precision.eps * singular.amax()).clamp(min=precision.tiny)
    # What damping does not lift above rounding is rounding, and is dropped as torch.linalg.pinv does.
    visible = torch.hypot(singular, torch.full_like(singular, math.sqrt(damping))) > cutoff
    inverted = torch.where(visible, 1 / (singular + damping / singular), 0.0)
    pseudo_inverse: Tensor = (right.mT * inverted) @ left.mT
    return pseudo_inverse


def _require_stream(inputs: Tensor, targets: Tensor) -> None:
    if inputs.ndim != 2 or inputs.shape[1] == 0:
        raise ValueError(
            f"inputs must be [T, D] with D >= 1, got shape {list(inputs.shape)}; "
            "a row is a sample, use inputs.unsqueeze(-1) for one feature."
        )
    if targets.ndim not in (1, 2) or (targets.ndim == 2 and targets.shape[1] == 0):
        raise ValueError(
            f"targets must be [T] for one output or [T, O] for several, got shape {list(targets.shape)}; "
            "a row is a sample."
        )
    if len(inputs) != len(targets):
        raise ValueError(
            f"inputs and targets must have the same length, got {len(inputs)} samples (shape {list(inputs.shape)}) "
            f"and {len(targets)} targets (shape {list(targets.shape)}); cut the longer one."
        )
    for name, stream in (("inputs", inputs), ("targets", targets)):
        _require_dtype(name, stream, inputs)
        bad = stream.isfinite().logical_not().nonzero()
        if len(bad):
            sample = int(bad[0, 0])
            raise ValueError(
                f"{name} holds NaN or inf, first in sample {sample} ({stream[sample].tolist()}); "
                "remove or repair such samples."
            )


def _require_weights(weights: Tensor, inputs: Tensor, shape: tuple[int, ...]) -> None:
    if weights.shape != shape:
        raise ValueError(
            f"weights must have shape {list(shape)}, got {list(weights.shape)}; "
            "[D] goes with targets [T], [O, D] with targets [T, O]."
        )
    _require_dtype("weights", weights, inputs)
    if not weights.isfinite().all():
        raise ValueError(f"weights hold NaN or inf: {weights.tolist()}; start from finite weights.")


def _require_dtype(name: str, tensor: Tensor, inputs: Tensor) -> None:
    if tensor.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{name} must be float32 or float64, got {tensor.dtype}; use {name}.double().")
    if tensor.dtype != inputs.dtype or tensor.device != inputs.device:
        raise ValueError(
            f"{name} must match inputs ({inputs.dtype} on {inputs.device}), got {tensor.dtype} on {tensor.device}; "
            f"use {name}.to(inputs)."
        )
