"""``torch.autograd.grad``: of inputs, of weights, and gradients that can be differentiated again."""

import pytest
import torch
from loop.expected import DAMPING, KINDS, assert_close, build, corrected, gradients, loss_on, mean_loss, twin
from torch import nn

import consequent
from at_backward.expected import start


def test_gradients_of_inputs_cost_no_solve(solves):
    model, x, t, *_kept, correction = start("wide")
    x.requires_grad_()
    (grad,) = torch.autograd.grad(mean_loss(model(x), t), x)
    (expected,) = torch.autograd.grad(mean_loss(twin(model)(x), t), x)
    torch.testing.assert_close(grad, expected)
    mean_loss(model(x), t).backward(inputs=[x])
    torch.testing.assert_close(x.grad, expected)
    assert solves == []
    assert gradients(model) == {}
    assert correction.counters.steps == 0


def test_an_adversarial_batch_is_no_part_of_the_pass():
    model, x, t, *_kept = start("wide")
    x.requires_grad_()
    (grad,) = torch.autograd.grad(mean_loss(model(x), t), x)
    moved = (x + 0.1 * grad.sign()).detach()
    mean_loss(model(moved), t).backward()
    assert_close(gradients(model), corrected(model, loss_on(moved, t), samples=len(x)))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_weights_are_corrected_and_returned(kind):
    model, x, t, *_kept, correction = start(kind)
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(mean_loss(model(x), t), parameters)
    assert_close(dict(zip(names, found, strict=True)), corrected(model, loss_on(x, t), samples=len(x)))
    assert gradients(model) == {}
    assert (correction.samples, correction.counters.steps) == (len(x), 1)


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_part_of_the_gradients_is_the_part_of_all(kind, name, solves):
    model, x, t, *_kept = start(kind)
    expected = corrected(model, loss_on(x, t), samples=len(x))[f"0.{name}"]
    (found,) = torch.autograd.grad(mean_loss(model(x), t), getattr(model[0], name))
    assert_close({"": found}, {"": expected})
    mean_loss(model(x), t).backward(inputs=[getattr(model[0], name)])
    assert_close(gradients(model), {f"0.{name}": expected})
    assert solves == [model[0], model[0]]


def test_gradients_of_inputs_and_weights_at_once():
    model, x, t, *_kept = start("wide")
    x.requires_grad_()
    grad, weight_grad = torch.autograd.grad(mean_loss(model(x), t), [x, model[2].weight])
    (expected,) = torch.autograd.grad(mean_loss(twin(model)(x), t), x)
    torch.testing.assert_close(grad, expected)
    whole = corrected(model, loss_on(x.detach(), t), samples=len(x))
    assert_close({"": weight_grad}, {"": whole["2.weight"]})


def pure_gradients(parameters, x, t, damping=DAMPING):
    """The corrected gradients of Linear, tanh, Linear as a function of its parameters, and what it went through."""
    w1, b1, w2, b2 = parameters
    ones = x.new_ones(len(x), 1)
    z1 = x @ w1.T + b1
    h = torch.tanh(z1)
    z2 = h @ w2.T + b2
    d2 = (z2 - t) / len(x)
    d1 = (d2 @ w2) * (1 - h**2)
    g1 = len(x) * consequent.consequential_gradient(torch.cat([x, ones], 1), d1, damping)
    g2 = len(x) * consequent.consequential_gradient(torch.cat([h, ones], 1), d2, damping)
    return g1[:, :-1], g1[:, -1], g2[:, :-1], g2[:, -1]


def two_layers(sizes):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(sizes[0], sizes[1]), nn.Tanh(), nn.Linear(sizes[1], 2)).double()
    return model, torch.randn(4, sizes[0]).double(), torch.randn(4, 2).double()


SIDES = [(7, 6), (2, 2)]  # four samples: by samples, by features


