"""Least squares by a network: the tip of a robot arm from the angles of its joints, with WholeNetwork and with Adam."""

import copy
import time

import torch
from torch import Tensor, nn

import consequent

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)


def tip(angles: Tensor) -> Tensor:
    """Where an arm of three links ends."""
    directions, lengths = angles.cumsum(1), torch.tensor([1.0, 0.8, 0.6])
    return torch.stack([(lengths * directions.cos()).sum(1), (lengths * directions.sin()).sum(1)], 1)


def residual(model: nn.Module, angles: Tensor, target: Tensor) -> Tensor:
    """The residual of one sample."""
    return model(angles) - target


angles, others = 3 * torch.rand(400, 3) - 1.5, 3 * torch.rand(2000, 3) - 1.5
model = nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 2))
twin = copy.deepcopy(model)


def error(model: nn.Module) -> float:
    """On samples that were not trained on."""
    with torch.no_grad():
        return float((model(others) - tip(others)).square().mean().sqrt())


solver, begin = consequent.WholeNetwork(model, residual), time.process_time()
for _ in range(60):
    solver.step(angles, tip(angles))
seconds = time.process_time() - begin
print(solver)
print(f"WholeNetwork: error {error(model):.1e}")

optimizer, begin = torch.optim.Adam(twin.parameters(), lr=0.01), time.process_time()
while time.process_time() - begin < seconds:  # as much processor time
    optimizer.zero_grad()
    residual(twin, angles, tip(angles)).square().mean().backward()
    optimizer.step()
print(f"Adam: error {error(twin):.1e}")
