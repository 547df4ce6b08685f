"""Poisson's equation Δu = f with derivatives by torch.autograd.grad for a whole batch, as many scripts have it."""

import torch
from torch import Tensor, nn

import consequent

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
model = nn.Sequential(nn.Linear(2, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 1))


def equation(model: nn.Module, x: Tensor) -> Tensor:
    """The residual at each point of a batch."""
    x = x.clone().requires_grad_()
    u = model(x)
    (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    second = [torch.autograd.grad(slope[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(2)]
    return sum(second) + 2 * torch.pi**2 * (torch.pi * x).sin().prod(1)


def edge(model: nn.Module, x: Tensor) -> Tensor:
    """Zero is wanted on the edge of the square."""
    return model(x)


points, sides = torch.rand(300, 2), torch.rand(80, 2)
for side in range(4):
    sides[side::4, side // 2] = side % 2

solver = consequent.WholeNetwork(model, {"equation": equation, "edge": edge}, weights={"edge": 100.0}, batched=True)
for _ in range(40):
    solver.step(equation=points, edge=sides)
with torch.no_grad():
    test = torch.rand(2000, 2)
    truth = (torch.pi * test).sin().prod(1)
    print(f"error {float((model(test)[:, 0] - truth).norm() / truth.norm()):.1e}")
