"""``averaging="auto"``: own inputs where a layer has fewer rows than features, averages elsewhere."""

import copy

import pytest
import torch
from averages.short_runs import saved_and_loaded, train, whole
from expected import check_same_grads, grads_of
from loops.networks import attached, batch, loss_of, network

import consequent

AUTO = {"averaging": "auto", "refresh": 3}


def stepped(model, optimizer, step):
    optimizer.zero_grad()
    whole(model, step)
    optimizer.step()


def test_layers_are_sorted_at_the_first_step():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    correction = consequent.attach(optimizer, model, **AUTO)
    assert "or own inputs if fewer rows than features" in str(correction)
    stepped(model, optimizer, 0)  # 12 images: rows are images · positions
    assert list(correction.averaged) == ["0", "2"]
    assert list(correction.own_inputs) == ["5", "7"]
    assert "own inputs (fewer rows than features at the first step)" in str(correction)
    assert "at the first step, averages" not in str(correction)
    stepped(model, optimizer, 1)
    assert model[5].weight.grad is not None
    correction.detach()
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_the_first_step_is_that_of_both():
    grads = []
    for averaging in ("auto", 0, 0.95):
        model, optimizer = attached(network(), 0.01, averaging=averaging, bound=None)
        stepped(model, optimizer, 0)
        grads.append(grads_of(model))
    check_same_grads(grads[0], grads[1], rtol=1e-6)
    check_same_grads(grads[0], grads[2], rtol=1e-6)


def test_later_steps_are_those_of_each_way():
    model, optimizer = attached(network(), 0.0, **AUTO)
    apart, its = attached(network(), 0.0, averaging=0.95, refresh=3, include=["0", "2"])
    consequent.attach(its, apart, averaging=0, include=["5", "7"])
    for step in range(5):
        for one, stepping in ((model, optimizer), (apart, its)):
            stepping.zero_grad()
            loss_of(one, *batch(seed=step)).backward()
            stepping.step()
    check_same_grads(grads_of(model), grads_of(apart), rtol=1e-6)


@pytest.mark.parametrize("saved_after", [0, 1, 3])
def test_a_state_goes_on(saved_after):
    one = network()
    optimizer = torch.optim.SGD(one.parameters(), lr=0.01, momentum=0.9)
    correction = consequent.attach(optimizer, one, **AUTO)
    train(one, optimizer, whole, saved_after)
    other = copy.deepcopy(one)
    its = torch.optim.SGD(other.parameters(), lr=0.01, momentum=0.9)
    its.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    loaded = consequent.attach(its, other, **AUTO)
    loaded.load_state_dict(saved_and_loaded(correction.state_dict()))
    assert list(loaded.own_inputs) == list(correction.own_inputs)
    for step in range(5):
        stepped(one, optimizer, step)
        stepped(other, its, step)
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))


def test_other_words_are_refused():
    model = network()
    with pytest.raises(TypeError, match="averaging must be a number, got 'cheap'"):
        consequent.attach(torch.optim.SGD(model.parameters(), lr=0.1), model, averaging="cheap")
