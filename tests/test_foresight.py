"""``consequent.foresight``: what a step did to each layer's outputs on its own mini-batch."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from loops.networks import batch, loss_of, network
from torch import nn

import consequent


def closure_for(model, optimizer):
    def closure():
        optimizer.zero_grad()
        loss_of(model, *batch()).backward()

    return closure


@pytest.mark.parametrize("averaging", [None, 0.0, 0.9], ids=["plain", "own inputs", "averages"])
def test_it_takes_the_step_that_would_have_been_taken(averaging):
    models = [network(), network()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for model in models]
    if averaging is not None:
        for model, optimizer in zip(models, optimizers, strict=True):
            consequent.attach(optimizer, model, averaging=averaging, refresh=2)
    for _ in range(3):
        found = consequent.foresight(optimizers[0], models[0], closure_for(models[0], optimizers[0]))
        closure_for(models[1], optimizers[1])()
        optimizers[1].step()
        assert list(found) == ["0", "2", "5", "7"]
        for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert torch.equal(p, q)


def test_the_numbers_of_a_convolution_by_hand():
    torch.manual_seed(0)
    layer = nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular").double()
    x, target = torch.randn(4, 2, 5, 5, dtype=torch.float64), torch.randn(4, 3, 5, 5, dtype=torch.float64)
    before = copy.deepcopy(layer)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.3)
    consequent.attach(optimizer, layer, damping=0.5)

    def closure():
        optimizer.zero_grad()
        with torch.no_grad():
            layer(x)  # an evaluation, whose samples do not count
        (0.5 * (layer(x) - target).square().sum() / 4).backward()

    found = consequent.foresight(optimizer, layer, closure)[""]
    wanted = -0.3 * (before(x) - target).detach()  # −μ c ΔZ, and c = 4 undoes the mean
    produced = (layer(x) - before(x)).detach()
    plain = copy.deepcopy(before)
    (0.5 * (plain(x) - target).square().sum()).backward()
    with torch.no_grad():
        backprop = F.conv2d(F.pad(x, (1, 1, 1, 1), mode="circular"), -plain.weight.grad, -plain.bias.grad)
    assert found.wanted == pytest.approx(float(wanted.norm()))
    assert found.produced == pytest.approx(float(produced.norm()))
    assert found.ratio == pytest.approx(found.produced / found.wanted)
    assert found.cosine == pytest.approx(cosine(wanted, produced))
    assert found.backprop_cosine == pytest.approx(cosine(wanted, backprop))
    assert found.cosine > found.backprop_cosine


def cosine(a, b):
    return float((a * b).sum() / (a.norm() * b.norm()))


def test_the_table_and_what_is_left_behind():
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    found = consequent.foresight(optimizer, model, closure_for(model, optimizer))
    lines = str(found).splitlines()
    assert lines[1].split() == ["layer", "produced/wanted", "the", "step", "backpropagation"]
    assert [line.split()[0] for line in lines[2:]] == ["0", "2", "5", "7"]
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_closure_that_raises_leaves_the_model_as_it_was():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]

    def closure():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        consequent.foresight(optimizer, model, closure)
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_layers_that_are_frozen_or_unused_are_left_out():
    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
            self.b.requires_grad_(False)

        def forward(self, x):
            return self.b(self.a(x))

    model = Unused()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    found = consequent.foresight(optimizer, model, lambda: model(torch.randn(4, 3)).square().mean().backward())
    assert list(found) == ["a"]
    assert not math.isnan(found["a"].cosine)
