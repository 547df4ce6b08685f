"""Every optimiser goes the way that it goes with ``at="step"``, and so does a copy of it."""

import copy
import pickle

import pytest
import torch
from kinds import BATCHES, READY, make_model, train
from kinds import KINDS as OPTIMIZERS
from loop.expected import assert_same, weights
from models.expected import check_same, half_squares

import consequent


def made(name, model, at="backward"):
    kind = OPTIMIZERS[name]
    if name in READY:
        return kind.make(model, at=at)
    optimizer = kind.make_plain(model)
    consequent.attach(optimizer, model, damping=0.01, at=at)
    return optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_trains_as_with_the_step(name):
    found = []
    for at in ("backward", "step"):
        model = make_model()
        train(model, made(name, model, at), BATCHES)
        found.append(model)
    check_same(*found, rtol=1e-6)
    plain = make_model()
    train(plain, OPTIMIZERS[name].make_plain(plain), BATCHES)
    assert not torch.allclose(plain[0].weight, found[0][0].weight)


@pytest.mark.parametrize("name", READY)
def test_ready_made_ones_are_torchs_and_their_state_can_be_loaded(name):
    model = make_model()
    optimizer = made(name, model)
    assert isinstance(optimizer, OPTIMIZERS[name].plain)
    assert optimizer.correction.at == "backward"
    train(model, optimizer, BATCHES[:3])
    again = make_model()
    again.load_state_dict(model.state_dict())
    loaded = made(name, again)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    loaded.correction.load_state_dict(optimizer.correction.state_dict())
    for pair in ((model, optimizer), (again, loaded)):
        train(*pair, BATCHES[3:])
    assert_same(weights(again), weights(model))
    assert loaded.correction.counters == optimizer.correction.counters
    assert loaded.correction.counters.steps == len(BATCHES)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"])
@pytest.mark.parametrize("name", READY)
def test_a_copy_of_the_pair_goes_on_by_itself(name, how):
    model = make_model()
    optimizer = made(name, model)
    train(model, optimizer, BATCHES[:2])
    half_squares(model(BATCHES[2]))  # a forward pass, whose backward pass never comes, is not copied
    again, copied = how((model, optimizer))
    assert copied.correction.at == "backward"
    assert copied.correction.model is again
    before = weights(model)
    train(again, copied, BATCHES[2:])
    assert_same(weights(model), before)
    train(model, optimizer, BATCHES[2:])
    assert_same(weights(again), weights(model))
