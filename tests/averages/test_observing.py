"""Which calls averages observe, and how many rows and samples they count."""

import copy

import pytest
import torch
from averages.short_runs import OPTIONS, saved_and_loaded, train, whole
from expected import check_same_grads, grads_of
from loops.networks import attached, batch, loss_of, network
from torch import nn
from torch.utils.checkpoint import checkpoint

import consequent


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_look_at_nan_changes_nothing(value):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    correction = consequent.attach(optimizer, model, averaging=0.9, refresh=1)
    train(model, optimizer, whole, 2)
    before = saved_and_loaded(correction.state_dict())
    x, y = batch()
    x[0, 0, 0, 0] = value
    optimizer.zero_grad()
    loss_of(model, x, y).backward()
    assert not all(p.grad.isfinite().all() for p in model.parameters())
    with torch.no_grad():
        for p in model.parameters():
            p.grad.zero_()  # somebody has noticed
    optimizer.step()
    after = correction.state_dict()["averages"][0]["layers"]
    for name, average in before["averages"][0]["layers"].items():
        assert torch.equal(average["moment"], after[name]["moment"])


def test_layers_that_are_seen_later():
    """A layer that the first look does not meet is looked at in the step after it got a gradient."""

    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x, both):
            return self.a(x) + self.b(x) if both else self.a(x)

    torch.manual_seed(0)
    model, x = Branches().double(), torch.randn(6, 4, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    consequent.attach(optimizer, model, damping=0.1, averaging=0.9, refresh=100)
    for step, both in enumerate([False, True, True, True]):
        optimizer.zero_grad()
        model(x, both).square().sum().div(2 * 6).backward()
        plain = grads_of(model)
        optimizer.step()
        is_corrected = plain["b.weight"] is not None and not torch.equal(plain["b.weight"], model.b.weight.grad)
        assert is_corrected == (step >= 2)
    X = torch.cat([x, torch.ones(6, 1, dtype=torch.float64)], dim=1)
    G = torch.cat([plain["b.weight"], plain["b.bias"][:, None]], dim=1)
    U = 6 * G @ torch.linalg.inv(X.T @ X + 0.1 * torch.eye(5, dtype=torch.float64))
    torch.testing.assert_close(model.b.weight.grad, U[:, :-1])


def test_layers_outside_of_the_model_count_their_own_samples():
    one, optimizer = attached(network(), 0.01, **OPTIONS)
    other, its = attached(network(), 0.01, **OPTIONS)

    def in_parts(model, step):
        x, y = batch(12, seed=step)
        nn.functional.cross_entropy(model[4:](model[:4](x)), y).backward()

    check_same_grads(train(other, its, in_parts), train(one, optimizer, whole), rtol=1e-9)


def test_a_layer_that_is_called_twice_has_all_of_its_rows():
    torch.manual_seed(0)
    layer = nn.Linear(5, 5).double()
    x = torch.randn(7, 5, dtype=torch.float64)

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return self.layer(torch.tanh(self.layer(x)))

    model = Twice()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    consequent.attach(optimizer, model, damping=0.3, averaging=0.9)
    model(x).square().sum().div(14).backward()
    G = torch.cat([layer.weight.grad, layer.bias.grad[:, None]], dim=1)
    with torch.no_grad():
        hidden = torch.tanh(layer(x))
    optimizer.step()
    X = torch.cat([torch.cat([x, hidden]), torch.ones(14, 1, dtype=torch.float64)], dim=1)
    U = 7 * G @ torch.linalg.inv(X.T @ X + 0.3 * torch.eye(6, dtype=torch.float64))
    torch.testing.assert_close(layer.weight.grad, U[:, :-1])
    torch.testing.assert_close(layer.bias.grad, U[:, -1])


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_observes_once(use_reentrant):
    class Checkpointed(nn.Sequential):
        def forward(self, x):
            first, last = nn.Sequential(*list(self)[:4]), nn.Sequential(*list(self)[4:])
            return last(checkpoint(first, x, use_reentrant=use_reentrant))

    def run(model, step):
        x, y = batch(12, seed=step)
        loss_of(model, x.requires_grad_(), y).backward()

    options = {**OPTIONS, "damping": 0.3}
    one = train(*attached(network(), 0.01, **options), run)
    several = train(*attached(Checkpointed(*network()), 0.01, **options), run)
    check_same_grads(several, one, rtol=1e-7)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_of_the_whole_model_is_observed_once(use_reentrant):
    def run(model, step):
        x, y = batch(12, seed=step)
        nn.functional.cross_entropy(checkpoint(model, x.requires_grad_(), use_reentrant=use_reentrant), y).backward()

    states = []
    for passes in (whole, run):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        correction = consequent.attach(optimizer, model, averaging=0.9, refresh=2)
        trained = train(model, optimizer, passes, 4)
        states.append((correction.state_dict()["averages"][0]["layers"]["5"], trained))
    (one, wanted), (other, found) = states
    assert (one["rows"], one["weight"], one["divisor"]) == (other["rows"], other["weight"], other["divisor"])
    check_same_grads(found, wanted, rtol=1e-7)


def first_step(model, run, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    consequent.attach(optimizer, model, **options)
    run(model)
    optimizer.step()
    return grads_of(model)


class Critic(nn.Module):
    """Layers that are called with gradients off inside of the model's forward, and one that is called outside of it."""

    def __init__(self):
        super().__init__()
        self.body, self.policy, self.value = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(6, 1)

    def forward(self, x):
        with torch.no_grad():
            self.target = self.body(2 * x)
        self.h = torch.tanh(self.body(x))
        return self.policy(self.h) + 0 * self.target[:, :3]


def test_calls_without_gradients_and_calls_outside_of_the_model():
    """At the first step averages are what own inputs are."""
    torch.manual_seed(0)
    plain, x = Critic().double(), torch.randn(7, 4, dtype=torch.float64)

    def run(model):
        (model(x).square().sum() / 14 + model.value(model.h).square().sum() / 14).backward()

    own, averages = (first_step(copy.deepcopy(plain), run, averaging=beta) for beta in (0.0, 0.9))
    check_same_grads(averages, own)


def test_a_forward_pass_that_raises_ends():
    """Here the divisor of the loss is not known at first, as when a cell of a notebook is run too early."""
    known = {}
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    consequent.attach(optimizer, model, averaging=0.9, loss_reduction=lambda n: n * known["tokens"])
    with pytest.raises(KeyError):
        whole(model, 0)
    known["tokens"] = 1
    optimizer.zero_grad()
    whole(model, 0)
    optimizer.step()
    check_same_grads(grads_of(model), first_step(network(), lambda one: whole(one, 0), averaging=0.9), rtol=1e-6)
