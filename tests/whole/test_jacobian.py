"""The Jacobian that is not formed, against plain backward passes."""

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from residual_cases import CASES, fit, laplacian, made, naive_jacobian, perceptron

from consequent.whole import jacobian as module
from consequent.whole import residuals
from consequent.whole.jacobian import Jacobian
from consequent.whole.residuals import Residual


def jacobian_of(model, residual, x, parts=1):
    rows = [one for some in x.chunk(parts) for one in Residual("", residual, model, False).rows([some], 4.0)]
    return Jacobian(rows, {name: p.numel() for name, p in model.named_parameters() if p.requires_grad})


def check(found, values, J, samples, parts=1):
    """The rows of J are a sample's components; those that are found are a component's samples, part by part."""
    scale = (4 * samples / len(values)) ** 0.5
    order = torch.cat([some.T.flatten() for some in torch.arange(len(values)).view(samples, -1).chunk(parts)])
    values, J = scale * values[order], scale * J[order]
    torch.testing.assert_close(found.values, values)
    torch.testing.assert_close(found.smaller_system().tril(), (J @ J.T if found.is_wide else J.T @ J).tril())
    vector = torch.randn(len(values), dtype=J.dtype)
    torch.testing.assert_close(found.transposed_times(vector), J.T @ vector)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("samples", [5, 60])  # fewer residuals than parameters, and more
def test_it_is_that_of_backward_passes(name, samples):
    model, residual, x = made(name, samples)
    check(jacobian_of(model, residual, x), *naive_jacobian(model, residual, x), len(x))


@pytest.mark.parametrize("cost", [-1e9, 1e9])  # products of inputs and of gradients for all weights, or for none
@pytest.mark.parametrize("name", ["wide", "Laplacian", "regression, three outputs", "shared, tied, normed"])
def test_both_ways_to_multiply(name, cost, monkeypatch):
    monkeypatch.setattr(module, "COST_OF_MEMORY", cost)
    monkeypatch.setattr(module, "TILE", 4)
    model, residual, x = made(name)
    check(jacobian_of(model, residual, x, 2), *naive_jacobian(model, residual, x), len(x), 2)


def test_wide_layers_are_multiplied_without_the_jacobian():
    parts = jacobian_of(*made("wide")).tiles[0].parts
    found = [name for name, part in parts.items() if module.is_cheaper_by_products(part)]
    assert found == ["0.weight", "2.weight"]  # the last one has 40 columns and one row


def test_frozen_parameters_have_no_columns():
    model, residual, x = made("Laplacian")
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    check(jacobian_of(model, residual, x), *naive_jacobian(model, residual, x), len(x))


@settings(deadline=None, max_examples=25)
@given(
    widths=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    samples=st.integers(1, 12),
    parts=st.integers(1, 3),
    derived=st.booleans(),
)
def test_random_networks(widths, samples, parts, derived):
    model = perceptron(2, *widths, 1).double()
    x, residual = torch.randn(samples, 2, dtype=torch.float64), laplacian if derived else fit
    check(jacobian_of(model, residual, x, parts), *naive_jacobian(model, residual, x), len(x), parts)


def test_nothing_is_kept_alive(monkeypatch):
    model, residual, x = made("Laplacian")
    kept = []

    class Seen(residuals.Weight):
        def __init__(self, matrix):
            super().__init__(matrix)
            kept.append(weakref.ref(self))

    monkeypatch.setattr(residuals, "Weight", Seen)
    jacobian_of(model, residual, x)
    gc.collect()
    assert kept
    assert not [one for one in kept if one() is not None]
