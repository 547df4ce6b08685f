"""Short training runs with averages."""

import io

import torch
from loops.networks import one_pass

OPTIONS = {"averaging": 0.9, "refresh": 2}


def train(model, optimizer, passes_of, steps=5):
    for step in range(steps):
        optimizer.zero_grad()
        passes_of(model, step)
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def whole(model, step):
    one_pass(model, samples=12, seed=step)


def saved_and_loaded(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
