"""A physics-informed network: Burgers' equation u_t + u u_x = ν u_xx, from -sin πx. It draws burgers.png."""

import matplotlib.pyplot as plt
import torch
from torch import nn, vmap
from torch.func import grad, hessian

import consequent

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)  # float32 ends at about a hundredth of this accuracy
layers = [nn.Linear(2, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 1)]
model = nn.Sequential(*layers)


def equation(model, point):  # the residual of the equation at one point (t, x)
    def u(point):
        return model(point).squeeze()

    slope, curvature = grad(u)(point), hessian(u)(point)
    return slope[0] + u(point) * slope[1] - 0.01 / torch.pi * curvature[1, 1]


def edge(model, point, value):  # and of known values: at the start, and at both ends
    return model(point) - value


start = torch.stack([torch.zeros(100), torch.linspace(-1, 1, 100)], 1)
ends = torch.stack([torch.rand(100), torch.randint(2, (100,)) * 2.0 - 1], 1)
known = torch.cat([start, ends]), torch.cat([-torch.sin(torch.pi * start[:, 1:]), torch.zeros(100, 1)])
solver = consequent.WholeNetwork(model, {"equation": equation, "edge": edge}, weights={"edge": 10.0}, progress=10)
for step in range(100):
    if step % 10 == 0:  # new points, more of them where the residual is large: here a shock forms
        many = torch.rand(20_000, 2) * torch.tensor([1.0, 2.0]) - torch.tensor([0.0, 1.0])
        left = vmap(equation, (None, 0))(model, many).detach().abs()
        points = many[torch.multinomial(left + left.mean(), 1500)]
    solver.step(equation=points, edge=known)

grid = torch.cartesian_prod(torch.linspace(0, 1, 200), torch.linspace(-1, 1, 200))
picture = model(grid).detach().view(200, 200).T
plt.imshow(picture, origin="lower", extent=(0, 1, -1, 1), aspect="auto", cmap="RdBu_r")
plt.colorbar(label="u")
plt.xlabel("time t")
plt.ylabel("place x")
plt.savefig("burgers.png")
