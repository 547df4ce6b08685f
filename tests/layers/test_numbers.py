"""Corrected gradients of every layer case × λ × dtype against the naive reference, within 10·eps·κ(Gram + λI)."""

import itertools
import warnings
from contextlib import contextmanager
from functools import cache

import numpy as np
import pytest
import reference
import torch
from cases import (
    CASES,
    DAMPINGS,
    DTYPES,
    Around,
    build,
    called,
    check_error,
    error_bound,
    included,
    random_like,
    second_moment,
    skip_if_silent,
)
from torch import nn

import consequent

WITH_BIAS = [name for name in CASES if reference.bias_of(build(name)[0]) is not None]


@cache
def expected_problem(name, dtype, frozen=None):
    """(design matrices, output gradient rows) per group."""
    module, x = build(name, dtype)
    if frozen is not None:
        getattr(module, frozen).requires_grad_(False)
    output_grad = random_like(called(module, x), name)
    return reference.design_matrices(module, x), reference.output_rows(module, output_grad)


def corrected(name, dtype, damping, frozen=None, bare=False, requires_input_grad=False):
    """The module after backward and correction; the loss is linear in the output, so ΔZ is known exactly."""
    module, x = build(name, dtype)
    if frozen is not None:
        getattr(module, frozen).requires_grad_(False)
    model = module if bare else Around(module)
    correction = consequent.Consequentialism(
        model, loss_reduction="sum", **reference.damping_options(damping), **included(module)
    )
    output = called(model, x.requires_grad_() if requires_input_grad else x)
    (output * random_like(output, name)).sum().backward()
    correction.step()
    correction.detach()
    return module


@contextmanager
def fall_back_allowed(designs, damping, dtype):
    """Lets the library say that it could not factorise, where two things come together: rounding may make the Gram
    matrix indefinite (10·eps·κ > 1), and only that matrix, not the rows, was kept to try again (N ≥ D).
    """
    hopeless = any(
        X.shape[0] >= X.shape[1] and error_bound(reference.condition_number(X, damping), dtype) > 1 for X in designs
    )
    with warnings.catch_warnings():
        if hopeless:
            warnings.filterwarnings("ignore", "layer .* could not be factorised", consequent.ConsequentWarning)
        yield


def check_gradients(module, designs, output_grads, damping, dtype):
    """One comparison per group, weight and bias together as they are solved; whether all of them could tell."""
    grads = [
        None if parameter is None or parameter.grad is None else reference.to_numpy(parameter.grad)
        for parameter in (module.weight, reference.bias_of(module))
    ]
    actual = reference.gradient_matrices(module, *grads)
    assert len(actual) == len(designs) == len(output_grads)
    told = True
    for matrix, X, dZ in zip(actual, designs, output_grads, strict=True):
        expected = reference.consequential_gradient(X, dZ, damping)
        told &= check_error(matrix, expected, reference.condition_number(X, damping), dtype)
    return told


def half_of_them(*axes):
    """All combinations, every other one for `make slow`: each value meets each other one's neighbours all the same."""
    for places in itertools.product(*(range(len(axis)) for axis in axes)):
        marks = [pytest.mark.slow] if sum(places) % 2 else []
        yield pytest.param(*(axis[place] for axis, place in zip(axes, places, strict=True)), marks=marks)


@pytest.mark.parametrize(("name", "damping", "dtype"), list(half_of_them(list(CASES), DAMPINGS, DTYPES)))
def test_gradients_equal_the_reference(name, damping, dtype):
    designs, output_grads = expected_problem(name, dtype)
    with fall_back_allowed(designs, damping, dtype):
        module = corrected(name, dtype, damping)
    assert module.weight.grad.dtype == dtype
    skip_if_silent(check_gradients(module, designs, output_grads, damping, dtype))


