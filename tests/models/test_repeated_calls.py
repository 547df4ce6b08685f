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
