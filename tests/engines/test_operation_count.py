"""The work of a step is counted, since a time cannot be tested: calls into torch, and multiplications."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import consequent
from consequent_lab.models import mlp, residual_net


@pytest.fixture(autouse=True)
def _same_numbers():
    """How many calls a factorisation takes depends on them a little."""
    torch.manual_seed(0)


class Calls(TorchDispatchMode):
    """Counts calls into torch that do something; views cost no work."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += not function.is_view
        return function(*args, **(kwargs or {}))


def counted(model, inputs, labels, *, corrected, counter):
    """What one step costs, after two that look at everything for the first time."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if corrected:
        consequent.attach(optimizer, model, damping=0.1)
    for step in range(3):
        optimizer.zero_grad()
        if step < 2:
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    with counter:
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    return counter


def calls_per_layer(make, few, many, inputs):
    labels = torch.zeros(len(inputs), dtype=torch.long)
    extra = []
    for layers in (few, many):
        model = make(layers)
        plain = counted(model, inputs, labels, corrected=False, counter=Calls()).count
        extra.append(counted(model, inputs, labels, corrected=True, counter=Calls()).count - plain)
    return (extra[1] - extra[0]) / (many - few)


def test_calls_per_dense_layer():
    """On the sample side: Gram matrix, factorisation, solve, a look at a few rows, the product, finiteness."""
    calls = calls_per_layer(lambda layers: mlp(40, [40] * layers, 10), 2, 6, torch.randn(8, 40))
    assert calls <= 22


def test_calls_per_convolution():
    """On the feature side: the auto-correlation with its border, factorisation and solve."""

    def make(layers):
        body = [module for _ in range(layers) for module in (nn.Conv2d(4, 4, 3, padding=1), nn.ReLU())]
        return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten())

    assert calls_per_layer(make, 2, 6, torch.randn(16, 4, 8, 8)) <= 75


@pytest.mark.parametrize(
    ("model", "shape", "most"),
    [
        (lambda: mlp(3072, [800] * 8, 10), (32, 3072), 1.48),
        (lambda: residual_net((16, 32, 64), 3, batch_norm=False), (16, 3, 32, 32), 1.66),
    ],
    ids=["mlp", "resnet20"],
)
def test_multiplications_beside_those_of_a_plain_step(model, shape, most):
    """Of products and convolutions; factorisations are not counted by torch, and small beside them.

    (Before patches were multiplied by ``bmm``, 1.53 were counted: torch does not see ``baddbmm_``.)
    """
    model, inputs, labels = model(), torch.randn(shape), torch.zeros(shape[0], dtype=torch.long)
    flops = [
        counted(model, inputs, labels, corrected=corrected, counter=FlopCounterMode(display=False)).get_total_flops()
        for corrected in (False, True)
    ]
    assert 1 < flops[1] / flops[0] <= most, flops[1] / flops[0]
