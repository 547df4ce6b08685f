"""N where samples enter a recurrent layer or attention, and where layers are recomputed in the backward pass."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import consequent

AT = ["step", "backward"]


class Wrapped(nn.Module):
    """A layer that may be checkpointed, in a model."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.readout = layer, nn.Linear(4, 2)

    def inner(self, x):
        found = self.layer(x, x, x) if isinstance(self.layer, nn.MultiheadAttention) else self.layer(x)
        return found[0] if isinstance(found, tuple) else found

    def forward(self, x, reentrant=False):
        return self.readout(checkpoint(self.inner, x, use_reentrant=True) if reentrant else self.inner(x))


LAYERS = {
    "lstm": lambda: nn.LSTM(4, 4, num_layers=2, batch_first=True),
    "gru": lambda: nn.GRU(4, 4, batch_first=True),
    "time-first": lambda: nn.RNN(4, 4, num_layers=3),
    "attention": lambda: nn.MultiheadAttention(4, 2, batch_first=True),
    "dense": lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)),
}


def attached(layer, at):
    torch.manual_seed(0)
    model = Wrapped(LAYERS[layer]())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, consequent.attach(optimizer, model, at=at)


def batch(layer, samples):
    return torch.randn(*((6, samples) if layer == "time-first" else (samples, 6)), 4, requires_grad=True)


@pytest.mark.parametrize("at", AT)
@pytest.mark.parametrize("layer", [layer for layer in LAYERS if layer != "dense"])
def test_one_sample_without_a_batch(layer, at):
    model, optimizer, correction = attached(layer, at)
    model(torch.randn(5, 4)).square().sum().backward()
    optimizer.step()
    assert correction.samples == 1


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first-first", "last-first"])
@pytest.mark.parametrize("layer", LAYERS)
def test_calls_that_are_recomputed_are_those_of_their_samples(layer, order):
    """Two forward passes, and then two backward passes: micro-batches, which add up."""
    model, optimizer, correction = attached(layer, "step")
    outputs = [model(batch(layer, samples), reentrant=True) for samples in (2, 3)]
    for place in order:
        outputs[place].square().sum().backward()
    optimizer.step()
    assert correction.samples == 5


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("layer", LAYERS)
def test_a_forward_pass_that_was_given_up_does_not_count(layer, when):
    model, optimizer, correction = attached(layer, "step")
    kept = []
    for samples in (7, 3) if when == "before" else (3, 7):
        kept.append(model(batch(layer, samples), reentrant=True))
    kept[when == "before"].square().sum().backward()
    optimizer.step()
    assert correction.samples == 3


@pytest.mark.parametrize("layer", [layer for layer in LAYERS if layer != "time-first"])
def test_a_part_that_is_recomputed_by_itself_while_the_model_waits(layer):
    model, optimizer, correction = attached(layer, "step")
    kept = model(batch(layer, 7), reentrant=True)
    checkpoint(model.inner, batch(layer, 3), use_reentrant=True).square().sum().backward()
    optimizer.step()
    assert correction.samples == 3
    assert kept.requires_grad


@pytest.mark.parametrize("layer", LAYERS)
def test_one_segment_inside_of_another(layer):
    model, optimizer, correction = attached(layer, "step")

    def outer(x):
        return checkpoint(model.inner, x, use_reentrant=True)

    x = batch(layer, 3)
    model.forward = lambda x: model.readout(checkpoint(outer, x, use_reentrant=True))
    for _ in range(2):
        model(x).square().sum().backward()
    optimizer.step()
    assert correction.samples == 6
