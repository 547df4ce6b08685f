"""A model in two optimisers, one for its matrices and one for the rest."""

import torch
from torch import nn

from models.expected import half_squares

LRS = (0.1, 0.02)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 2)).double()


def inputs(samples, seed=0):
    """Few samples are solved on the sample side, many on the feature side."""
    return torch.randn(samples, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def matrices_and_rest(model):
    """As Muon wants them: matrices, and all else."""
    return [p for p in model.parameters() if p.ndim == 2], [p for p in model.parameters() if p.ndim != 2]


def two_optimizers(model, kinds=(torch.optim.SGD, torch.optim.SGD), lrs=LRS, **options):
    return [kind(part, lr=lr, **options) for kind, part, lr in zip(kinds, matrices_and_rest(model), lrs, strict=True)]


def one_optimizer(model, lrs=LRS):
    return torch.optim.SGD([{"params": part, "lr": lr} for part, lr in zip(matrices_and_rest(model), lrs, strict=True)])


def zero_all(optimizers):
    for optimizer in optimizers:
        optimizer.zero_grad()


def step_once(model, x, optimizer):
    half_squares(model(x)).backward()
    optimizer.step()
