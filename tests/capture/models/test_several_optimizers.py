"""Several optimisers on one model, each attached by itself; one optimiser over two models."""

import pytest
import torch
from torch import nn

import consequent
from models.expected import check_same, expected_backward, half_squares, twin_of


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def split(model):
    """Two lists of parameters, of whole layers."""
    return list(model[0].parameters()), list(model[2].parameters())


@pytest.mark.parametrize("samples", [3, 20])
def test_two_attached_optimizers(samples):
    """Each solves for its own parameters, as if the other's were frozen; N is the same for both."""
    model = make_model()
    twin = twin_of(model)
    x = torch.randn(samples, 6, dtype=torch.float64)
    first, second = (torch.optim.SGD(p, lr=lr) for p, lr in zip(split(model), (0.1, 0.02), strict=True))
    consequent.attach(first, model, damping=0.01)
    consequent.attach(second, model, damping=0.5)
    plain = [torch.optim.SGD(p, lr=lr) for p, lr in zip(split(twin), (0.1, 0.02), strict=True)]
    for _ in range(2):
        first.zero_grad()
        second.zero_grad()
        half_squares(model(x)).backward()
        first.step()
        second.step()
        twin.zero_grad()
        weights = twin_of(twin)
        gradients = {}
        for part, damping in zip(split(twin), (0.01, 0.5), strict=True):
            twin.zero_grad()
            held = set(part)
            expected_backward(twin, lambda m: half_squares(m(x)), samples, damping, trains=held.__contains__)
            gradients |= {p: p.grad for p in part}
        check_same(twin, weights, rtol=0, atol=0)
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        for optimizer in plain:
            optimizer.step()
        check_same(model, twin)


def test_only_one_of_two_optimizers_is_attached():
    model = make_model()
    twin = twin_of(model)
    x = torch.randn(4, 6, dtype=torch.float64)
    body, head = torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.SGD(model[2].parameters(), lr=0.1)
    correction = consequent.attach(body, model)
    half_squares(model(x)).backward()
    body.step()
    head.step()
    expected_backward(twin, lambda m: half_squares(m(x)), 4, layers=[twin[0]])
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    check_same(model, twin)
    assert list(correction.corrected) == ["0"]
    assert "optimi" in correction.plain["2"]


def test_steps_of_two_optimizers_after_backward_passes_of_their_own():
    """Alternating: a pass and a step for the body, a pass and a step for the head."""
    model = make_model()
    twin = twin_of(model)
    x = torch.randn(4, 6, dtype=torch.float64)
    optimizers = [torch.optim.SGD(p, lr=0.1) for p in split(model)]
    for optimizer in optimizers:
        consequent.attach(optimizer, model)
    for turn in (0, 1, 0):
        model.zero_grad()
        half_squares(model(x)).backward()
        optimizers[turn].step()
        twin.zero_grad()
        held = set(split(twin)[turn])
        expected_backward(twin, lambda m: half_squares(m(x)), 4, trains=held.__contains__)
        torch.optim.SGD(held, lr=0.1).step()
        check_same(model, twin)


@pytest.mark.parametrize("samples", [(3, 20), (20, 3), (4, 4)])
def test_one_optimizer_over_two_models(samples):
    """Attached twice, each with its own model: each has its own N and λ."""
    models = [make_model(), nn.Sequential(nn.Conv1d(2, 2, 3), nn.Flatten(), nn.Linear(6, 1)).double()]
    twins = [twin_of(model) for model in models]
    inputs = [torch.randn(samples[0], 6).double(), torch.randn(samples[1], 2, 5).double()]
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)
    plain = torch.optim.SGD([p for twin in twins for p in twin.parameters()], lr=0.1)
    for model, damping in zip(models, (0.01, 0.3), strict=True):
        consequent.attach(optimizer, model, damping=damping)
    for _ in range(2):
        optimizer.zero_grad()
        plain.zero_grad()
        for model, twin, x, damping in zip(models, twins, inputs, (0.01, 0.3), strict=True):
            half_squares(model(x)).backward()
            expected_backward(twin, lambda m, x=x: half_squares(m(x)), len(x), damping)
        optimizer.step()
        plain.step()
    for model, twin in zip(models, twins, strict=True):
        check_same(model, twin)


def test_one_optimizer_over_two_models_of_which_one_is_used():
    models = [make_model(), make_model()]
    twins = [twin_of(model) for model in models]
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)
    for model in models:
        consequent.attach(optimizer, model)
    x = torch.randn(3, 6, dtype=torch.float64)
    half_squares(models[1](x)).backward()
    optimizer.step()
    expected_backward(twins[1], lambda m: half_squares(m(x)), 3)
    torch.optim.SGD(twins[1].parameters(), lr=0.1).step()
    check_same(models[0], twins[0], rtol=0, atol=0)
    check_same(models[1], twins[1])


def test_an_optimizer_that_is_thrown_away_no_longer_matters():
    model = make_model()
    twin = twin_of(model)
    x = torch.randn(3, 6, dtype=torch.float64)
    old = consequent.CSGD(model, lr=0.5, damping=7.0)
    half_squares(model(x)).backward()
    model.zero_grad()
    del old
    optimizer = consequent.CSGD(model, lr=0.1)
    half_squares(model(x)).backward()
    optimizer.step()
    expected_backward(twin, lambda m: half_squares(m(x)), 3)
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    check_same(model, twin)
    assert len(model._forward_hooks) == len(model._forward_pre_hooks) == 1
    optimizer.correction.detach()
    assert type(model[0]) is nn.Linear  # nobody watches any more, the old one neither
