"""NaN and inf: gradients of nothing but NaN, or an error that names the layer."""

import pytest
import torch
from loop.expected import (
    DAMPING,
    KINDS,
    LR,
    assert_close,
    assert_same,
    build,
    corrected,
    gradients,
    loss_on,
    mean_loss,
    weights,
)
from models.expected import half_squares
from torch import nn

import consequent
from at_backward.expected import start
from consequent import NonFiniteError


@pytest.mark.parametrize("damping", [DAMPING, 0.0, "relative"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_bad_inputs_give_gradients_of_nothing_but_nan(kind, bad, damping):
    model, x, t = build(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    options = {"relative_damping": 0.1} if damping == "relative" else {"damping": damping}
    correction = consequent.attach(optimizer, model, at="backward", **options)
    x.view(-1)[3] = bad
    mean_loss(model(x), t).backward()
    assert all(p.grad.isnan().all() for p in model.parameters())
    optimizer.step()
    assert all(p.isnan().all() for p in model.parameters())  # nobody kept the step from being taken
    assert correction.counters.skipped == 0


@pytest.mark.parametrize("batch", [2, 30])
def test_a_bad_layer_leaves_the_others_alone(batch):
    """NaN in the inputs of one of two branches, in a sample that has no part in the loss."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"good": nn.Linear(8, 3), "bad": nn.Linear(8, 3)}).double()
    consequent.Consequentialism(model, damping=DAMPING, at="backward")
    x = torch.randn(batch, 8).double()
    spoilt = x.clone()
    spoilt[0, 0] = torch.nan
    used = torch.arange(batch)[:, None] > 0
    outputs = torch.where(used, model["bad"](spoilt), 0) + model["good"](x)
    half_squares(outputs).backward()
    assert model["bad"].weight.grad.isnan().all()
    assert model["bad"].bias.grad.isnan().all()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in model["good"].parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_check_raises_and_names_the_layer(kind):
    model, x, t, optimizer, correction = start(kind, check=True)
    before = weights(model)
    last = {"wide": "4", "conv": "4", "tall": "2"}[kind]
    with pytest.raises(NonFiniteError, match=f"layer '{last}'"):
        (mean_loss(model(x), t) * torch.nan).backward()
    assert_same(weights(model), before)
    optimizer.zero_grad()
    mean_loss(model(x), t).backward()  # and the next pass is an ordinary one
    assert_close(gradients(model), corrected(model, loss_on(x, t), samples=len(x)))
    optimizer.zero_grad()
    correction.check = False
    (mean_loss(model(x), t) * torch.nan).backward()
    assert all(p.grad.isnan().all() for p in model.parameters())


def test_check_raises_in_differentiable_passes_too():
    model, x, t, *_kept = start("wide", check=True)
    loss = mean_loss(model(x), t) * torch.nan
    with pytest.raises(NonFiniteError, match="layer '4'"):
        torch.autograd.grad(loss, [*model.parameters()], create_graph=True)


@pytest.mark.parametrize("kind", KINDS)
def test_bad_inputs_in_differentiable_passes(kind):
    model, x, t, *_kept = start(kind)
    x.view(-1)[3] = torch.nan
    grads = torch.autograd.grad(mean_loss(model(x), t), [*model.parameters()], create_graph=True)
    assert all(grad.isnan().all() for grad in grads)
