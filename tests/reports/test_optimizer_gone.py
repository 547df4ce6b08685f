"""A model whose optimiser was thrown away is a plain one, and says so at its next backward pass."""

import copy
import gc
import subprocess
import sys
import warnings
import weakref

import pytest
import torch
from torch import nn

import consequent

AT = pytest.mark.parametrize("at", ["step", "backward"])
GONE = "no longer exists, and with it the correction"


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def backward(model):
    model(torch.linspace(-1, 1, 15).view(5, 3)).square().sum().backward()


def trained(at, **options):
    """A model that is handed on without its optimiser."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    consequent.attach(optimizer, model, at=at, **options)
    backward(model)
    optimizer.step()
    model.zero_grad()
    return model


@AT
def test_the_next_backward_pass_warns_once(at):
    model = trained(at)
    gc.collect()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # and nobody attaches to it
    with pytest.warns(consequent.ConsequentWarning, match=GONE):
        backward(model)
    backward(plain)
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
    optimizer.step()
    backward(model)  # not once more


@AT
def test_a_model_with_another_correction_says_nothing(at):
    model = trained(at)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    correction = consequent.attach(optimizer, model, at=at)
    backward(model)
    optimizer.step()
    assert correction.counters.steps == 1


@AT
def test_an_optimizer_that_is_rebuilt_in_its_place_says_nothing(at):
    model = net()
    optimizer = consequent.CSGD(model, lr=0.1, at=at)
    optimizer = None
    optimizer = consequent.CSGD(model, lr=0.1, at=at)
    backward(model)
    optimizer.step()


@AT
@pytest.mark.parametrize("part", ["0", "2"])
def test_what_another_correction_leaves_out_is_told_of(part, at):
    model = trained(at)
    optimizer = torch.optim.SGD(model.get_submodule(part).parameters(), lr=0.1)
    consequent.attach(optimizer, model, at=at, include=part)
    with pytest.warns(consequent.ConsequentWarning, match=GONE):
        backward(model)


@AT
def test_after_detaching_nothing_is_said(at):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    consequent.attach(optimizer, model, at=at).detach()
    del optimizer
    gc.collect()
    backward(model)


@AT
def test_evaluation_says_nothing_and_copies_neither(at):
    model = trained(at)
    model(torch.zeros(2, 3))
    backward(copy.deepcopy(model))


@AT
def test_nothing_is_kept_alive(at):
    model = trained(at)
    held = weakref.ref(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        backward(model)
    assert not any(p._backward_hooks for p in model.parameters())
    del model
    gc.collect()
    assert held() is None
    model = trained(at)  # and without a backward pass
    held = weakref.ref(model)
    del model
    gc.collect()
    assert held() is None


def test_a_program_that_ends_says_nothing():
    lines = [
        "import torch, consequent",
        "def trained():",
        "    model = torch.nn.Linear(8, 3)",
        "    optimizer = torch.optim.Adam(model.parameters())",
        "    correction = consequent.attach(optimizer, model)",
        "    loss = model(torch.ones(4, 8)).sum()",
        "    loss.backward()",
        "    optimizer.step()",
        "    return model, optimizer, loss",
        "trained()",
        "model, optimizer, loss = trained()",
    ]
    ended = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
