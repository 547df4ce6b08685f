"""Small networks and passes for the tests of training loops."""

import copy

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import consequent

RHO = ("relative", 0.1)  # the default of SGD


def network(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(6, 8, 3, stride=2, bias=False),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(8 * 9, 40),
        nn.ReLU(),
        nn.Linear(40, 10),
    ).to(dtype)


def batch(samples=12, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 3, 8, 8, generator=generator, dtype=torch.float64).to(dtype)
    return x, torch.randint(0, 10, (samples,), generator=generator)


def loss_of(model, x, y):
    return F.cross_entropy(model(x), y)


def one_pass(model, samples=12, seed=0):
    x, y = batch(samples, next(model.parameters()).dtype, seed)
    loss_of(model, x, y).backward()


def attached(model, lr=0.1, optimizer=torch.optim.SGD, **options):
    """A corrected copy of the model, and its optimiser."""
    copied = copy.deepcopy(model)
    made = optimizer(copied.parameters(), lr=lr)
    consequent.attach(made, copied, **options)
    return copied, made


class Recurring(nn.Module):
    """One layer is called k times, two others have one weight."""

    def __init__(self, calls):
        super().__init__()
        self.calls = calls
        self.enter, self.again, self.leave = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x):
        h = torch.tanh(self.enter(x))
        for _ in range(self.calls):
            h = torch.tanh(self.again(h))
        return self.leave(self.second(torch.tanh(self.first(h))))


def half_squares(one, x):
    (one(x).square().sum() / 2 / len(x)).backward()
