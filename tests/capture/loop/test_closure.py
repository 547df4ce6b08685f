"""``step(closure)``."""

import pytest
import torch
from loop.expected import DAMPING, LR, assert_close, assert_stepped, build, corrected, gradients, loss_on, weights
from torch import nn

import consequent


@pytest.mark.parametrize("kind", ["wide", "conv", "tall"])
@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("zero_inside", [True, False])
def test_sgd_with_a_closure(kind, by_name, zero_inside):
    model, x, t = build(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    consequent.attach(optimizer, model, damping=DAMPING)

    def closure():
        if zero_inside:
            optimizer.zero_grad()
        loss = loss_on(x, t)(model)
        loss.backward()
        return loss

    for _ in range(3):
        before, grads = weights(model), corrected(model, loss_on(x, t), samples=len(x))
        value = loss_on(x, t)(model).detach()
        if not zero_inside:
            optimizer.zero_grad()
        returned = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
        assert float(returned.detach()) == pytest.approx(float(value))
        assert_close(gradients(model), grads)
        assert_stepped(model, before, grads)


@pytest.mark.parametrize("kind", ["wide", "conv"])
def test_adam_with_a_closure(kind):
    model, x, t = build(kind)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    consequent.attach(optimizer, model, damping=DAMPING)
    mean, square = {}, {}

    def closure():
        optimizer.zero_grad()
        loss = loss_on(x, t)(model)
        loss.backward()
        return loss

    for step in range(1, 4):
        before, grads = weights(model), corrected(model, loss_on(x, t), samples=len(x))
        mean = {n: 0.9 * mean.get(n, 0) + 0.1 * g for n, g in grads.items()}
        square = {n: 0.999 * square.get(n, 0) + 0.001 * g**2 for n, g in grads.items()}
        moves = {n: mean[n] / (1 - 0.9**step) / ((square[n] / (1 - 0.999**step)).sqrt() + 1e-8) for n in grads}
        optimizer.step(closure)
        assert_stepped(model, before, moves, lr=0.01, tolerance=1e-6)


@pytest.mark.parametrize("kind", ["wide", "conv"])
def test_lbfgs_is_refused_and_stays_plain(kind):
    model, x, t = build(kind)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=LR, max_iter=1)
    with pytest.raises(TypeError, match="LBFGS"):
        consequent.attach(optimizer, model, damping=DAMPING)
    before = weights(model)
    loss_on(x, t)(model).backward()
    plain = gradients(model)
    optimizer.zero_grad()

    def closure():
        optimizer.zero_grad()
        loss = loss_on(x, t)(model)
        loss.backward()
        return loss

    optimizer.step(closure)
    scale = min(1.0, 1.0 / float(sum(g.abs().sum() for g in plain.values())))  # LBFGS's first step
    assert_stepped(model, before, plain, lr=LR * scale)
    assert all(not module._forward_hooks for module in model.modules())
    assert type(model[0]) in (nn.Linear, nn.Conv2d)  # not exchanged for a watched one


@pytest.mark.parametrize("kind", ["wide", "conv"])
def test_a_closure_that_raises_changes_nothing(kind):
    model, x, t = build(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    consequent.attach(optimizer, model, damping=DAMPING)
    before = weights(model)

    def closure():
        loss_on(x, t)(model).backward()
        raise ArithmeticError("on purpose")

    with pytest.raises(ArithmeticError):
        optimizer.step(closure)
    assert_stepped(model, before, {})
    optimizer.zero_grad()
    grads = corrected(model, loss_on(x, t), samples=len(x))
    loss_on(x, t)(model).backward()
    optimizer.step()
    assert_stepped(model, before, grads)
