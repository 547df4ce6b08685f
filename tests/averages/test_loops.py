"""Averages in training loops: everything linear commutes with them, and states go on."""

import copy

import pytest
import torch
from averages.short_runs import OPTIONS, saved_and_loaded, train, whole
from expected import check_same_grads, grads_of
from loops.networks import attached, batch, loss_of, network, one_pass
from torch import nn

import consequent


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
    with pytest.raises(ValueError, match=r"moment of layer '0' is \[1, 72, 72\] in the state, and \[1, 3, 3\] here"):
        correction.load_state_dict(state)
    with pytest.raises(ValueError, match=r"no state of a correction of 1 optimisers: its keys are \['model'\]"):
        correction.load_state_dict({"model": 3})
    with pytest.raises(ValueError, match="no state of a correction of 1 optimisers: it is a list"):
        correction.load_state_dict([state])
    for wrong in (3, {}, {**state["averages"][0], "layers": []}, {**state["averages"][0], "layers": {"0": {}}}):
        with pytest.raises(ValueError, match="this is no state of averages, or one of another version"):
            correction.load_state_dict({"averages": [wrong]})


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
    average = correction.averaged["7"].average
    X = torch.cat([average.moment[0], average.mean], dim=0)
    S = torch.cat([X, torch.cat([average.mean[0], torch.ones(1, dtype=X.dtype)])[:, None]], dim=1) * average.rows
    level = 0.1 * S.trace() / min(average.weight, len(S))
    inverse = average.divisor * torch.linalg.inv(S + level * torch.eye(len(S)))
    wanted = torch.cat([plain["7.weight"], plain["7.bias"][:, None]], dim=1) @ inverse
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
