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
correction = consequent.attach(optimizer, model, damping=1e-3, foresight=True)

inputs, labels = torch.rand(32, 64), torch.randint(0, 10, (32,))
nn.functional.cross_entropy(model(inputs), labels).backward()
optimizer.step()

foresight = correction.foresight()
print(foresight)
interference = foresight["0"].interference[0]
off_diagonal = interference - interference.diag().diag()
print(
    f"\nA sample of the first layer meets itself with {interference.diag().mean():.1f} and each of the others with ",
    end="",
)
print(f"{off_diagonal.sum() / (32 * 31):.1f} on average: that is how much of every change spills over.")
