"""What a step does to each layer's outputs, for the very mini-batch it was computed from.

Backpropagation wants to move the outputs by −μΔZ, and moves them somewhere else: samples disturb each other through
their correlations. The table shows by how much, and what the correction makes of it.
"""

import torch
from torch import nn

import consequent

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
consequent.attach(optimizer, model, damping=1e-3)
inputs, labels = torch.rand(32, 64), torch.randint(0, 10, (32,))


def closure() -> None:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), labels).backward()


print(consequent.foresight(optimizer, model, closure))  # in the place of closure() and optimizer.step()
