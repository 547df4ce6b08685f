"""Averages in training loops: everything linear commutes with them, and states go on."""

import copy
import io

import pytest
import torch
from expected import check_same_grads, grads_of
from loops.networks import attached, batch, loss_of, network, one_pass
from torch import nn
from torch.utils.checkpoint import checkpoint

import consequent

OPTIONS = {"averaging": 0.9, "refresh": 2}


def train(model, optimizer, passes_of, steps=5):
    for step in range(steps):
        optimizer.zero_grad()
        passes_of(model, step)
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def whole(model, step):
    one_pass(model, samples=12, seed=step)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("parts", [(4, 4, 4), (1, 6, 5), (12, 0)], ids=str)
def test_micro_batches_equal_one_batch(parts, optimizer):
    def in_parts(model, step):
        x, y = batch(12, seed=step)
        for part, target in zip(x.split(parts), y.split(parts), strict=True):
            if len(part):
                (loss_of(model, part, target) * (len(part) / 12)).backward()

    one = train(*attached(network(), 0.01, optimizer, **OPTIONS), whole)
    several = train(*attached(network(), 0.01, optimizer, **OPTIONS), in_parts)
    check_same_grads(several, one, rtol=1e-7)


@pytest.mark.parametrize("reduction", [12.0, lambda n: 3 * n], ids=["a number", "a function"])
def test_a_loss_reduction_is_that_of_a_pass(reduction):
    """Losses of k micro-batches are divided by k once more, whatever each divides by."""

    def in_parts(model, step):
        x, y = batch(12, seed=step)
        for part, target in zip(x.split(4), y.split(4), strict=True):
            divisor = 3 * 4 if callable(reduction) else reduction
            (nn.functional.cross_entropy(model(part), target, reduction="sum") / divisor / 3).backward()

    def whole_sum(model, step):
        x, y = batch(12, seed=step)
        (nn.functional.cross_entropy(model(x), y, reduction="sum") / 36).backward()

    several = train(*attached(network(), 0.01, loss_reduction=reduction, **OPTIONS), in_parts)
    one = train(*attached(network(), 0.01, loss_reduction=36.0, **OPTIONS), whole_sum)
    check_same_grads(several, one, rtol=1e-7)


def test_scaling_and_clipping_commute():
    def scaled(model, step):
        x, y = batch(12, seed=step)
        (loss_of(model, x, y) * 2.0**10).backward()
        for p in model.parameters():
            p.grad.mul_(2.0**-10)

    def halved(model, step):
        whole(model, step)
        for p in model.parameters():
            p.grad.mul_(0.5)

    one = train(*attached(network(), 0.01, **OPTIONS), whole)
    check_same_grads(train(*attached(network(), 0.01, **OPTIONS), scaled), one, rtol=1e-9)
    unbounded = {**OPTIONS, "bound": None}
    one = train(*attached(network(), 0.01, **unbounded), halved)
    check_same_grads(one, train(*attached(network(), 0.005, **unbounded), whole), rtol=1e-9)


def test_a_gradient_scaler_that_skips_steps():
    model, optimizer = attached(network(torch.float32), 0.01, **OPTIONS)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)  # overflows at first
    for step in range(60):
        optimizer.zero_grad()
        x, y = batch(12, torch.float32, seed=step)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(x).float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert all(p.isfinite().all() for p in model.parameters())
    assert scaler.get_scale() < 2.0**40


