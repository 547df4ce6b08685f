"""The reference itself: against torch's own forward and backward passes, and against the SVD."""

import numpy as np
import pytest
import reference
import torch
from cases import CASES, DAMPINGS, build, random_like


@pytest.mark.parametrize("name", CASES)
def test_rows_times_weight_are_the_forward_pass(name):
    module, x = build(name)
    weights = reference.gradient_matrices(module, module.weight.detach().numpy(), None)
    outputs = reference.output_rows(module, module(x))
    bias = reference.bias_of(module)
    biases = np.split(np.zeros(reference.outputs_of(module)) if bias is None else bias.detach().numpy(), len(outputs))
    for rows, weight, constant, output in zip(reference.input_rows(module, x), weights, biases, outputs, strict=True):
        np.testing.assert_allclose(rows @ weight.T + constant, output, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_huge_damping_gives_the_gradient_of_autograd(name):
    module, x = build(name)
    output = module(x)
    output_grad = random_like(output, name)
    (output * output_grad).sum().backward()
    lam = 1e18
    weight_grad, bias_grad = reference.corrected_gradients(module, x, output_grad, lam)
    np.testing.assert_allclose(lam * weight_grad, reference.to_numpy(module.weight.grad), rtol=1e-10, atol=1e-11)
    if reference.bias_of(module) is None:
        assert bias_grad is None
    else:
        np.testing.assert_allclose(lam * bias_grad, module.bias.grad.numpy(), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("name", CASES)
def test_gradients_and_matrices_are_two_arrangements_of_the_same_numbers(name):
    module, x = build(name)
    output_grad = random_like(module(x), name)
    gradients = reference.corrected_gradients(module, x, output_grad, 0.1)
    expected = reference.corrected_matrices(module, x, output_grad, 0.1)
    for actual, matrix in zip(reference.gradient_matrices(module, *gradients), expected, strict=True):
        np.testing.assert_array_equal(actual, matrix)


@pytest.mark.parametrize("lam", DAMPINGS)
@pytest.mark.parametrize(("samples", "features"), [(1, 4), (4, 1), (5, 9), (9, 5), (6, 6)])
def test_ridge_is_the_filtered_svd(samples, features, lam):
    random = np.random.default_rng(samples * 10 + features)
    X, dZ = random.normal(size=(samples, features)), random.normal(size=(samples, 3))
    U, s, Vt = np.linalg.svd(X, full_matrices=False)
    expected = dZ.T @ U @ np.diag(s / (s**2 + lam)) @ Vt
    np.testing.assert_allclose(reference.consequential_gradient(X, dZ, lam), expected, rtol=1e-11, atol=1e-12)
    if lam >= 1e-2:
        for side in ("samples", "features"):
            actual = reference.consequential_gradient(X, dZ, lam, side)
            np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=1e-11)


def test_zero_damping_is_the_limit():
    random = np.random.default_rng(0)
    X, dZ = random.normal(size=(4, 7)), random.normal(size=(4, 2))
    limit = reference.consequential_gradient(X, dZ, 1e-14)
    np.testing.assert_allclose(reference.consequential_gradient(X, dZ, 0), limit, rtol=1e-10)


@pytest.mark.parametrize("side", [None, "samples", "features"])
@pytest.mark.parametrize(("samples", "features"), [(3, 6), (6, 3), (4, 4)])
def test_condition_number_is_that_of_the_damped_gram(samples, features, side):
    X = np.random.default_rng(1).normal(size=(samples, features))
    smaller = "samples" if samples <= features else "features"
    gram = X @ X.T if (side or smaller) == "samples" else X.T @ X
    expected = np.linalg.cond(gram + 0.1 * np.eye(len(gram)))
    assert reference.condition_number(X, 0.1, side) == pytest.approx(expected)


def test_condition_number_without_damping_leaves_zeros_out():
    assert reference.condition_number(np.diag([3.0, 1.0, 0.0]), 0) == pytest.approx(9)


def test_frozen_parameters_leave_the_solve():
    x = torch.tensor([[2.0]], dtype=torch.float64)
    module = torch.nn.Linear(1, 1, dtype=torch.float64)
    one = torch.ones(1, 1, dtype=torch.float64)
    both = reference.corrected_gradients(module, x, one, 1.0)
    assert [grad.item() for grad in both] == pytest.approx([2 / 6, 1 / 6])
    module.bias.requires_grad_(False)
    weight_grad, bias_grad = reference.corrected_gradients(module, x, one, 1.0)
    assert weight_grad.item() == pytest.approx(2 / 5)
    assert bias_grad is None
    module.bias.requires_grad_(True)
    module.weight.requires_grad_(False)
    weight_grad, bias_grad = reference.corrected_gradients(module, x, one, 1.0)
    assert weight_grad is None
    assert bias_grad.item() == pytest.approx(1 / 2)
