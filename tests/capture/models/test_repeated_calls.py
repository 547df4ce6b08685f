"""A layer called several times in one forward pass: one solve over the inputs of all its calls."""

import pytest
import torch
from torch import nn

from models.expected import check_training, half_squares


class Recurrent(nn.Module):
    """The same two layers at every time step."""

    def __init__(self, layer, steps):
        super().__init__()
        self.layer, self.steps = layer, steps
        self.readout = nn.Linear(3, 2)

    def forward(self, x):
        for _ in range(self.steps):
            x = torch.tanh(self.layer(x))
        return self.readout(x.flatten(2).mean(-1) if x.ndim > 2 else x)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("samples", [2, 9])  # few rows: sample side; many: feature side
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_linear(samples, steps, bias):
    torch.manual_seed(0)
    model = Recurrent(nn.Linear(3, 3, bias=bias), steps).double()
    x = torch.randn(samples, 3, dtype=torch.float64)
    correction = check_training(model, lambda m: half_squares(m(x)), samples)
    assert list(correction.corrected) == ["layer", "readout"]


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("size", [1, 5])
def test_convolution(size, groups):
    torch.manual_seed(0)
    model = Recurrent(nn.Conv2d(3, 3, 3, padding=1, groups=groups), 3).double()
    x = torch.randn(2, 3, size, size, dtype=torch.float64)
    check_training(model, lambda m: half_squares(m(x)), 2)


@pytest.mark.filterwarnings("ignore:the loss is taken for a mean over 8 samples")  # with reason: there are 12 outputs
def test_calls_on_parts_of_the_batch_do_not_change_the_number_of_samples():
    """A layer that sees six rows of eight samples twice still belongs to a mean over eight."""

    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(30, 2)

        def forward(self, x):
            return torch.cat([self.layer(x[:6]), self.layer(x[2:])])

    torch.manual_seed(0)
    x = torch.randn(8, 30, dtype=torch.float64)
    check_training(Halves().double(), lambda m: half_squares(m(x)) * 12 / 8, 8)


def test_a_call_whose_output_is_not_used_has_no_part_in_the_solve():
    class Wasteful(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(30, 2)

        def forward(self, x):
            self.layer(3 * x + 1)
            return self.layer(x)

    torch.manual_seed(0)
    x = torch.randn(4, 30, dtype=torch.float64)
    check_training(Wasteful().double(), lambda m: half_squares(m(x)), 4)


def test_calls_of_different_shapes():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(self.layer(x).mean(1)) + self.layer(x[:, 0])

    torch.manual_seed(0)
    x = torch.randn(3, 5, 4, dtype=torch.float64)
    check_training(Mixed().double(), lambda m: half_squares(m(x)), 3)


class Dilations(nn.Module):
    """One weight at two dilations: one convolution whose settings are changed, or whose forward does both."""

    def __init__(self, conv, how):
        super().__init__()
        self.conv, self.how, self.readout = conv, how, nn.Conv2d(3, 2, 1)
        if how == "two convolutions":
            self.other = nn.Conv2d(2, 3, 3, padding=2, dilation=2)
            self.other.weight, self.other.bias = conv.weight, conv.bias

    def forward(self, x):
        if self.how == "its own forward":
            return self.readout(torch.tanh(self.conv(x)))
        first = self.conv(x)
        if self.how == "two convolutions":
            return self.readout(torch.tanh(first + self.other(x)))
        self.conv.dilation, self.conv.padding = (2, 2), (2, 2)
        second = self.conv(x)
        self.conv.dilation, self.conv.padding = (1, 1), (1, 1)
        return self.readout(torch.tanh(first + second))


class BothDilations(nn.Conv2d):
    def forward(self, x):
        first, second = (nn.functional.conv2d(x, self.weight, self.bias, padding=d, dilation=d) for d in (1, 2))
        return first + second


@pytest.mark.parametrize("at", ["step", "backward"])
@pytest.mark.parametrize("how", ["settings changed", "its own forward"])
@pytest.mark.parametrize("size", [2, 6])  # few positions: sample side; many: feature side
def test_a_convolution_called_with_two_dilations(size, how, at):
    torch.manual_seed(0)
    kind = BothDilations if how == "its own forward" else nn.Conv2d
    model = Dilations(kind(2, 3, 3, padding=1), how).double()
    twin = Dilations(nn.Conv2d(2, 3, 3, padding=1), "two convolutions").double()
    twin.load_state_dict(model.state_dict(), strict=False)
    x = torch.randn(2, 2, size, size, dtype=torch.float64)
    correction = check_training(model, lambda m: half_squares(m(x)), 2, twin=twin, at=at)
    assert list(correction.corrected) == ["conv", "readout"]