@pytest.mark.parametrize(("fraction", "dtype"), list(zip([1.0, 1e-2], DTYPES, strict=True)), ids=str)
@pytest.mark.parametrize("name", CASES)
def test_gradients_under_relative_damping_equal_the_reference(name, fraction, dtype):
    damping = ("relative", fraction)
    module = corrected(name, dtype, damping)
    assert check_gradients(module, *expected_problem(name, dtype), damping, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_zero_damping_is_the_pseudo_inverse(name, dtype):
    module = corrected(name, dtype, 0.0)
    skip_if_silent(check_gradients(module, *expected_problem(name, dtype), 0.0, dtype))


def test_a_failed_factorisation_is_repeated_in_float64():
    """Samples on one line, λ below the rounding errors of their float32 Gram matrix; the rows are still there."""
    torch.manual_seed(0)
    layer, x, output_grad = nn.Linear(100, 2), 10 * torch.randn(32, 1) @ torch.randn(1, 100), torch.randn(32, 2)
    correction = consequent.Consequentialism(layer, damping=1e-3, loss_reduction="sum")
    (layer(x) * output_grad).sum().backward()
    correction.step()
    assert (correction.counters.rescued, correction.counters.fallen_back) == (1, 0)
    (expected,) = reference.corrected_matrices(layer, x, output_grad, 1e-3)
    (actual,) = reference.gradient_matrices(layer, layer.weight.grad.numpy(), layer.bias.grad.numpy())
    assert reference.relative_error(actual, expected) <= 1e-4


@pytest.mark.parametrize("frozen", ["weight", "bias"])
@pytest.mark.parametrize("name", WITH_BIAS)
def test_frozen_parameters_leave_the_solve(name, frozen):
    module = corrected(name, torch.float64, 0.01, frozen)
    assert getattr(module, frozen).grad is None
    assert check_gradients(module, *expected_problem(name, torch.float64, frozen), 0.01, torch.float64)


@pytest.mark.parametrize("name", ["linear-wide", "linear-3d-input-tall", "conv1d", "conv2d-groups", "conv3d"])
def test_the_model_may_be_the_layer_itself(name):
    module = corrected(name, torch.float64, 0.01, bare=True)
    assert check_gradients(module, *expected_problem(name, torch.float64), 0.01, torch.float64)


@pytest.mark.parametrize("name", ["linear-wide", "linear-tall", "conv1d", "conv2d-stride", "conv3d-padding"])
def test_inputs_that_need_a_gradient_change_nothing(name):
    module = corrected(name, torch.float64, 0.01, requires_input_grad=True)
    assert check_gradients(module, *expected_problem(name, torch.float64), 0.01, torch.float64)


@pytest.mark.parametrize(
    ("loss_reduction", "divisor"),
    [("mean", 8), ("sum", 1), (7.0, 7), (lambda samples: 3 * samples, 24)],
    ids=["mean", "sum", "number", "callable"],
)
@pytest.mark.parametrize("damping", [1e-2, 1.0])
def test_a_network_layer_by_layer(damping, loss_reduction, divisor):
    """Each layer is corrected with its own input and its own ΔZ, times the loss's divisor."""
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=False),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(6, 5),
        nn.LayerNorm(5),
        nn.Linear(5, 3),
    ).double()
    x, targets = torch.randn(8, 2, 4, 4, dtype=torch.float64), torch.arange(8) % 3
    inputs, output_grads = {}, {}

    def watch(layer, arguments, output):
        inputs[layer] = arguments[0].detach().clone()
        output.register_hook(lambda grad: output_grads.__setitem__(layer, grad.clone()))

    layers = [layer for layer in network if isinstance(layer, nn.Linear | nn.Conv2d)]
    watchers = [layer.register_forward_hook(watch) for layer in layers]
    correction = consequent.Consequentialism(network, damping=damping, loss_reduction=loss_reduction)
    nn.functional.cross_entropy(network(x), targets).backward()
    plain = {name: parameter.grad.clone() for name, parameter in network[7].named_parameters()}
    correction.step()
    correction.detach()
    for watcher in watchers:
        watcher.remove()
    for layer in layers:
        expected = reference.corrected_matrices(layer, inputs[layer], output_grads[layer], damping)
        bias_grad = None if layer.bias is None else layer.bias.grad.numpy()
        actual = reference.gradient_matrices(layer, layer.weight.grad.numpy(), bias_grad)
        designs = reference.design_matrices(layer, inputs[layer])
        for got, wanted, X in zip(actual, expected, designs, strict=True):
            assert check_error(got / divisor, wanted, reference.condition_number(X, damping), torch.float64)
    for name, parameter in network[7].named_parameters():
        assert torch.equal(parameter.grad, plain[name])


@pytest.mark.parametrize("ones", [True, False], ids=["with-ones", "without-ones"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_second_moments_equal_the_reference(name, dtype, ones):
    """The Gram matrix of the rows, per group, symmetric and exact up to rounding."""
    module, x = build(name, dtype)
    actual = second_moment(module, x, ones=ones)
    assert actual.dtype == (torch.float32 if isinstance(module, nn.Embedding) else dtype)  # float32 counts exactly
    assert check_error(actual, reference.to_numpy(actual.mT), 1.0, dtype)
    groups = reference.input_rows(module, x)
    assert len(actual) == len(groups)
    for moment, rows in zip(actual, groups, strict=True):
        X = np.concatenate([rows, np.ones((len(rows), 1))], axis=1) if ones else rows
        assert check_error(moment, X.T @ X, 1.0, dtype)
