"""Losses that may not be the mean they are taken for: what a first step says of them, and small models."""

import warnings

import torch
from torch import nn
from torch.nn import functional

import consequent

torch.manual_seed(0)
SEQUENCES, LABELS = torch.randint(0, 7, (4, 6)), torch.randint(0, 5, (4, 6))
INPUTS, TARGETS = torch.linspace(-1, 1, 30).view(5, 6), torch.linspace(0, 1, 20).view(5, 4)
CLASSES = torch.arange(5) % 4


def warnings_of(model, loss_of, steps=2, make=torch.optim.SGD, **options):
    optimizer = make(model.parameters(), lr=0.01)
    consequent.attach(optimizer, model, damping=0.1, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
    return [str(warning.message) for warning in caught if warning.category is consequent.ConsequentWarning]


class Tokens(nn.Module):
    """A vector of logits for every token."""

    def __init__(self, pick=lambda z: z):
        super().__init__()
        self.table, self.head, self.pick = nn.Embedding(7, 3), nn.Linear(3, 5), pick

    def forward(self, tokens):
        return self.pick(self.head(self.table(tokens)))


def cross_entropy(outputs, **options):
    return functional.cross_entropy(outputs.mT, LABELS, **options)


def dense(outputs):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, outputs))


def of_classes(outputs, **options):
    return functional.cross_entropy(outputs, CLASSES, **options)