@pytest.mark.parametrize("sizes", SIDES)
def test_the_corrected_step_can_be_differentiated(sizes):
    """MAML: how the loss after a corrected step depends on its learning rate, its inputs and its targets."""
    model, x, t = two_layers(sizes)
    x2, t2 = torch.randn_like(x), torch.randn_like(t)
    parameters, lr = [*model.parameters()], torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    x.requires_grad_()
    t.requires_grad_()
    consequent.Consequentialism(model, damping=DAMPING, at="backward")

    def after_step(grads):
        w1, b1, w2, b2 = (p.detach() - lr * g for p, g in zip(parameters, grads, strict=True))
        return mean_loss(torch.tanh(x2 @ w1.T + b1) @ w2.T + b2, t2)

    grads = torch.autograd.grad(mean_loss(model(x), t), parameters, create_graph=True)
    pure = pure_gradients([p.detach() for p in parameters], x, t)
    for grad, expected in zip(grads, pure, strict=True):
        torch.testing.assert_close(grad, expected, rtol=1e-9, atol=1e-12)
    found = torch.autograd.grad(after_step(grads), [lr, x, t])
    expected = torch.autograd.grad(after_step(pure), [lr, x, t])
    for actual, wanted in zip(found, expected, strict=True):
        assert wanted.norm() > 1e-6
        torch.testing.assert_close(actual, wanted, rtol=1e-8, atol=1e-11)
    assert gradients(model) == {}


@pytest.mark.parametrize("features", [7, 2])
def test_the_weights_before_a_differentiable_step(features):
    """They act in the step's end directly, which is plain, and in the inner loss by a product, which is corrected."""
    torch.manual_seed(0)
    layer, x, t = (
        nn.Linear(features, 2, bias=False).double(),
        torch.randn(4, features).double(),
        torch.randn(4, 2).double(),
    )
    x2, t2 = torch.randn_like(x), torch.randn_like(t)
    consequent.Consequentialism(layer, damping=DAMPING, at="backward")
    (inner,) = torch.autograd.grad(mean_loss(torch.tanh(layer(x)), t), layer.weight, create_graph=True)
    mean_loss(x2 @ (layer.weight - 0.3 * inner).T, t2).backward()

    weight = layer.weight.detach().clone().requires_grad_()
    z = (x @ weight.detach().T).requires_grad_()
    (dz,) = torch.autograd.grad(mean_loss(torch.tanh(z), t), z, create_graph=True)
    pure = len(x) * consequent.consequential_gradient(x, dz, DAMPING)
    directly, through_product = torch.autograd.grad(mean_loss(x2 @ (weight - 0.3 * pure).T, t2), [weight, z])
    expected = directly + len(x) * consequent.consequential_gradient(x, through_product, DAMPING)
    torch.testing.assert_close(inner, pure)
    torch.testing.assert_close(layer.weight.grad, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_differentiable_gradients_are_the_others(kind):
    model, x, t, *_kept = start(kind)
    parameters = [*model.parameters()]
    plain = torch.autograd.grad(mean_loss(model(x), t), parameters)
    found = torch.autograd.grad(mean_loss(model(x), t), parameters, create_graph=True)
    for grad, expected in zip(found, plain, strict=True):
        assert grad.requires_grad
        torch.testing.assert_close(grad, expected, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("damping", [0.0, "relative"])
@pytest.mark.parametrize("kind", KINDS)
def test_differentiable_gradients_with_other_dampings(kind, damping):
    model, x, t = build(kind)
    options = {"relative_damping": 0.1} if damping == "relative" else {"damping": damping}
    consequent.Consequentialism(model, at="backward", **options)
    parameters = [*model.parameters()]
    plain = torch.autograd.grad(mean_loss(model(x), t), parameters)
    found = torch.autograd.grad(mean_loss(model(x), t), parameters, create_graph=True)
    for grad, expected in zip(found, plain, strict=True):
        torch.testing.assert_close(grad, expected, rtol=1e-6, atol=1e-9)
