"""A recurrent layer and a readout, and what is to become of their gradients."""

import copy

import reference
import torch
from recurrent_reference import Loops
from torch import nn

import consequent

DAMPING = ("relative", 0.2)


class Model(nn.Module):
    def __init__(self, kind=nn.GRU, **options):
        super().__init__()
        self.recurrent = kind(3, 4, batch_first=True, **options)
        self.readout = nn.Linear(4, 2)

    def forward(self, x):
        return self.readout(self.recurrent(x)[0])


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def squares(outputs):
    return 0.5 * (outputs - torch.linspace(-1, 2, outputs.numel(), dtype=outputs.dtype).view(outputs.shape)).square()


def made(kind=nn.GRU, **options):
    torch.manual_seed(0)
    model = Model(kind, **options).double()
    return model, copy.deepcopy(model)


def attached(model, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    options = {"relative_damping": DAMPING[1], "loss_reduction": "sum", **options}
    return optimizer, consequent.attach(optimizer, model, **options)


def split(model):
    weights, biases = ([p for p in model.parameters() if p.ndim == ndim] for ndim in (2, 1))
    return [torch.optim.SGD(weights, lr=0.1), torch.optim.SGD(biases, lr=0.1)]


class Expected:
    """The twin's backward passes, and what is to become of its gradients."""

    def __init__(self, twin):
        self.twin, self.loops, self.calls = twin, Loops(twin.recurrent), []

    def __call__(self, x):
        hidden = torch.stack(self.loops(list(x.unbind(0))))
        zero = torch.zeros(*hidden.shape[:-1], 2, dtype=hidden.dtype, requires_grad=True)
        self.calls.append((hidden.detach(), zero))
        return self.twin.readout(hidden) + zero

    def correct(self, damping=DAMPING, scale=1.0):
        self.loops.correct(damping, scale)
        X = torch.cat([hidden.flatten(0, 1) for hidden, _ in self.calls])
        X = torch.cat([X, torch.ones(len(X), 1, dtype=X.dtype)], dim=1)
        dZ = torch.cat([zero.grad.flatten(0, 1) for _, zero in self.calls])
        new = torch.as_tensor(reference.consequential_gradient(X.numpy(), dZ.numpy(), damping)) * scale
        self.twin.readout.weight.grad, self.twin.readout.bias.grad = new[:, :-1], new[:, -1]
