"""``at="backward"`` on a GPU: the numbers of a CPU, nothing waits for the device, and a step may be in a CUDA graph."""

import copy

import pytest
import torch
from torch import nn

import consequent

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(40, 12)
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        return self.head(self.table(x).mean(1))


def dense():
    return nn.Sequential(nn.Linear(40, 32), nn.Tanh(), nn.Linear(32, 24), nn.Tanh(), nn.Linear(24, 5))


def convolutions():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(True),
        nn.ConvTranspose2d(8, 4, 3, stride=2),
        nn.Flatten(),
        nn.LazyLinear(5),
    )


NETS = {
    "few rows": (dense, lambda: torch.randn(8, 40)),
    "many rows": (dense, lambda: torch.randn(200, 40)),
    "convolutions": (convolutions, lambda: torch.randn(6, 3, 7, 7)),
    "tokens": (Tokens, lambda: torch.randint(0, 40, (6, 9))),
}


def made(name):
    torch.manual_seed(0)
    build, data = NETS[name]
    model, x = build(), data()
    model(x)  # lazy layers
    return model, x, torch.randint(0, 5, (len(x),))


def attached(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    include = [nn.Linear, nn.Conv2d, nn.ConvTranspose2d, nn.Embedding]
    present = [kind for kind in include if any(isinstance(module, kind) for module in model.modules())]
    return optimizer, consequent.attach(optimizer, model, damping=0.1, at="backward", include=present)


def take_step(model, optimizer, x, y):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()


def gradients(model):
    return torch.cat([p.grad.double().flatten().cpu() for p in model.parameters()])


@pytest.mark.parametrize("name", NETS)
def test_the_gradients_of_a_cpu_in_float64(name):
    model, x, y = made(name)
    exact = copy.deepcopy(model).double()
    model = model.cuda()
    optimizer, correction = attached(model)
    take_step(model, optimizer, x.cuda(), y.cuda())
    other, _ = attached(exact)
    take_step(exact, other, x.double() if x.is_floating_point() else x, y)
    assert (gradients(model) - gradients(exact)).norm() <= 2e-3 * gradients(exact).norm()
    assert correction.counters.fallen_back == 0


@pytest.mark.parametrize("name", NETS)
def test_nothing_waits_for_the_device(name):
    model, x, y = made(name)
    model, x, y = model.cuda(), x.cuda(), y.cuda()
    optimizer, _ = attached(model)
    for _ in range(3):
        take_step(model, optimizer, x, y)
    torch.cuda.set_sync_debug_mode("error")
    try:
        take_step(model, optimizer, x, y)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["few rows", "many rows", "convolutions"])
def test_a_step_in_a_graph(name):
    model, x, y = made(name)
    model, x, y = model.cuda(), x.cuda(), y.cuda()
    twin = copy.deepcopy(model)
    optimizer, correction = attached(model)
    other, _ = attached(twin)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            take_step(model, optimizer, x, y)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad()
    with torch.cuda.graph(graph):
        take_step(model, optimizer, x, y)
    for _ in range(4):
        graph.replay()
    for _ in range(7):
        take_step(twin, other, x, y)
    torch.cuda.synchronize()
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    assert all((a - b).norm() <= 1e-3 * b.norm() for a, b in pairs)
    assert correction.counters.steps == 7


def test_bad_numbers_are_nan():
    model, x, y = made("few rows")
    model, x, y = model.cuda(), x.cuda(), y.cuda()
    optimizer, _ = attached(model)
    x[0, 0] = torch.inf
    nn.functional.cross_entropy(model(x), y).backward()
    assert model[0].weight.grad.isnan().all()
    assert optimizer.param_groups
