"""The paper's statements, each checked against something that was not written here."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import Ridge
from torch.nn import functional

from consequent.paper import (
    backward_phase,
    consequentialist_backward_phase,
    counter_example,
    first_extension,
    forward_phase,
    lms_update,
    virtual_targets,
)

WIDTHS, BATCH = [6, 5, 4, 3], 7


def identity(outputs):
    return outputs


def softmax(outputs):
    return outputs.softmax(dim=0)  # over the features of a sample, which is a column


ACTIVATIONS = {
    "identity": identity,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "gelu": functional.gelu,
    "square": torch.square,
    "softmax": softmax,
    "relu-then-linear": [torch.relu, torch.relu, identity],
}

# name -> (loss of outputs O×N and targets, targets)
REAL_TARGETS = torch.randn(WIDTHS[-1], BATCH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
LABELS = torch.tensor([0, 2, 1, 1, 0, 2, 2])
LOSSES = {
    "half-squares": (lambda X, T: (X - T).square().sum() / 2, REAL_TARGETS),
    "mean-squares": (lambda X, T: functional.mse_loss(X.T, T.T), REAL_TARGETS),
    "cross-entropy": (lambda X, T: functional.cross_entropy(X.T, T, reduction="sum"), LABELS),
    # Odd on purpose: mixes samples and outputs, is not a sum over samples.
    "odd": (lambda X, T: torch.logsumexp(X, dim=(0, 1)) + (X * T).sin().prod(dim=0).sum() + X.std(), REAL_TARGETS),
}
each_network = pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
each_loss = pytest.mark.parametrize(("loss", "targets"), LOSSES.values(), ids=LOSSES)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def network() -> tuple[torch.Tensor, list[torch.Tensor]]:
    weights = [random(WIDTHS[k + 1], WIDTHS[k], seed=k + 10) / math.sqrt(WIDTHS[k]) for k in range(len(WIDTHS) - 1)]
    return random(WIDTHS[0], BATCH), weights


def autograd(inputs, weights, targets, activation, loss):
    """Plain torch: inputs and outputs of every layer, and the gradients of its weights and outputs."""
    activations = activation if isinstance(activation, list) else [activation] * len(weights)
    leaves = [weight.clone().requires_grad_() for weight in weights]
    layer_inputs, layer_outputs = [inputs], []
    for phi, leaf in zip(activations, leaves, strict=True):
        layer_outputs.append(leaf @ layer_inputs[-1])
        layer_outputs[-1].retain_grad()
        layer_inputs.append(phi(layer_outputs[-1]))
    value = loss(layer_inputs[-1], targets)
    value.backward()
    return layer_inputs, layer_outputs, value, [leaf.grad for leaf in leaves], [z.grad for z in layer_outputs]


def assert_close(actual, expected, rtol=1e-10, atol=1e-12):
    torch.testing.assert_close(actual, torch.as_tensor(expected).detach(), rtol=rtol, atol=atol)


# --- Algorithms 1 and 2, Proposition 1 ---


@each_network
@each_loss
def test_algorithms_1_and_2_equal_autograd(activation, loss, targets):
    inputs, weights = network()
    X, Z, value = forward_phase(inputs, weights, targets, activation=activation, loss=loss)
    changes = backward_phase(X, weights, Z, targets, activation=activation, loss=loss, step_size=0.3)
    expected_X, expected_Z, expected_value, weight_grads, _ = autograd(inputs, weights, targets, activation, loss)
    assert len(X) == len(weights) + 1
    for actual, expected in zip([*X, *Z, value], [*expected_X, *expected_Z, expected_value], strict=True):
        assert_close(actual, expected)
    for change, weight_grad in zip(changes, weight_grads, strict=True):
        assert weight_grad.abs().max() > 1e-6  # the case tells something
        assert_close(change, -0.3 * weight_grad)


def test_results_carry_no_graph_and_work_without_grad_mode():
    inputs, weights = network()
    loss, targets = LOSSES["half-squares"]
    parameters = [torch.nn.Parameter(weight) for weight in weights]
    with torch.no_grad():
        X, Z, value = forward_phase(inputs, parameters, targets, activation=torch.tanh, loss=loss)
        options = {"activation": torch.tanh, "loss": loss, "step_size": 1.0}
        changes = backward_phase(X, parameters, Z, targets, **options)
    X, Z, value = forward_phase(inputs, parameters, targets, activation=torch.tanh, loss=loss)
    changes += consequentialist_backward_phase(X, parameters, Z, targets, damping=0.1, **options)
    assert not any(tensor.requires_grad for tensor in [*X, *Z, value, *changes])
    assert all(parameter.grad is None for parameter in parameters)


# --- Proposition 2 ---


@each_network
@each_loss
def test_proposition_2_lms_on_virtual_targets_is_backpropagation(activation, loss, targets):
    inputs, weights = network()
    X, Z, _, weight_grads, output_grads = autograd(inputs, weights, targets, activation, loss)
    for layer, weight_grad in enumerate(weight_grads):
        wanted = virtual_targets(Z[layer], output_grads[layer])
        assert_close(lms_update(wanted - Z[layer], X[layer], 0.3), -0.3 * weight_grad)


def test_virtual_targets_of_half_squares_are_the_targets():
    inputs, weights = network()
    loss, targets = LOSSES["half-squares"]
    _, Z, _, _, output_grads = autograd(inputs, weights, targets, identity, loss)
    assert_close(virtual_targets(Z[-1], output_grads[-1]), targets)


@given(seed=st.integers(0, 2**31), step_size=st.floats(0, 2))
@settings(max_examples=20, deadline=None)
def test_lms_changes_the_error_by_minus_mu_e_times_squared_norm(seed, step_size):
    # The sign that eq. "correlation as squared norm" loses on the way.
    sample, weight, target = random(4, 1, seed=seed), random(2, 4, seed=seed + 1), random(2, 1, seed=seed + 2)
    error = target - weight @ sample
    moved = target - (weight + lms_update(error, sample, step_size)) @ sample
    assert_close(moved - error, -step_size * error * sample.square().sum(), atol=1e-10)


# --- Algorithm 3 ---


@each_network
@pytest.mark.parametrize("damping", [1e-3, 0.03, 10.0])
def test_algorithm_3_equals_ridge_regression(activation, damping):
    inputs, weights = network()
    loss, targets = LOSSES["cross-entropy"]
    X, Z, _ = forward_phase(inputs, weights, targets, activation=activation, loss=loss)
    changes = consequentialist_backward_phase(
        X, weights, Z, targets, activation=activation, loss=loss, step_size=0.3, damping=damping
    )
    layer_inputs, *_, output_grads = autograd(inputs, weights, targets, activation, loss)
    for layer, change in enumerate(changes):
        ridge = Ridge(alpha=damping, fit_intercept=False, solver="svd")
        ridge.fit(layer_inputs[layer].detach().numpy().T, -0.3 * output_grads[layer].numpy().T)
        assert_close(change, ridge.coef_, rtol=1e-7, atol=1e-9)


@each_network
@pytest.mark.parametrize("batch", [3, BATCH])
def test_algorithm_3_without_damping_equals_the_pseudo_inverse(activation, batch):
    inputs, weights = network()
    inputs, targets, loss = inputs[:, :batch], LABELS[:batch], LOSSES["cross-entropy"][0]
    X, Z, _ = forward_phase(inputs, weights, targets, activation=activation, loss=loss)
    changes = consequentialist_backward_phase(
        X, weights, Z, targets, activation=activation, loss=loss, step_size=0.3, damping=0.0
    )
    layer_inputs, *_, output_grads = autograd(inputs, weights, targets, activation, loss)
    for layer, change in enumerate(changes):
        expected = -0.3 * output_grads[layer].numpy() @ np.linalg.pinv(layer_inputs[layer].detach().numpy())
        assert_close(change, expected, rtol=1e-7, atol=1e-9)


def single_layer_step(inputs, weight, targets, loss, **options):
    X, Z, _ = forward_phase(inputs, [weight], targets, activation=identity, loss=loss)
    (change,) = consequentialist_backward_phase(X, [weight], Z, targets, activation=identity, loss=loss, **options)
    return change


@each_loss
@pytest.mark.parametrize("step_size", [0.1, 1.0])
def test_after_the_ideal_step_outputs_move_by_exactly_minus_mu_output_grads(loss, targets, step_size):
    inputs, weight = random(BATCH + 2, BATCH, seed=3), random(WIDTHS[-1], BATCH + 2, seed=4)
    outputs = (weight @ inputs).requires_grad_()
    (output_grads,) = torch.autograd.grad(loss(outputs, targets), outputs)
    change = single_layer_step(inputs, weight, targets, loss, step_size=step_size, damping=0.0)
    assert_close((weight + change) @ inputs - outputs.detach(), -step_size * output_grads, rtol=1e-9, atol=1e-10)
    # Backpropagation does not: its outputs are mixed by the correlation matrix.
    plain = -step_size * output_grads @ inputs.T
    assert (plain @ inputs + step_size * output_grads).norm() > output_grads.norm() * step_size


def test_one_sample_is_nlms():
    inputs, weight, targets = random(5, 1, seed=5), random(2, 5, seed=6), random(2, 1, seed=7)
    change = single_layer_step(inputs, weight, targets, LOSSES["half-squares"][0], step_size=0.4, damping=0.2)
    error = targets - weight @ inputs
    assert_close(change, 0.4 * error @ inputs.T / (inputs.square().sum() + 0.2))


# --- First extension ---


def test_first_extension_fails_on_a_random_batch():
    inputs, output_grads = random(2, 2, seed=8), random(3, 2, seed=9)
    moved = first_extension(inputs, output_grads, step_size=0.5) @ inputs
    assert (moved + 0.5 * output_grads).norm() > 0.05 * output_grads.norm()
    # What it does is what the counter-example foresees.
    assert_close(moved, -0.5 * output_grads @ counter_example(inputs))


entries = st.floats(-10, 10).filter(lambda value: abs(value) > 1e-2)


@given(st.tuples(entries, entries, entries, entries))
@settings(max_examples=50, deadline=None)
def test_counter_example_matches_the_printed_matrix(numbers):
    x11, x12, x21, x22 = numbers
    inputs = torch.tensor([[x11, x12], [x21, x22]], dtype=torch.float64)
    printed = torch.tensor(
        [
            [1.0, (x11 * x12 + x21 * x22) / (x11**2 + x21**2)],
            [(x11 * x12 + x21 * x22) / (x12**2 + x22**2), 1.0],
        ],
        dtype=torch.float64,
    )
    assert_close(counter_example(inputs), printed)
    # Minus the identity as gradients makes the first extension X̂ᵀ itself.
    transposed = first_extension(inputs, -torch.eye(2, dtype=torch.float64))
    assert_close(transposed @ inputs, printed, atol=1e-10)
    normalised = inputs.numpy() / np.square(inputs.numpy()).sum(axis=0)
    assert_close(transposed, normalised.T)


@given(angle=st.floats(0, 2 * math.pi), sizes=st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)))
@settings(max_examples=30, deadline=None)
def test_orthogonal_samples_make_it_the_identity(angle, sizes):
    rotation = [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]
    inputs = torch.tensor(rotation, dtype=torch.float64) * torch.tensor(sizes, dtype=torch.float64)
    assert_close(counter_example(inputs), torch.eye(2, dtype=torch.float64), atol=1e-10)


def test_first_extension_is_right_for_orthogonal_samples_and_for_one():
    orthogonal, _ = torch.linalg.qr(random(6, 4, seed=11))
    inputs, output_grads = orthogonal * torch.tensor([1.0, 3.0, 0.2, 7.0]), random(2, 4, seed=12)
    assert_close(first_extension(inputs, output_grads) @ inputs, -output_grads)
    assert_close(first_extension(inputs[:, :1], output_grads[:, :1]) @ inputs[:, :1], -output_grads[:, :1])


def test_first_extension_epsilon_and_samples_of_zeros():
    inputs, output_grads = torch.tensor([[3.0, 0.0], [4.0, 0.0]]), torch.tensor([[10.0, 1.0]])
    assert_close(first_extension(inputs, output_grads), torch.tensor([[-1.2, -1.6]]), rtol=1e-6)
    assert_close(first_extension(inputs, output_grads, 25.0), torch.tensor([[-0.6, -0.8]]), rtol=1e-6)


def test_first_extension_diverges_on_correlated_samples_while_consequentialism_converges():
    inputs = 1.0 + 0.2 * random(10, 5, seed=13)  # all samples point nearly the same way
    cosines = functional.cosine_similarity(inputs.T.unsqueeze(0), inputs.T.unsqueeze(1), dim=-1)
    assert cosines.min() > 0.9
    targets = random(2, 5, seed=14)
    loss = LOSSES["half-squares"][0]
    naive, foreseeing = random(2, 10, seed=15), random(2, 10, seed=15)
    start = loss(naive @ inputs, targets)
    for _ in range(20):
        naive += first_extension(inputs, naive @ inputs - targets)
        foreseeing += single_layer_step(inputs, foreseeing, targets, loss, step_size=1.0, damping=1e-3)
    assert loss(naive @ inputs, targets) > 1e6 * start
    assert loss(foreseeing @ inputs, targets) < 1e-12 * start


# --- bad input ---


def test_bad_input_is_named():
    inputs, weights = network()
    loss, targets = LOSSES["half-squares"]
    options = {"activation": torch.tanh, "loss": loss}
    X, Z, _ = forward_phase(inputs, weights, targets, **options)
    for value in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"step_size must be finite and ≥ 0, got {value}"):
            backward_phase(X, weights, Z, targets, step_size=value, **options)
        with pytest.raises(ValueError, match=f"damping must be finite and ≥ 0, got {value}"):
            consequentialist_backward_phase(X, weights, Z, targets, step_size=1.0, damping=value, **options)
        with pytest.raises(ValueError, match=f"step_size must be finite and ≥ 0, got {value}"):
            lms_update(Z[0], X[0], value)
        with pytest.raises(ValueError, match=f"epsilon must be finite and ≥ 0, got {value}"):
            first_extension(X[0], Z[0], value)
    with pytest.raises(ValueError, match="3 weight matrices need 4 inputs and 3 outputs, got 3 and 3"):
        backward_phase(X[1:], weights, Z, targets, step_size=1.0, **options)
    with pytest.raises(ValueError, match="activation has 2 entries for 3 layers"):
        forward_phase(inputs, weights, targets, activation=[torch.tanh] * 2, loss=loss)
    with pytest.raises(ValueError, match="at least one matrix"):
        forward_phase(inputs, [], targets, **options)
    with pytest.raises(ValueError, match=r"one number, got shape \[3, 7\]"):
        forward_phase(inputs, weights, targets, activation=torch.tanh, loss=torch.sub)


def test_bad_shapes_are_named():
    with pytest.raises(ValueError, match=r"same shape, got \[2, 3\] and \[2, 1\]"):
        virtual_targets(torch.ones(2, 3), torch.ones(2, 1))
    with pytest.raises(ValueError, match=r"errors must be O×N.*\[3, 2\] and \[4, 3\].*transpose"):
        lms_update(torch.ones(3, 2), torch.ones(4, 3), 1.0)
    with pytest.raises(ValueError, match=r"output_grads must be O×N.*\[2\] and \[4, 2\]"):
        first_extension(torch.ones(4, 2), torch.ones(2))
    with pytest.raises(ValueError, match=r"2×2, got shape \[2, 3\]"):
        counter_example(torch.ones(2, 3))
    with pytest.raises(ValueError, match="non-zero columns"):
        counter_example(torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
