"""N where recurrent layers and attention are what samples enter."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import consequent

AT = ["step", "backward"]


class Wrapped(nn.Module):
    """A module with several units, in a container that is checkpointed."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.readout = layer, nn.Linear(4, 2)

    def inner(self, x):
        return (self.layer(x, x, x) if isinstance(self.layer, nn.MultiheadAttention) else self.layer(x))[0]

    def forward(self, x, reentrant=False):
        return self.readout(checkpoint(self.inner, x, use_reentrant=True) if reentrant else self.inner(x))


LAYERS = {
    "lstm": lambda: nn.LSTM(4, 4, num_layers=2, batch_first=True),
    "gru": lambda: nn.GRU(4, 4, batch_first=True),
    "time-first": lambda: nn.RNN(4, 4, num_layers=3),
    "attention": lambda: nn.MultiheadAttention(4, 2, batch_first=True),
}


def attached(layer, at):
    torch.manual_seed(0)
    model = Wrapped(LAYERS[layer]())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, consequent.attach(optimizer, model, at=at)


@pytest.mark.parametrize("at", AT)
@pytest.mark.parametrize("layer", LAYERS)
def test_one_sample_without_a_batch(layer, at):
    model, optimizer, correction = attached(layer, at)
    model(torch.randn(5, 4)).square().sum().backward()
    optimizer.step()
    assert correction.samples == 1


@pytest.mark.parametrize("layer", LAYERS)
def test_calls_that_are_recomputed_are_those_of_their_samples(layer):
    """Two forward passes, and then two backward passes: micro-batches, which add up."""
    model, optimizer, correction = attached(layer, "step")
    outputs = []
    for samples in (2, 3):
        x = torch.randn(6, samples, 4) if layer == "time-first" else torch.randn(samples, 6, 4)
        outputs.append(model(x.requires_grad_(), reentrant=True))
    for out in reversed(outputs):
        out.square().sum().backward()
    optimizer.step()
    assert correction.samples == 5


@pytest.mark.parametrize("layer", LAYERS)
def test_a_forward_pass_that_was_given_up_does_not_count(layer):
    model, optimizer, correction = attached(layer, "step")
    for samples in (7, 3):
        x = torch.randn(6, samples, 4) if layer == "time-first" else torch.randn(samples, 6, 4)
        outputs = model(x.requires_grad_(), reentrant=True)
    outputs.square().sum().backward()
    optimizer.step()
    assert correction.samples == 3
