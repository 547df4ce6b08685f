"""The paper's own objects under their names: the readable statement of arXiv 2003.05164, not the fast path.

Everything is in the paper's orientation: a column is a sample, the inputs X of a layer are D×N and its outputs
``Z = W X`` are O×N. ``ΔZ = ∂L/∂Z`` are the gradients of the backward pass (a left arrow in the paper), ``ΔW`` the
changes *to be added* to the weights (a right arrow). Losses are taken as they are given; the paper sums over samples.

* :func:`forward_phase`, Algorithm 1: ``Z = W X``, then ``φ(Z)`` is the next X.
* :func:`backward_phase`, Algorithm 2 and Proposition 1: ``ΔW = −μ ΔZ Xᵀ``.
* :func:`virtual_targets` and :func:`lms_update`, Proposition 2: ``T̃ = Z − ΔZ``, ``ΔW = μ Ẽ Xᵀ``.
* :func:`first_extension`, which fails: ``ΔW = −μ ΔZ X̂ᵀ``; :func:`counter_example`: ``X̂ᵀX`` is not the identity.
* :func:`consequentialist_backward_phase`, Algorithm 3, the proposal: ``ΔŴ = −μ ΔZ (XᵀX + λI)⁻¹ Xᵀ``.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from consequent.maths.checks import check_nonnegative

__all__ = [
    "ForwardPhase",
    "backward_phase",
    "consequentialist_backward_phase",
    "counter_example",
    "first_extension",
    "forward_phase",
    "lms_update",
    "virtual_targets",
]

Activation = Callable[[Tensor], Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]


class ForwardPhase(NamedTuple):
    """What Algorithm 1 returns for a network of L layers.

    Attributes:
        inputs: The inputs X⁽⁰⁾ … X⁽ᴸ⁾, L + 1 matrices of D⁽ˡ⁾×N; the last one is the output of the network.
        outputs: The outputs Z⁽⁰⁾ … Z⁽ᴸ⁻¹⁾ before the activation, L matrices of D⁽ˡ⁺¹⁾×N.
        loss: The loss, one number.
    """

    inputs: list[Tensor]
    outputs: list[Tensor]
    loss: Tensor


@torch.no_grad()
def forward_phase(
    inputs: Tensor,
    weights: Sequence[Tensor],
    targets: Tensor,
    *,
    activation: Activation | Sequence[Activation],
    loss: Loss,
) -> ForwardPhase:
    """Algorithm 1, the forward phase of a multi-layer perceptron.

        Z⁽ˡ⁾ = W⁽ˡ⁾ X⁽ˡ⁾,    X⁽ˡ⁺¹⁾ = φ(Z⁽ˡ⁾),    l = 0, …, L − 1

    Args:
        inputs: A sample per column, D⁽⁰⁾×N (X⁽⁰⁾ in the paper).
        weights: A matrix per layer, D⁽ˡ⁺¹⁾×D⁽ˡ⁾ (W in the paper).
        targets: Whatever the loss compares the network's output with (T in the paper).
        activation: φ in the paper, which applies it after every layer, also the last; not an in-place one, since Z is
            kept. A sequence gives each layer its own.
        loss: 𝓛 in the paper: takes X⁽ᴸ⁾ (a sample per column) and the targets, returns one number.

    Returns:
        X, Z and the loss, as the algorithm does.
    """
    layer_inputs, layer_outputs = [inputs], []
    for phi, weight in zip(_per_layer(activation, len(weights)), weights, strict=True):
        layer_outputs.append(weight @ layer_inputs[-1])
        layer_inputs.append(phi(layer_outputs[-1]))
    return ForwardPhase(layer_inputs, layer_outputs, _loss_value(loss, layer_inputs[-1], targets))


def backward_phase(
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    outputs: Sequence[Tensor],
    targets: Tensor,
    *,
    activation: Activation | Sequence[Activation],
    loss: Loss,
    step_size: float,
) -> list[Tensor]:
    """Algorithm 2, backpropagation of a multi-layer perceptron (Proposition 1, eq. recursive backward).

        ΔX⁽ᴸ⁾ = ∂𝓛 / ∂X⁽ᴸ⁾
        ΔZ⁽ˡ⁾ = ΔX⁽ˡ⁺¹⁾ ∘ φ′(Z⁽ˡ⁾)
        ΔW⁽ˡ⁾ = −μ ΔZ⁽ˡ⁾ X⁽ˡ⁾ᵀ
        ΔX⁽ˡ⁾ = W⁽ˡ⁾ᵀ ΔZ⁽ˡ⁾

    Args:
        inputs: X⁽⁰⁾ … X⁽ᴸ⁾ from :func:`forward_phase`, D⁽ˡ⁾×N.
        weights: A matrix per layer, D⁽ˡ⁺¹⁾×D⁽ˡ⁾ (W in the paper).
        outputs: Z⁽⁰⁾ … Z⁽ᴸ⁻¹⁾ from :func:`forward_phase`, D⁽ˡ⁺¹⁾×N.
        targets: Whatever the loss compares the network's output with (T in the paper).
        activation: φ in the paper, for all layers or one per layer.
        loss: 𝓛 in the paper: takes X⁽ᴸ⁾ and the targets, returns one number. Its gradient is taken by autograd.
        step_size: Learning rate, ≥ 0 (μ in the paper).

    Returns:
        The change of each weight matrix, to be added to it.
    """
    check_nonnegative("step_size", step_size, "give a number of 0 or more")
    return [
        -step_size * output_grads @ layer_inputs.mT
        for output_grads, layer_inputs in _backpropagate(inputs, weights, outputs, targets, activation, loss)
    ]


def consequentialist_backward_phase(
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    outputs: Sequence[Tensor],
    targets: Tensor,
    *,
    activation: Activation | Sequence[Activation],
    loss: Loss,
    step_size: float,
    damping: float,
) -> list[Tensor]:
    """Algorithm 3, the main proposal: backpropagation with consequentialism weight updates.

        ΔŴ⁽ˡ⁾ = −μ ΔZ⁽ˡ⁾ (X⁽ˡ⁾ᵀX⁽ˡ⁾ + λI)⁻¹ X⁽ˡ⁾ᵀ
        ΔŴ⁽ˡ⁾ = −μ ΔZ⁽ˡ⁾ X⁽ˡ⁾†                        for λ = 0

    (eq. consequentialism formula and eq. ideal weight update rule); ΔZ are the gradients of :func:`backward_phase`.
    With λ = 0 and linearly independent samples the outputs of a layer move by exactly ``−μΔZ`` when the same mini-batch
    comes again.

    Args:
        inputs: These and the other arguments are those of :func:`backward_phase`.
        weights: W.
        outputs: Z.
        targets: T.
        activation: φ.
        loss: 𝓛.
        step_size: μ.
        damping: Ridge added to the un-normalised ``XᵀX``, ≥ 0 (λ in the paper); 0 takes the pseudo-inverse.

    Returns:
        The change of each weight matrix, to be added to it.

    Example:
        One linear layer at μ = 1 lands on its targets in one step.

        >>> import torch
        >>> linear, half_squares = torch.nn.Identity(), lambda X, T: (X - T).square().sum() / 2
        >>> weights, targets = [torch.zeros(1, 2)], torch.tensor([[5.0, 7.0]])
        >>> X, Z, _ = forward_phase(
        ...     torch.tensor([[1.0, 1.0], [0.0, 1.0]]), weights, targets, activation=linear, loss=half_squares
        ... )
        >>> (change,) = consequentialist_backward_phase(
        ...     X, weights, Z, targets, activation=linear, loss=half_squares, step_size=1.0, damping=0.0
        ... )
        >>> torch.allclose((weights[0] + change) @ X[0], targets)
        True
    """
    check_nonnegative("step_size", step_size, "give a number of 0 or more")
    check_nonnegative("damping", damping, "give a number of 0 or more")
    return [
        -step_size * output_grads @ _ridge_pseudo_inverse(layer_inputs, damping)
        for output_grads, layer_inputs in _backpropagate(inputs, weights, outputs, targets, activation, loss)
    ]


@torch.no_grad()
def virtual_targets(outputs: Tensor, output_grads: Tensor) -> Tensor:
    """Where the gradients send the outputs of a layer (eq. virtual targets-before).

        T̃ = Z − ΔZ

    Proposition 2: training the layer on these targets with μ-LMS *is* backpropagation, for any loss:
    ``lms_update(virtual_targets(Z, ΔZ) − Z, X, μ)`` equals ``−μ ΔZ Xᵀ``.

    Args:
        outputs: Outputs of the layer before its activation, O×N (Z in the paper).
        output_grads: Gradients of the loss with respect to them, O×N (ΔZ in the paper).
    """
    if outputs.shape != output_grads.shape:
        raise ValueError(
            f"outputs and output_grads must have the same shape, got {list(outputs.shape)} and "
            f"{list(output_grads.shape)}; both are O×N, a sample per column."
        )
    return outputs - output_grads


@torch.no_grad()
def lms_update(errors: Tensor, inputs: Tensor, step_size: float) -> Tensor:
    """The μ-LMS update, summed over the samples of a mini-batch (eq. mu lms).

        ΔW = μ E Xᵀ

    What it does to the errors of the same samples is ``ΔE = −ΔW X = −μ E XᵀX``, for one sample ``−μ e ‖x‖²``.

    Args:
        errors: Targets minus outputs, O×N (E in the paper).
        inputs: A sample per column, D×N (X in the paper).
        step_size: Learning rate, ≥ 0 (μ in the paper).

    Returns:
        The change of the weights, O×D, to be added to them.
    """
    check_nonnegative("step_size", step_size, "give a number of 0 or more")
    _require_columns("errors", errors, inputs)
    return step_size * errors @ inputs.mT


@torch.no_grad()
def first_extension(inputs: Tensor, output_grads: Tensor, epsilon: float = 0.0, *, step_size: float = 1.0) -> Tensor:
    """NLMS carried over to mini-batches sample by sample. A counter-example: it fails, do not train with it.

        x̂ₙ = xₙ / (‖xₙ‖² + ε),    ΔW = μ Ẽ X̂ᵀ = −μ ΔZ X̂ᵀ

    Each sample alone would move as wanted, but all samples change the same weights: the outputs move by
    ``−μ ΔZ X̂ᵀX``, and ``X̂ᵀX`` is the identity only for orthogonal samples (see :func:`counter_example`). For N alike
    samples every one moves N times too far. The cure is :func:`consequentialist_backward_phase`.

    Args:
        inputs: A sample per column, D×N (X in the paper).
        output_grads: Gradients of the loss with respect to the outputs, O×N (ΔZ = −Ẽ in the paper).
        epsilon: Added to each squared norm, ≥ 0 (ε in the paper). A sample of zeros contributes nothing.
        step_size: Learning rate, ≥ 0 (μ in the paper).

    Returns:
        The change of the weights, O×D, to be added to them.

    Example:
        Two equal samples want to move by −1 and move by −2.

        >>> import torch
        >>> inputs = torch.tensor([[2.0, 2.0]])
        >>> first_extension(inputs, torch.tensor([[1.0, 1.0]])) @ inputs
        tensor([[-2., -2.]])
    """
    check_nonnegative("epsilon", epsilon, "give a number of 0 or more")
    check_nonnegative("step_size", step_size, "give a number of 0 or more")
    _require_columns("output_grads", output_grads, inputs)
    squared_norms = inputs.square().sum(dim=0) + epsilon
    normalised = torch.where(squared_norms > 0, inputs / squared_norms, 0.0)
    return -step_size * output_grads @ normalised.mT


@torch.no_grad()
def counter_example(inputs: Tensor) -> Tensor:
    """The 2×2 matrix that refutes the first extension, as printed in section "First extension" (ε = 0).

        X̂ᵀX = [ 1                                   (x₁₁x₁₂ + x₂₁x₂₂) / (x₁₁² + x₂₁²) ]
              [ (x₁₁x₁₂ + x₂₁x₂₂) / (x₁₂² + x₂₂²)   1                                 ]

    :func:`first_extension` moves the outputs by ``−μ ΔZ X̂ᵀX``, so this should be the identity. It is so only for
    orthogonal samples; otherwise the correction of one sample also moves the other, the more the larger that other is.

    Args:
        inputs: Two samples of two features, a sample per column, 2×2 (X in the paper), neither of them zero.

    Returns:
        The matrix ``X̂ᵀX``, 2×2.

    Example:
        >>> import torch
        >>> counter_example(torch.tensor([[1.0, 2.0], [0.0, 2.0]]))
        tensor([[1.0000, 2.0000],
                [0.2500, 1.0000]])
    """
    if inputs.shape != (2, 2):
        raise ValueError(f"inputs must be 2×2, got shape {list(inputs.shape)}; a column is a sample of two features.")
    (x11, x12), (x21, x22) = inputs
    first, second = x11 * x11 + x21 * x21, x12 * x12 + x22 * x22
    if first == 0 or second == 0:
        raise ValueError(f"inputs must have two non-zero columns, got {inputs.tolist()}; X̂ divides by their norms.")
    correlation = x11 * x12 + x21 * x22
    one = torch.ones_like(correlation)
    return torch.stack([torch.stack([one, correlation / first]), torch.stack([correlation / second, one])])


@torch.no_grad()
def _backpropagate(
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    outputs: Sequence[Tensor],
    targets: Tensor,
    activation: Activation | Sequence[Activation],
    loss: Loss,
) -> list[tuple[Tensor, Tensor]]:
    """The part that Algorithms 2 and 3 share: ``(ΔZ, X)`` of every layer, first layer first."""
    layers = len(weights)
    if len(inputs) != layers + 1 or len(outputs) != layers:
        raise ValueError(
            f"{layers} weight matrices need {layers + 1} inputs and {layers} outputs, got {len(inputs)} and "
            f"{len(outputs)}; pass what forward_phase returned for these weights."
        )
    activations = _per_layer(activation, layers)
    with torch.enable_grad():
        last = inputs[-1].detach().requires_grad_()
        (input_grads,) = torch.autograd.grad(_loss_value(loss, last, targets), last)
    pairs = []
    for layer in reversed(range(layers)):
        with torch.enable_grad():
            output = outputs[layer].detach().requires_grad_()
            (output_grads,) = torch.autograd.grad(activations[layer](output), output, input_grads)
        pairs.append((output_grads, inputs[layer].detach()))
        if layer >= 1:
            input_grads = weights[layer].mT @ output_grads
    return pairs[::-1]


def _ridge_pseudo_inverse(inputs: Tensor, damping: float) -> Tensor:
    """``(XᵀX + λI)⁻¹ Xᵀ``, N×D; ``X†`` for λ = 0."""
    pseudo_inverse: Tensor
    if damping == 0:
        pseudo_inverse = torch.linalg.pinv(inputs)
    else:
        gram = inputs.mT @ inputs
        ridge = damping * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        pseudo_inverse = torch.linalg.solve(gram + ridge, inputs.mT)
    return pseudo_inverse


def _loss_value(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    value = loss(outputs, targets)
    if value.numel() != 1:
        raise ValueError(f"loss must return one number, got shape {list(value.shape)}; sum it over the samples.")
    return value


def _per_layer(function: Activation | Sequence[Activation], layers: int) -> list[Activation]:
    if layers == 0:
        raise ValueError("weights must hold at least one matrix, got none; give one per layer.")
    # A torch.nn.Sequential is both a sequence and a callable; it is meant as a callable.
    functions = [function] * layers if callable(function) else list(function)
    if len(functions) != layers:
        raise ValueError(f"activation has {len(functions)} entries for {layers} layers; give one for all, or each.")
    return functions


def _require_columns(name: str, matrix: Tensor, inputs: Tensor) -> None:
    if inputs.ndim != 2 or matrix.ndim != 2 or matrix.shape[1] != inputs.shape[1]:
        raise ValueError(
            f"{name} must be O×N and inputs D×N with the same N, got shapes {list(matrix.shape)} and "
            f"{list(inputs.shape)}; a sample is a column, transpose what has samples in rows."
        )
