"""The bound on how much a step of SGD changes a layer's outputs, against a computation with explicit matrices."""

import copy
import math

import pytest
import reference
import torch
from expected import Watched
from torch import nn

import consequent

OWN, AVERAGES = {}, {"averaging": 0.95}
MECHANISMS = pytest.mark.parametrize("options", [OWN, AVERAGES], ids=["own inputs", "averages"])


def network(kind):
    torch.manual_seed(0)
    if kind == "dense, few rows":
        model, x = nn.Sequential(nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 9, bias=False)), torch.randn(8, 30)
    elif kind == "dense, many rows":
        model, x = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)), torch.randn(40, 6)
    else:
        model, x = nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.ReLU(), nn.Conv2d(6, 2, 2)), torch.randn(5, 4, 7, 7)
    return model.double(), x.double()


KINDS = ("dense, few rows", "dense, many rows", "convolutions")


def half_squares(outputs):
    return outputs.square().sum() / 2 / len(outputs)


def expected_shortenings(model, x, rho, rate, bound):
    """The factor of each layer: ``μ √(⟨U, G⟩ / O) ≤ β √(trace / D)``, U and G being those of the summed loss."""
    watched = Watched(model)
    half_squares(watched.model(x)).backward()
    factors = {}
    for name, ((inputs, grad),) in watched.calls.items():
        layer = watched.model.get_submodule(name)
        designs, grads = reference.design_matrices(layer, inputs), reference.output_rows(layer, grad)
        energy = trace = 0.0
        for X, dZ in zip(designs, grads, strict=True):
            G = dZ.T @ X
            energy += float((reference.consequential_gradient(X, dZ, ("relative", rho)) * G).sum())
            trace += float((X**2).sum())
        change = rate * len(x) * math.sqrt(energy / reference.outputs_of(layer))
        allowed = bound * math.sqrt(trace / (designs[0].shape[1] * len(designs)))
        factors[name] = min(1.0, allowed / change)
    return factors


def step_grads(model, x, optimizer, **options):
    correction = consequent.attach(optimizer, model, **options)
    optimizer.zero_grad()
    half_squares(model(x)).backward()
    optimizer.step()
    correction.detach()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@MECHANISMS
@pytest.mark.parametrize("momentum", [{}, {"momentum": 0.9, "nesterov": True}], ids=str)
@pytest.mark.parametrize("rate", [0.01, 0.3, 5.0])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_shortened_by_what_the_definition_says(kind, rate, momentum, options):
    model, x = network(kind)
    factors = expected_shortenings(model, x, 0.1, rate / (1 - momentum.get("momentum", 0.0)), 0.2)
    free = step_grads(model, x, torch.optim.SGD(model.parameters(), lr=0.0), bound=None, **options)
    bounded = step_grads(model, x, torch.optim.SGD(model.parameters(), lr=rate, **momentum), **options)
    for name, grad in bounded.items():
        torch.testing.assert_close(grad, free[name] * factors[name.split(".")[0]], rtol=1e-6, atol=1e-12)
    assert any(factor < 1 for factor in factors.values()) or rate < 5.0


@MECHANISMS
def test_where_nothing_is_wrong_it_changes_no_bit(options):
    model, x = network("dense, few rows")
    free = step_grads(model, x, torch.optim.SGD(model.parameters(), lr=0.0), bound=None, **options)
    found = step_grads(model, x, torch.optim.SGD(model.parameters(), lr=1e-3), **options)
    assert all(torch.equal(found[name], grad) for name, grad in free.items())


@MECHANISMS
def test_one_layer_alone_lands_on_its_targets(options):
    torch.manual_seed(0)
    model, x = nn.Linear(30, 4).double(), torch.randn(8, 30, dtype=torch.float64)
    step_grads(model, x, torch.optim.SGD(model.parameters(), lr=1.0), damping=1e-6, **options)
    assert model(x).abs().max() < 1e-5


@MECHANISMS
def test_it_is_about_what_is_applied(options):
    """A scaled loss that is unscaled, and clipping, come before the bound."""
    model, x = network("dense, many rows")
    twin = copy.deepcopy(model)
    grads = step_grads(model, x, torch.optim.SGD(model.parameters(), lr=2.0), **options)
    optimizer = torch.optim.SGD(twin.parameters(), lr=2.0)
    consequent.attach(optimizer, twin, **options)
    (1024 * half_squares(twin(x))).backward()
    for p in twin.parameters():
        p.grad /= 1024
    optimizer.step()
    for name, p in twin.named_parameters():
        torch.testing.assert_close(p.grad, grads[name], rtol=1e-6, atol=1e-12)


