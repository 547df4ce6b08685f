"""What is done in place to a layer's outputs, which may be views of what the layer computed."""

import pytest
import torch
from loop.expected import DAMPING, LR, assert_stepped, corrected, weights
from torch import nn
from torch.utils.checkpoint import checkpoint

import consequent

AT = pytest.mark.parametrize("at", ["step", "backward"])


def every_third(h):
    return (torch.arange(h.numel()) % 3 == 1).view(h.shape)


def added(h, x):
    h += x
    return h


def sliced(h, x):
    h[..., 0] = 0.3
    return h


IN_PLACE = {
    "relu": lambda h, x: nn.ReLU(inplace=True)(h),
    "dropout": lambda h, x: nn.Dropout(0.4, inplace=True)(h),
    "+=": added,
    "masked_fill_": lambda h, x: h.masked_fill_(every_third(h), 0.3),
    "mul_": lambda h, x: h.mul_(0.7),
    "[...] =": sliced,
    "through a view": lambda h, x: h.view(-1).mul_(0.7).view(h.shape),
}

# name: (layer, shape of its inputs, N)
CALLS = {
    "2-D wide": (lambda bias: nn.Linear(20, 20, bias), (5, 20), 5),
    "2-D tall": (lambda bias: nn.Linear(4, 4, bias), (9, 4), 9),
    "3-D wide": (lambda bias: nn.Linear(20, 20, bias), (2, 3, 20), 2),
    "3-D tall": (lambda bias: nn.Linear(4, 4, bias), (5, 3, 4), 5),
    "1-D": (lambda bias: nn.Linear(6, 6, bias), (6,), 1),
    "images": (lambda bias: nn.Conv2d(2, 2, 3, padding=1, bias=bias), (3, 2, 5, 5), 3),
    "one image wide": (lambda bias: nn.Conv2d(6, 6, 3, padding=1, bias=bias), (6, 3, 4), 1),
    "one image tall": (lambda bias: nn.Conv2d(2, 2, 3, padding=1, bias=bias), (2, 5, 6), 1),
}


class Changed(nn.Module):
    """A layer whose outputs are changed in place, and a readout."""

    def __init__(self, layer, change, width):
        super().__init__()
        self.layer, self.readout, self.change = layer, nn.Linear(width, 2), change

    def forward(self, x):
        return self.readout(self.change(self.layer(x), x).sin())


class CalledTwice(nn.Module):
    """One layer called twice; one of the outputs, or both, are changed in place."""

    def __init__(self, layer, change, width, which):
        super().__init__()
        self.layer, self.readout, self.change, self.which = layer, nn.Linear(width, 2), change, which

    def forward(self, x):
        first = self.layer(x)
        if self.which in ("first", "both"):
            first = self.change(first, x)
        h = first.tanh()
        second = self.layer(h)
        if self.which in ("second", "both"):
            second = self.change(second, h)
        return self.readout(second.sin() + h)


def check(model, x, samples, at):
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    correction = consequent.attach(optimizer, model, damping=DAMPING, at=at)

    def loss_of(m):
        m.recomputes = m is model  # not what is expected of it
        torch.manual_seed(7)  # the same outputs are dropped each time
        return 0.5 * (m(x) - 0.5).square().sum() / samples

    for _ in range(2):
        optimizer.zero_grad()
        before, grads = weights(model), corrected(model, loss_of, samples=samples)
        loss_of(model).backward()
        optimizer.step()
        assert_stepped(model, before, grads)
    assert correction.samples == samples
    assert correction.counters.edited == 0


@AT
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("change", IN_PLACE)
@pytest.mark.parametrize("call", CALLS)
def test_outputs_changed_in_place(call, change, bias, at):
    torch.manual_seed(0)
    make, shape, samples = CALLS[call]
    model = Changed(make(bias), IN_PLACE[change], shape[-1]).double()
    check(model, torch.randn(shape, dtype=torch.float64), samples, at)


@AT
@pytest.mark.parametrize("which", ["first", "second", "both"])
@pytest.mark.parametrize("change", ["relu", "+=", "masked_fill_", "dropout"])
@pytest.mark.parametrize("call", ["2-D wide", "3-D wide", "3-D tall", "1-D", "one image tall"])
def test_a_layer_called_twice(call, change, which, at):
    torch.manual_seed(0)
    make, shape, samples = CALLS[call]
    model = CalledTwice(make(True), IN_PLACE[change], shape[-1], which).double()
    check(model, torch.randn(shape, dtype=torch.float64), samples, at)


@AT
@pytest.mark.parametrize("call", ["3-D wide", "3-D tall"])
def test_outputs_changed_in_place_inside_of_a_checkpoint(call, at):
    torch.manual_seed(0)
    make, shape, samples = CALLS[call]

    class Checkpointed(Changed):
        def forward(self, x):
            if not self.recomputes:
                return super().forward(x)
            return checkpoint(super().forward, x, use_reentrant=False)

    model = Checkpointed(make(True), IN_PLACE["relu"], shape[-1]).double()
    check(model, torch.randn(shape, dtype=torch.float64), samples, at)
