"""Layers whose class is exchanged."""

import gc

import torch
from torch import nn

import consequent
from consequent.capture import watched


def test_an_optimiser_that_is_collected_while_another_is_attached(monkeypatch):
    """Its layers are let go of at a bad moment: just when they are about to be watched by the other one."""
    model = nn.Linear(3, 2)
    abandoned = [torch.optim.SGD(model.parameters(), lr=0.1)]
    consequent.attach(abandoned[0], model)
    class_of = watched.class_of

    def class_of_after_collecting(layer):
        abandoned.clear()
        gc.collect()
        return class_of(layer)

    monkeypatch.setattr(watched, "class_of", class_of_after_collecting)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    correction = consequent.attach(optimizer, model)
    model(torch.randn(4, 3)).square().mean().backward()
    optimizer.step()
    assert correction.counters.steps == 1
    assert not correction.plain
