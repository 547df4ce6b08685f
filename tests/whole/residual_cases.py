"""Networks and residuals as people write them, and the Jacobian by autograd, one residual after the other."""

from itertools import pairwise

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp
from torch.nn.utils.parametrizations import weight_norm


def perceptron(*widths, bias=True):
    layers = [m for i, o in pairwise(widths) for m in (nn.Linear(i, o, bias=bias), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


class Inverse(nn.Module):
    """A network and a coefficient of the equation, which is sought as well."""

    def __init__(self):
        super().__init__()
        self.net, self.coefficient = perceptron(2, 5, 1), nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        return self.net(x)


class Shared(nn.Module):
    """A layer called twice, a matrix used as a layer's weight and otherwise, a norm."""

    def __init__(self):
        super().__init__()
        self.first, self.inner, self.norm = nn.Linear(2, 4), nn.Linear(4, 4), nn.LayerNorm(4)
        self.matrix = nn.Parameter(torch.randn(3, 4))

    def forward(self, x):
        x = self.norm(self.inner(torch.tanh(self.inner(torch.tanh(self.first(x))))))
        return F.linear(x, self.matrix).sum() + self.matrix.square().sum() + (self.matrix @ x).prod()


class Picture(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.last = nn.Conv2d(1, 2, 2), nn.Linear(2, 2)

    def forward(self, x):
        return self.last(self.conv(x.expand(2, 2)[None, None]).flatten())


def scalar(model):
    return lambda x: model(x).squeeze()


def fit(model, x):
    return model(x) - x.sum().sin()


def laplacian(model, x):
    return hessian(scalar(model))(x).trace() + model(x).squeeze() ** 2


def laplacian_forward(model, x):
    return jacfwd(jacfwd(scalar(model)))(x).trace()


def laplacian_mixed(model, x):
    return jacrev(jacfwd(scalar(model)))(x).trace()


def burgers(model, x):
    u, slope = scalar(model)(x), grad(scalar(model))(x)
    return slope[0] + u * slope[1] - 0.1 * grad(lambda x: grad(scalar(model))(x)[1])(x)[1]


def batched_burgers(model, x):
    x = x.clone().requires_grad_()
    u = model(x)
    (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(slope[:, 1].sum(), x, create_graph=True)
    return slope[:, 0] + u[:, 0] * slope[:, 1] - 0.1 * second[:, 1]


def along(model, x):
    return jvp(model, (x,), (torch.ones_like(x),))[1] + vjp(model, x)[1](torch.ones_like(model(x)))[0][:1]


def third(model, x):
    return grad(lambda t: hessian(lambda s: model(torch.stack([s, x[1]])).sum())(t))(x[0])


def with_coefficient(model, x):
    return grad(scalar(model))(x)[0] - model.coefficient * hessian(scalar(model))(x)[1, 1]


CASES = {
    "regression, three outputs": (lambda: perceptron(2, 7, 3), fit),
    "no biases": (lambda: perceptron(2, 6, 1, bias=False), laplacian),
    "wide": (lambda: perceptron(2, 40, 40, 1), fit),
    "Laplacian": (lambda: perceptron(2, 6, 5, 1), laplacian),
    "Laplacian, forward mode": (lambda: perceptron(2, 6, 5, 1), laplacian_forward),
    "Laplacian, mixed": (lambda: perceptron(2, 6, 5, 1), laplacian_mixed),
    "Burgers": (lambda: perceptron(2, 6, 5, 1), burgers),
    "jvp and vjp": (lambda: perceptron(2, 6, 1), along),
    "third derivative": (lambda: perceptron(2, 4, 1), third),
    "a coefficient": (Inverse, with_coefficient),
    "weight norm": (lambda: nn.Sequential(weight_norm(nn.Linear(2, 4)), nn.Tanh(), nn.Linear(4, 1)), laplacian),
    "shared, tied, normed": (Shared, fit),
    "convolution": (Picture, fit),
    "two layers with one weight": (lambda: tied(), fit),
}


def tied():
    model = perceptron(2, 3, 3, 3)
    model[4].weight = model[2].weight
    return model


def made(name, samples=9):
    torch.manual_seed(0)
    model, residual = CASES[name][0]().double(), CASES[name][1]
    return model, residual, torch.randn(samples, 2, dtype=torch.float64)


def naive_jacobian(model, residual, *batch):
    """Values and Jacobian, sample by sample, component by component, by plain backward passes."""
    parameters = {name: p.detach().requires_grad_() for name, p in model.named_parameters() if p.requires_grad}

    class Called(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, *sample):
            return residual(self.model, *sample)

    values, rows = [], []
    for sample in zip(*batch, strict=True):
        found = functional_call(Called(), {f"model.{name}": p for name, p in parameters.items()}, sample).flatten()
        for value in found:
            grads = torch.autograd.grad(value, list(parameters.values()), retain_graph=True, allow_unused=True)
            pairs = zip(grads, parameters.values(), strict=True)
            rows.append(torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in pairs]))
            values.append(value.detach())
    return torch.stack(values), torch.stack(rows)


def vector(model):
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