def saved_and_loaded(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("saved_after", [1, 2, 3])
def test_a_state_that_is_saved_and_loaded_gives_the_same_next_steps(saved_after):
    one = network()
    optimizer = torch.optim.Adam(one.parameters(), lr=0.01)
    correction = consequent.attach(optimizer, one, **OPTIONS)
    train(one, optimizer, whole, saved_after)
    other = copy.deepcopy(network())
    other.load_state_dict(one.state_dict())
    its = torch.optim.Adam(other.parameters(), lr=0.01)
    its.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    attach = consequent.attach(its, other, **OPTIONS)
    attach.load_state_dict(saved_and_loaded(correction.state_dict()))
    for step in range(4):
        for model, stepping in ((one, optimizer), (other, its)):
            stepping.zero_grad()
            whole(model, step)
            stepping.step()
        for p, q in zip(one.parameters(), other.parameters(), strict=True):
            assert torch.equal(p, q)


def test_states_that_do_not_fit():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = consequent.attach(optimizer, model, **OPTIONS)
    train(model, optimizer, whole, 1)
    state = first.state_dict()
    other = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).double()
    correction = consequent.attach(torch.optim.SGD(other.parameters(), lr=0.1), other, **OPTIONS)
    with pytest.raises(ValueError, match="averages of layer '2', which has none here"):
        correction.load_state_dict(state)
    state["averages"][0]["layers"] = {"0": state["averages"][0]["layers"]["5"]}
    with pytest.raises(ValueError, match=r"moment of layer '0' is \[1, 73, 73\] in the state, and \[1, 4, 4\] here"):
        correction.load_state_dict(state)
    with pytest.raises(ValueError, match=r"no state of a correction of 1 optimisers: its keys are \['model'\]"):
        correction.load_state_dict({"model": 3})
    with pytest.raises(ValueError, match="no state of a correction of 1 optimisers: it is a list"):
        correction.load_state_dict([state])
    for wrong in (3, {}, {**state["averages"][0], "layers": []}, {**state["averages"][0], "layers": {"0": {}}}):
        with pytest.raises(ValueError, match="this is no state of averages, or one of another version"):
            correction.load_state_dict({"averages": [wrong]})


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


def test_a_bias_that_is_frozen_for_a_while():
    model, optimizer = attached(network(), 0.0, damping=0.1, averaging=0.9, refresh=100)
    x, y = batch()
    for trained in (True, False, True):
        model[7].bias.requires_grad_(trained)
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()
        own, _ = attached(model, damping=0.1)
        loss_of(own, x, y).backward()
        check_same_grads(grads_of(model), grads_of(own), rtol=1e-6)


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


def test_closures():
    one = train(*attached(network(), 0.01, **OPTIONS), whole)
    model, optimizer = attached(network(), 0.01, **OPTIONS)
    for step in range(5):

        def closure(step=step):
            optimizer.zero_grad()
            x, y = batch(12, seed=step)
            loss = loss_of(model, x, y)
            loss.backward()
            return loss

        assert optimizer.step(closure) is not None
    check_same_grads({name: p.detach() for name, p in model.named_parameters()}, one, rtol=1e-9)


def test_two_optimisers_have_looks_of_their_own():
    model = network()
    body, head = torch.optim.SGD(model[:5].parameters(), lr=0.01), torch.optim.SGD(model[5:].parameters(), lr=0.01)
    consequent.attach([body, head], model, **OPTIONS)
    single, optimizer = attached(network(), 0.01, **OPTIONS)
    for step in range(5):
        for one, steppings in ((model, (head, body)), (single, (optimizer,))):
            one.zero_grad()
            whole(one, step)
            for stepping in steppings:
                stepping.step()
        check_same_grads(grads_of(model), grads_of(single), rtol=1e-9)


def test_both_mechanisms_in_one_model(monkeypatch):
    """Layer by layer: convolutions by averages, dense layers by their own inputs."""
    from consequent import correction as module

    right = module.why_own_inputs

    def by_kind(layer, operation, averaging, *rest):
        return "dense" if isinstance(layer, nn.Linear) else right(layer, operation, 0.9, *rest)

    own, _ = attached(network(), 0.0)
    one_pass(own)
    monkeypatch.setattr(module, "why_own_inputs", by_kind)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    correction = consequent.attach(optimizer, model, averaging=0.9, refresh=2)
    assert (set(correction.averaged), set(correction.own_inputs)) == ({"0", "2"}, {"5", "7"})
    for _ in range(3):
        optimizer.zero_grad()
        one_pass(model)
        optimizer.step()
        check_same_grads(grads_of(model), grads_of(own), rtol=1e-6)


