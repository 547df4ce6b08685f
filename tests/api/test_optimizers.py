"""The ready-made optimisers are the torch optimisers with an attached correction."""

import copy

import pytest
import torch
from loops.networks import batch, loss_of, network
from torch import nn

import consequent

READY = {
    "CSGD": (consequent.CSGD, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}, 0.1, 0.1),
    "CAdam": (consequent.CAdam, torch.optim.Adam, {"betas": (0.8, 0.99)}, 3e-3, 1.0),
    "CAdamW": (consequent.CAdamW, torch.optim.AdamW, {"weight_decay": 0.1}, 3e-3, 1.0),
    "CRMSprop": (consequent.CRMSprop, torch.optim.RMSprop, {"alpha": 0.9}, 1e-2, 1.0),
}


def train(model, optimizer, steps=3):
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, *batch(seed=step)).backward()
        optimizer.step()
        scheduler.step()
    return list(model.parameters())


@pytest.mark.parametrize("name", READY)
def test_they_are_attach_in_one_line(name):
    ours, theirs, options, rate, rho = READY[name]
    model, other = network(), network()
    optimizer = ours(model, **options)
    assert isinstance(optimizer, theirs)
    assert optimizer.param_groups[0]["lr"] == rate
    plain = theirs(other.parameters(), lr=rate, **options)
    consequent.attach(plain, other, relative_damping=rho)
    for p, q in zip(train(model, optimizer), train(other, plain), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("name", READY)
def test_parameter_groups_and_options(name):
    ours, *_ = READY[name]
    model = network()
    groups = [{"params": model[:5].parameters()}, {"params": model[5:].parameters(), "lr": 1e-4}]
    optimizer = ours(model, groups, lr=0.02, damping=0.5, averaging=0.9, exclude="0")
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 1e-4]
    assert list(optimizer.correction.averaged) == ["2", "5", "7"]
    assert str(optimizer.correction.averaged["2"].damping) == "damping=0.5"
    train(model, optimizer)


def test_torchs_own_words_for_its_own_arguments():
    with pytest.raises(ValueError, match="Invalid learning rate"):
        consequent.CSGD(nn.Linear(2, 2), lr=-1.0)
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"CSGD\(\) has no argument 'alpha'"):
        consequent.CSGD(model, alpha=0.9)
    with pytest.raises(TypeError, match=r"CSGD\(\) has no argument 'averageing'; did you mean averaging\?"):
        consequent.CSGD(model, averageing=0.9)
    with pytest.raises(TypeError, match=r"CAdam\(\) has no argument 'amsgrat'; did you mean amsgrad\?"):
        consequent.CAdam(model, amsgrat=True)
    assert "forward" not in model.__dict__


@pytest.mark.parametrize("name", READY)
def test_a_state_goes_on_in_a_new_optimiser(name):
    ours, *_ = READY[name]
    model = network()
    optimizer = ours(model, lr=0.01)
    train(model, optimizer)
    other = network()
    other.load_state_dict(model.state_dict())
    later = ours(other, lr=0.01)
    later.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for p, q in zip(train(model, optimizer), train(other, later), strict=True):
        assert torch.equal(p, q)
