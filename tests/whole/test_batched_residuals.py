"""``WholeNetwork(…, batched=True)``: residuals of a whole batch, with derivatives by ``torch.autograd.grad``."""

import copy

import pytest
import torch
from residual_cases import CASES, batched_burgers, burgers, fit, perceptron, vector
from torch import nn

from consequent import WholeNetwork


@pytest.mark.parametrize(
    ("batched", "single"), [(batched_burgers, burgers), (lambda m, x: m(x) - x.sum(1).sin()[:, None], fit)]
)
def test_batched_is_the_same_as_one_by_one(batched, single):
    model = perceptron(2, 6, 5, 1).double()
    other, x = copy.deepcopy(model), torch.randn(12, 2).double()
    solvers = WholeNetwork(model, batched, batched=True), WholeNetwork(other, single)
    for _ in range(3):
        assert solvers[0].step(x) == pytest.approx(solvers[1].step(x))
    torch.testing.assert_close(vector(model), vector(other), rtol=1e-5, atol=1e-7)


def test_batched_with_samples_that_require_gradients_and_vmap_inside():
    model, nodes = perceptron(2, 6, 1).double(), torch.randn(12, 2).double()
    other, x = copy.deepcopy(model), torch.randn(12, 2).double().requires_grad_()

    def batched(model, x):
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return slope[:, 0] + torch.vmap(lambda node: model(x + node))(nodes).mean(0)[:, 0]

    def single(model, x):
        slope = torch.func.grad(lambda x: model(x).sum())(x)
        return slope[0] + torch.vmap(lambda node: model(x + node))(nodes).mean()

    solvers = WholeNetwork(model, batched, batched=True), WholeNetwork(other, single)
    for _ in range(3):
        assert solvers[0].step(x) == pytest.approx(solvers[1].step(x.detach()))
    torch.testing.assert_close(vector(model), vector(other), rtol=1e-5, atol=1e-7)


def test_batched_with_a_frozen_weight_and_a_trained_bias():
    model = perceptron(2, 6, 1).double()
    model[0].weight.requires_grad_(False)
    other, x = copy.deepcopy(model), torch.randn(12, 2).double()
    for one, residual, is_batched in ((model, lambda m, x: m(x), True), (other, lambda m, x: m(x), False)):
        WholeNetwork(one, residual, batched=is_batched).step(x)
    torch.testing.assert_close(vector(model), vector(other))


def test_switching_to_training_is_noticed():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).eval()
    model[1].requires_grad_(False)
    solver = WholeNetwork(model, lambda m, x: m(x), batched=True)
    solver.step(torch.ones(4, 2))
    model.train()
    with pytest.raises(ValueError, match=r"BatchNorm, call model\.eval"):
        solver.step(torch.ones(4, 2))


def test_batched_refuses_parameters_outside_of_linear_layers():
    model = CASES["a coefficient"][0]().double()
    solver = WholeNetwork(model, lambda model, x: model.coefficient * model(x), batched=True)
    with pytest.raises(ValueError, match=r"uses a tensor of shape \[\] .* only linear layers are trained"):
        solver.step(torch.randn(4, 2).double())


def second_by_batched_grads(model, x):
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    ones = torch.eye(2)[:, None].expand(2, len(x), 2).to(x)
    (second,) = torch.autograd.grad(slope, x, ones, create_graph=True, is_grads_batched=True)
    return second[0, :, 0] + second[1, :, 1] + model(x)[:, 0]


@pytest.mark.parametrize(
    ("residual", "message"),
    [
        (lambda model, x: model(torch.cat([x, x]))[: len(x)], "called with .* rows for .* samples"),
        (lambda model, x: model(x).sum(), r"returned the shape \[\] for"),
        (
            lambda model, x: model(x) - model(x).mean(),
            "alone and .* among others .*, or its gradient is. Does it mix samples",
        ),
        (
            lambda model, x: model(x) + 0.01 * model(x).mean(),
            "alone and .* among others .*, or its gradient is. Does it mix samples",
        ),
        (lambda model, x: model(x) - x[:, 0], r"add \[n, 1\] to \[n\]"),
        (lambda model, x: model(x.flip(0)).flip(0), "change their order"),
        (lambda model, x: torch.dropout(model(x), 0.5, True), "For dropout"),
        (second_by_batched_grads, "is_grads_batched=True"),
    ],
)
def test_batched_refuses_what_mixes_samples(residual, message):
    with pytest.raises(ValueError, match=message):
        WholeNetwork(perceptron(2, 3, 1).double(), residual, batched=True).step(torch.randn(16, 2).double())
