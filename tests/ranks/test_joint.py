"""Units of several parameters on several ranks: plain at the step, each rank by itself in the backward pass."""

import warnings

import pytest
import torch
import torch.distributed as dist
from loop.expected import assert_close, gradients
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

import consequent


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrent, self.readout = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x):
        return self.readout(self.recurrent(x)[0])


def inputs(rank):
    return torch.randn(5, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def step(at):
    torch.manual_seed(0)
    model = Model().double()
    ddp = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    correction = consequent.attach(optimizer, ddp, damping=0.1, loss_reduction="sum", at=at)
    x = inputs(dist.get_rank())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            optimizer.zero_grad()
            ddp(x).square().sum().backward()
            optimizer.step()
    said = [str(w.message) for w in caught if w.category is consequent.ConsequentWarning]
    return gradients(model), correction.plain, said


def by_one_process(rank, **options):
    torch.manual_seed(0)
    model = Model().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    correction = consequent.attach(optimizer, model, damping=0.1, loss_reduction="sum", **options)
    model(inputs(rank)).square().sum().backward()
    correction.step()
    return gradients(model)


def test_at_the_step_they_are_plain_and_listed(two):
    torch.manual_seed(0)
    model = Model().double()
    sum(model(inputs(rank)).square().sum() / 2 for rank in range(2)).backward()
    expected = {name: grad for name, grad in gradients(model).items() if name.startswith("recurrent")}
    assert expected
    for grads, plain, said in two.run(step, "step"):
        assert_close({name: grads[name] for name in expected}, expected, 1e-9)
        assert list(plain) == ["recurrent"]
        assert len(said) == 1
        assert "not exchanged between ranks" in said[0]


def test_in_the_backward_pass_each_rank_corrects_with_its_own_inputs(two):
    mine = [by_one_process(rank, at="backward") for rank in range(2)]
    expected = {name: (mine[0][name] + mine[1][name]) / 2 for name in mine[0]}
    for grads, plain, said in two.run(step, "backward"):
        assert_close(grads, expected, 1e-9)
        assert (plain, said) == ({}, [])


def alone():
    model = nn.LSTM(3, 4).double()
    ddp = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    consequent.attach(optimizer, ddp)
    with pytest.raises(RuntimeError, match='attach with at="backward"'):
        ddp(inputs(0))


def test_a_model_of_nothing_else_is_refused(two):
    two.run(alone)
