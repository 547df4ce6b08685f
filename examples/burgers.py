"""A physics-informed network: Burgers' equation u_t + u u_x = ν u_xx, from -sin πx. It draws burgers.png."""

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn
from torch.func import grad, hessian

import consequent

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)  # float32 ends at about a hundredth of this accuracy
VISCOSITY = 0.01 / torch.pi

layers = [nn.Linear(2, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 1)]
model = nn.Sequential(*layers)


def equation(model: nn.Module, point: Tensor) -> Tensor:
    """What one point (t, x) leaves over of the equation."""

    def u(point: Tensor) -> Tensor:
        return model(point).squeeze()

    slope, curvature = grad(u)(point), hessian(u)(point)
    return slope[0] + u(point) * slope[1] - VISCOSITY * curvature[1, 1]


def edge(model: nn.Module, point: Tensor, value: Tensor) -> Tensor:
    """What one point leaves over where the value is known: at the start, and at both ends."""
    return model(point) - value


quasi_random = torch.quasirandom.SobolEngine(2, scramble=True, seed=0)
points = quasi_random.draw(1500, dtype=torch.float64) * torch.tensor([1.0, 2.0]) - torch.tensor([0.0, 1.0])
start = torch.stack([torch.zeros(100), torch.linspace(-1, 1, 100)], 1)
ends = torch.stack([torch.linspace(0, 1, 50).repeat(2), torch.ones(100)], 1)
ends[:50, 1] = -1
known = torch.cat([start, ends]), torch.cat([-torch.sin(torch.pi * start[:, 1:]), torch.zeros(100, 1)])

solver = consequent.WholeNetwork(model, {"equation": equation, "edge": edge}, weights={"edge": 10.0}, progress=10)
for _ in range(100):
    loss = solver.step(equation=points, edge=known)
print(f"loss {loss:.1e}")

grid = torch.cartesian_prod(torch.linspace(0, 1, 200), torch.linspace(-1, 1, 200))
with torch.no_grad():
    picture = model(grid).view(200, 200).T
plt.imshow(picture, origin="lower", extent=(0, 1, -1, 1), aspect="auto", cmap="RdBu_r")
plt.colorbar(label="u")
plt.xlabel("time t")
plt.ylabel("place x")
plt.savefig("burgers.png")