@pytest.mark.parametrize("case", ["wide", "split", "shared"])
def test_layers_that_keep_their_own_inputs_although_averages_are_asked_for(case, monkeypatch):
    monkeypatch.setattr("consequent.averages.choice.WIDEST", 50)
    model = nn.Sequential(nn.Linear(60 if case == "wide" else 20, 20), nn.Tanh(), nn.Linear(20, 20))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1)]
    if case == "split":
        weights = [p for p in model.parameters() if p is not model[0].bias]
        optimizers = [torch.optim.SGD(weights, lr=0.1), torch.optim.Adam([model[0].bias])]
    if case == "shared":
        model[2].weight = model[0].weight
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1)]
    correction = consequent.attach(optimizers, model, averaging=0.9)
    words = {"wide": "a moment of 60 columns is not kept", "split": "not in one optimiser", "shared": "another layer"}
    assert words[case] in correction.why_own_inputs["0"]
    assert f"own inputs ({correction.why_own_inputs['0']})" in repr(correction)
    assert ("2" in correction.averaged) == (case != "shared")


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


class SharpnessAware(torch.optim.Optimizer):
    """Two half-steps, of which the second is one of another optimiser inside; its own ``step`` is never called."""

    def __init__(self, parameters, **options):
        super().__init__(parameters, options)
        self.base_optimizer = torch.optim.SGD(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self):
        self.climbs = [(p, 0.01 * p.grad) for group in self.param_groups for p in group["params"]]
        for p, climb in self.climbs:
            p.add_(climb)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for p, climb in self.climbs:
            p.sub_(climb)
        self.base_optimizer.step()


def test_sharpness_aware_minimisation():
    model = network()
    optimizer = SharpnessAware(model.parameters(), lr=0.01)
    correction = consequent.attach(optimizer, model, averaging=0.9)
    for half in (optimizer.first_step, optimizer.second_step):
        whole(model, 0)
        plain = grads_of(model)
        half()
    inverse = correction.averaged["7"].inverse(ones=True)
    wanted = torch.cat([plain["7.weight"], plain["7.bias"][:, None]], dim=1) @ inverse.matrix[0]
    torch.testing.assert_close(model[7].weight.grad, wanted[:, :-1])
    assert correction.holds_bound


class Clamped(torch.optim.SGD):
    """A step of its own, which calls that of its base class."""

    def step(self, closure=None, *, limit=2.0):
        loss = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.data.clamp_(-limit, limit)
        return loss


@pytest.mark.parametrize("how", ["plain", "closure", "keyword"])
def test_a_step_that_calls_its_base_class_corrects_once(how):
    """torch calls hooks for either of them, once some SGD was made."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    model, optimizer = attached(network(), 0.01, Clamped, **OPTIONS)
    one, its = attached(network(), 0.01, **OPTIONS)
    x, y = batch(12)

    def closure():
        optimizer.zero_grad()
        loss_of(model, x, y).backward()

    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)  # and a step that raises is over
    for _ in range(4):
        if how == "plain":
            closure()
        optimizer.step(*([closure] if how == "closure" else []), **({"closure": closure} if how == "keyword" else {}))
        its.zero_grad()
        loss_of(one, x, y).backward()
        its.step()
        check_same_grads(grads_of(model), grads_of(one))


def test_a_step_that_takes_something_else():
    class Scaled(torch.optim.SGD):
        def step(self, loss):
            self.seen = loss
            return super().step()

    model, optimizer = attached(network(), 0.01, Scaled, **OPTIONS)
    whole(model, 0)
    optimizer.step(3.0)
    assert optimizer.seen == 3.0


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