@MECHANISMS
def test_adam_is_not_bounded(options):
    model, x = network("dense, few rows")
    free = step_grads(model, x, torch.optim.Adam(model.parameters(), lr=0.0), bound=None, **options)
    found = step_grads(model, x, torch.optim.Adam(model.parameters(), lr=100.0), **options)
    assert all(torch.equal(found[name], grad) for name, grad in free.items())
    with pytest.raises(ValueError, match=r"bound=0\.5 would do nothing under Adam"):
        consequent.attach(torch.optim.Adam(model.parameters()), model, bound=0.5)


@MECHANISMS
def test_a_rate_far_too_high_ends_in_no_explosion(options):
    torch.manual_seed(0)
    model = nn.Sequential(*[part for _ in range(5) for part in (nn.Linear(20, 20), nn.ReLU())], nn.Linear(20, 3))
    x = torch.randn(16, 20)
    optimizer = torch.optim.SGD(model.parameters(), lr=30.0)
    consequent.attach(optimizer, model, **options)
    for _ in range(50):
        optimizer.zero_grad()
        half_squares(model(x)).backward()
        optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())


def test_several_micro_batches_are_bounded_by_their_sum():
    """The mean of how much each pass's gradient changes its outputs, times the length of what is applied."""
    model, x = network("dense, few rows")
    changes, twin = {"0": [], "2": []}, copy.deepcopy(model)
    for half in x.split(4):
        watched = Watched(model)
        (half_squares(watched.model(half)) / 2).backward()
        for name, ((inputs, grad),) in watched.calls.items():
            layer = watched.model.get_submodule(name)
            ((X,), (dZ,)) = reference.design_matrices(layer, inputs), reference.output_rows(layer, grad)
            U = reference.consequential_gradient(X, dZ, ("relative", 0.1))
            energy, columns = (U * (dZ.T @ X)).sum(), X.shape[1]
            changes[name].append(energy / (U**2).sum() / (X**2).sum() * columns / dZ.shape[1])
    rate = 30.0
    optimizer = torch.optim.SGD(twin.parameters(), lr=rate)
    consequent.attach(optimizer, twin)
    for half in x.split(4):
        (half_squares(twin(half)) / 2).backward()
    before = {name: [p.grad.clone() for p in twin.get_submodule(name).parameters()] for name in changes}
    optimizer.step()
    for name, grads in before.items():
        length = math.sqrt(sum(float(grad.square().sum()) for grad in grads))
        factor = min(1.0, 0.2 / (rate * length * math.sqrt(sum(changes[name]) / 2)))
        assert factor < 1
        for p, grad in zip(twin.get_submodule(name).parameters(), grads, strict=True):
            torch.testing.assert_close(p.grad, factor * grad, rtol=1e-6, atol=1e-12)


def held(optimizer, model, x):
    """By how much each layer's outputs change in one step, of its inputs' size, if the others stood still."""
    before = copy.deepcopy(model)
    half_squares(model(x)).backward()
    optimizer.step()
    changes, h = {}, x
    for name, layer in before.named_children():
        if isinstance(layer, nn.Linear):
            with torch.no_grad():
                step = model.get_submodule(name)(h) - layer(h)
            inputs = torch.cat([h, torch.ones_like(h[:, :1])], dim=1)
            changes[name] = float((step.square().mean() / inputs.square().mean()).sqrt())
        h = layer(h).detach()
    return changes


@MECHANISMS
@pytest.mark.parametrize("case", ["thawed", "a bias with a higher rate", "dampening"])
def test_no_step_exceeds_it(case, options):
    model, x = network("dense, many rows")
    if case == "thawed":
        model[0].requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    biases, weights = [p for p in trained if p.ndim == 1], [p for p in trained if p.ndim > 1]
    rates = (10.0, 1000.0) if case == "a bias with a higher rate" else (100.0, 100.0)
    momentum = {"momentum": 0.9, "dampening": 0.9} if case == "dampening" else {}
    groups = [{"params": weights, "lr": rates[0]}, {"params": biases, "lr": rates[1]}]
    optimizer = torch.optim.SGD(groups, lr=1.0, **momentum)
    consequent.attach(optimizer, model, **options)
    if case == "thawed":
        model[0].requires_grad_(True)
        optimizer.add_param_group({"params": model[0].parameters(), "lr": 100.0})
    limit = 0.02 if case == "dampening" else 0.2  # the first gradient moves ten times as far in the long run
    changes = held(optimizer, model, x).values()
    assert max(changes) <= limit * (1 + 1e-6)
    assert min(changes) > 0.8 * limit or case == "a bias with a higher rate"  # it is no shorter than it need be


def test_passes_of_zeros_are_none():
    model, x = network("dense, few rows")
    grads = []
    for zeros in (0, 3):
        twin = copy.deepcopy(model)
        optimizer = torch.optim.SGD(twin.parameters(), lr=30.0)
        consequent.attach(optimizer, twin)
        half_squares(twin(x)).backward()
        for _ in range(zeros):
            (0 * half_squares(twin(x))).backward()
        optimizer.step()
        grads.append([p.grad for p in twin.parameters()])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)
