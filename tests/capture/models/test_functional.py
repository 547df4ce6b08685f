"""torch.func over an attached model: right numbers there, and nothing of it in the next step."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jacrev, vmap

import consequent
from models.expected import check_same, expected_backward, half_squares, twin_of


@pytest.fixture(params=[3, 20], ids=["few-samples", "many-samples"])
def setup(request):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    twin = twin_of(model)
    x = torch.randn(request.param, 6, dtype=torch.float64)
    return model, twin, x, consequent.CSGD(model, lr=0.1)


def check_step(model, twin, x, optimizer, between=lambda: None):
    between()
    half_squares(model(x)).backward()
    between()
    optimizer.step()
    expected_backward(twin, lambda m: half_squares(m(x)), len(x))
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    check_same(model, twin)


def per_sample_loss(model):
    def loss(parameters, sample):
        return half_squares(functional_call(model, parameters, (sample.unsqueeze(0),)))

    return loss


def detached(model):
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_per_sample_gradients(setup):
    model, twin, x, optimizer = setup

    def between():
        ours = vmap(grad(per_sample_loss(model)), (None, 0))(detached(model), x)
        for index, sample in enumerate(x):
            other = twin_of(twin)
            half_squares(other(sample.unsqueeze(0))).backward()
            for name, parameter in other.named_parameters():
                torch.testing.assert_close(ours[name][index], parameter.grad)

    check_step(model, twin, x, optimizer, between)


def test_jacobian_in_the_inputs(setup):
    model, twin, x, optimizer = setup

    def between():
        jacobian = vmap(jacrev(model))(x)
        expected = torch.stack([torch.autograd.functional.jacobian(twin, sample) for sample in x])
        torch.testing.assert_close(jacobian, expected)

    check_step(model, twin, x, optimizer, between)


def test_functional_call_with_other_parameters(setup):
    """Its backward pass goes to the other parameters, not to the model's."""
    model, twin, x, optimizer = setup

    def between():
        other = {name: (2 * p.detach()).requires_grad_() for name, p in model.named_parameters()}
        half_squares(functional_call(model, other, (3 * x,))).backward()
        twice = twin_of(twin)
        with torch.no_grad():
            for parameter in twice.parameters():
                parameter *= 2
        twice.zero_grad()
        half_squares(twice(3 * x)).backward()
        for name, parameter in twice.named_parameters():
            torch.testing.assert_close(other[name].grad, parameter.grad)

    check_step(model, twin, x, optimizer, between)


def test_functional_call_with_other_nn_parameters(setup):
    model, twin, x, optimizer = setup

    def between():
        other = {name: nn.Parameter(2 * p.detach()) for name, p in model.named_parameters()}
        half_squares(functional_call(model, other, (3 * x,))).backward()
        assert all(p.grad is not None for p in other.values())

    check_step(model, twin, x, optimizer, between)


def test_functional_call_with_the_parameters_themselves_is_a_pass_like_any_other(setup):
    model, twin, x, optimizer = setup
    half_squares(functional_call(model, dict(model.named_parameters()), (x,))).backward()
    optimizer.step()
    expected_backward(twin, lambda m: half_squares(m(x)), len(x))
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    check_same(model, twin)


@pytest.mark.parametrize("at", ["step", "backward"])
@pytest.mark.parametrize("in_container", [True, False])
def test_inputs_that_a_transform_has_left_behind(at, in_container):
    """They are wrapped still, although nobody transforms them any more."""
    data, left = torch.randn(4, 3), []

    def keeps_its_inputs(x):
        left.append(2 * x)
        return x.sum()

    grad(keeps_its_inputs)(data)
    layer = nn.Linear(3, 2)
    weights = []
    for inputs in (left[0], 2 * data):
        model = nn.Sequential(copy.deepcopy(layer)) if in_container else copy.deepcopy(layer)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        correction = consequent.attach(optimizer, model, at=at)
        model(inputs).square().mean().backward()
        optimizer.step()
        assert correction.samples == 4
        assert not correction.plain
        weights.append(next(model.parameters()).detach())
    torch.testing.assert_close(*weights)
