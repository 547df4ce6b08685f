"""Corrected gradients of every layer case × λ × dtype against the naive reference, within 10·eps·κ(Gram + λI)."""

import numpy as np
import pytest
import reference
import torch
from cases import CASES, DAMPINGS, DTYPES, build, check_error, random_like, second_moment, skip_if_silent
from expected import check_same_grads, grads_of, own_inputs_grads
from torch import nn

import consequent

WITH_BIAS = [name for name in CASES if reference.bias_of(build(name)[0]) is not None]


def corrected(name, dtype, damping, frozen=None, averaging=0.0):
    """The layer after backward pass and step; the loss is linear in the output, so ΔZ is known exactly."""
    layer, x = build(name, dtype)
    if frozen is not None:
        getattr(layer, frozen).requires_grad_(False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    options = reference.damping_options(damping)
    consequent.attach(optimizer, layer, loss_reduction="sum", averaging=averaging, **options)
    output = layer(x)
    (output * random_like(output, name)).sum().backward()
    optimizer.step()
    return layer, x, random_like(output, name)


def check_gradients(layer, x, output_grad, damping, dtype, side=None):
    """One comparison for each group, weight and bias together as they are solved; whether all of them could tell."""
    bias = reference.bias_of(layer)
    grads = [None if p is None or p.grad is None else reference.to_numpy(p.grad) for p in (layer.weight, bias)]
    told = True
    designs, rows = reference.design_matrices(layer, x), reference.output_rows(layer, output_grad)
    for matrix, X, dZ in zip(reference.gradient_matrices(layer, *grads), designs, rows, strict=True):
        expected = reference.consequential_gradient(X, dZ, damping)
        told &= check_error(matrix, expected, reference.condition_number(X, damping, side), dtype)
    return told


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("damping", [DAMPINGS[1], DAMPINGS[3], ("relative", 0.1)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_own_inputs(name, damping, dtype):
    layer, x, output_grad = corrected(name, dtype, damping)
    assert layer.weight.grad.dtype == dtype
    skip_if_silent(check_gradients(layer, x, output_grad, damping, dtype))


@pytest.mark.parametrize("name", CASES)
def test_averages_at_their_first_step_are_the_same(name):
    damping = ("relative", 0.1)
    layer, x, output_grad = corrected(name, torch.float64, damping, averaging=0.9)
    assert check_gradients(layer, x, output_grad, damping, torch.float64, "features")


@pytest.mark.parametrize("name", CASES)
def test_no_damping_is_the_pseudo_inverse(name):
    layer, x, output_grad = corrected(name, torch.float64, 0.0)
    designs, rows = reference.design_matrices(layer, x), reference.output_rows(layer, output_grad)
    grads = [None if p is None else reference.to_numpy(p.grad) for p in (layer.weight, reference.bias_of(layer))]
    for matrix, X, dZ in zip(reference.gradient_matrices(layer, *grads), designs, rows, strict=True):
        expected = dZ.T @ np.linalg.pinv(X, rcond=1e-7).T
        assert reference.relative_error(matrix, expected) <= 1e-13 * np.linalg.cond(X) ** 2 + 1e-6


@pytest.mark.parametrize("averaging", [0.0, 0.9], ids=["own inputs", "averages"])
@pytest.mark.parametrize("name", WITH_BIAS)
def test_a_frozen_bias_leaves_the_solve(name, averaging):
    layer, x, output_grad = corrected(name, torch.float64, 0.01, "bias", averaging)
    assert layer.bias.grad is None
    side = "features" if averaging else None
    assert check_gradients(layer, x, output_grad, 0.01, torch.float64, side)


@pytest.mark.parametrize("averaging", [0.0, 0.9], ids=["own inputs", "averages"])
@pytest.mark.parametrize("name", ["linear-wide", "conv2d", "transposed1d"])
def test_beside_a_frozen_weight_the_bias_stays_plain(name, averaging):
    layer, x, output_grad = corrected(name, torch.float64, 0.01, "weight", averaging)
    plain, _ = build(name, torch.float64)
    (plain(x) * output_grad).sum().backward()
    assert layer.weight.grad is None
    torch.testing.assert_close(layer.bias.grad, plain.bias.grad)


@pytest.mark.parametrize("ones", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_second_moments(name, dtype, ones):
    """The Gram matrix of the rows, per group, exact up to rounding."""
    layer, x = build(name, dtype)
    actual = second_moment(layer, x, ones=ones)
    assert actual.dtype == dtype
    for moment, rows in zip(actual, reference.input_rows(layer, x), strict=True):
        X = np.concatenate([rows, np.ones((len(rows), 1))], axis=1) if ones else rows
        assert check_error(moment, X.T @ X, 1.0, dtype)


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_input_gradients_are_those_of_the_plain_layer(name):
    layer, x = build(name)
    plain, _ = build(name)
    consequent.attach(torch.optim.SGD(layer.parameters(), lr=0.1), layer)
    results = []
    for one in (layer, plain):
        inputs = x.clone().requires_grad_()
        output = one(inputs)
        (output * random_like(output, name)).sum().backward()
        results.append((output, inputs.grad))
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("loss_reduction", "divisor"),
    [("mean", 8), ("sum", 1), (7.0, 7), (lambda samples: 3 * samples, 24)],
    ids=["mean", "sum", "number", "function"],
)
def test_a_network_layer_by_layer(loss_reduction, divisor):
    """Each layer is corrected with its own input and its own ΔZ, times the loss's divisor; the norm stays plain."""
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

    def run(model):
        nn.functional.cross_entropy(model(x), targets).backward()

    expected = own_inputs_grads(network, run, 0.01, divisor)
    optimizer = torch.optim.Adam(network.parameters())
    consequent.attach(optimizer, network, damping=0.01, loss_reduction=loss_reduction)
    run(network)
    check_same_grads(grads_of(network), expected)


def test_an_output_size_that_is_asked_for():
    torch.manual_seed(0)
    layer = nn.ConvTranspose2d(2, 3, 3, stride=3).double()
    x = torch.randn(2, 2, 2, 3, dtype=torch.float64)
    plain = nn.ConvTranspose2d(2, 3, 3, stride=3, output_padding=(1, 2)).double()
    plain.load_state_dict(layer.state_dict())
    for one in (layer, plain):
        consequent.attach(torch.optim.SGD(one.parameters(), lr=0.1), one, damping=0.1, loss_reduction="sum")
    for size in ([7, 11], (2, 3, 7, 11)):
        layer.zero_grad()
        plain.zero_grad()
        outputs, expected = layer(x, output_size=size), plain(x)
        torch.testing.assert_close(outputs, expected)
        outputs.square().sum().backward()
        expected.square().sum().backward()
        torch.testing.assert_close(layer.weight.grad, plain.weight.grad)
    with pytest.raises(ValueError, match="output size"):
        layer(x, output_size=[20, 20])


def test_the_conv1d_of_transformers():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    theirs, linear = transformers.pytorch_utils.Conv1D(3, 5).double(), nn.Linear(5, 3).double()
    with torch.no_grad():
        linear.weight.copy_(theirs.weight.T)
        linear.bias.copy_(theirs.bias)
    for samples in (4, 20):
        x = torch.randn(samples, 5, dtype=torch.float64)
        for averaging in (0.0, 0.9):
            for layer in (theirs, linear):
                optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
                correction = consequent.attach(optimizer, layer, averaging=averaging)
                optimizer.zero_grad()
                layer(x).square().mean().backward()
                optimizer.step()
                correction.detach()
            torch.testing.assert_close(theirs.weight.grad.T, linear.weight.grad)
            torch.testing.assert_close(theirs.bias.grad, linear.bias.grad)
