"""What TF32 in the last product does to the update of dense layers with many rows, where the user allows it.

Emulated: numbers are cut to TF32's ten bits, as tensor cores do, and multiplied in float64.
"""

from itertools import pairwise

import torch
from torch import nn

from consequent.maths.damping import DEFAULT
from consequent.maths.ridge import solve_on


def cut(values):
    """To TF32, toward zero."""
    return (values.float().view(torch.int32) & -0x2000).view(torch.float32).double()


def test_the_update_with_a_rounded_last_product():
    """In a deep network that has learnt nothing yet, whose rows are nearly alike: about the worst that there is."""
    torch.manual_seed(0)
    widths = [768, *[400] * 6, 10]
    layers = [nn.Linear(*pair).double() for pair in pairwise(widths)]
    x = torch.rand(300, 768, dtype=torch.float64) - 0.5
    inputs, outputs = [], []
    for layer in layers:
        inputs.append(torch.cat([x, torch.ones(300, 1, dtype=torch.float64)], dim=1))
        outputs.append(layer(x))
        x = outputs[-1].relu()
    loss = nn.functional.cross_entropy(outputs[-1], torch.randint(0, 10, (300,)))
    errors = []
    for X, dZ in zip(inputs, torch.autograd.grad(loss, outputs), strict=True):
        X = X.detach()
        level = DEFAULT.level(*X.shape)(X @ X.mT)
        A = torch.linalg.solve(X @ X.mT + level * torch.eye(300, dtype=torch.float64), dZ)
        assert torch.allclose(A.mT @ X, solve_on("samples", X, dZ, level))
        errors.append([(cut(a).mT @ cut(X) - a.mT @ X).norm() / (a.mT @ X).norm() for a in (A, dZ)])
    updates, plain = torch.tensor(errors).unbind(1)
    assert plain.max() < 1.5e-3
    assert updates.median() < 1e-2
    assert updates.max() < 2e-2
