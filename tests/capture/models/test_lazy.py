"""Lazy layers: a clear error before they have a weight, ordinary layers afterwards."""

import pytest
import torch
from torch import nn

import consequent
from models.expected import check_training, half_squares


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.LazyConv2d(3, 3), nn.Flatten(), nn.Tanh(), nn.LazyLinear(2)).double()


def test_before_the_first_forward_pass():
    model = make_model()
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"'0' is lazy and has no weight yet: run one forward pass before attaching"):
        consequent.attach(optimizer, model)
    assert not model._forward_hooks
    assert type(model[0]) is nn.LazyConv2d
    with pytest.raises(ValueError, match="lazy"):
        consequent.CSGD(model, lr=0.1)


def test_after_the_first_forward_pass():
    model = make_model()
    x = torch.randn(3, 2, 4, 4, dtype=torch.float64)
    model(x)
    correction = check_training(model, lambda m: half_squares(m(x)), 3)
    assert list(correction.corrected) == ["0", "3"]
