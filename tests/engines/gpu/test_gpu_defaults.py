"""On a GPU: the bound and averaged moments give the numbers of a CPU in float64, and nothing waits for the device."""

import pytest
import torch
from gpu.test_gpu import batch, full_precision, net, weights  # noqa: F401
from torch import nn

import consequent

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

NETS = {
    "convolutions": lambda: (net(), batch("cpu")[0]),
    "few rows": lambda: (dense(), batch("cpu")[0].flatten(1)),
    "more rows than one kernel takes": lambda: (dense(), batch("cpu", samples=100)[0].flatten(1)),
}


def dense():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(192, 150), nn.ReLU(), nn.Linear(150, 120), nn.ReLU(), nn.Linear(120, 10))


def train(name, device, dtype, *, steps=5, lr=0.05, waits=True, **options):
    model, inputs = NETS[name]()
    model, inputs = model.to(device, dtype), inputs.to(device, dtype)
    labels = torch.arange(len(inputs), device=device) % 10
    optimizer = consequent.CSGD(model, lr=lr, momentum=0.9, **options)
    try:
        for step in range(steps):
            if step == 2 and not waits:
                torch.cuda.set_sync_debug_mode("error")
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs * (1 + 0.1 * step)), labels).backward()
            optimizer.step()
    finally:
        if not waits:
            torch.cuda.set_sync_debug_mode("default")
    return model, optimizer.correction.counters


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize("lr", [0.005, 1.0])
@pytest.mark.parametrize("name", NETS)
def test_the_bound(name, lr):
    expected, counts = train(name, "cpu", torch.float64, lr=lr)
    actual, its_counts = train(name, "cuda", torch.float32, lr=lr, waits=False)
    moved = (weights(expected) - weights(NETS[name]()[0])).norm()
    assert (weights(actual) - weights(expected)).norm() <= 1e-2 * moved
    assert its_counts.bounded == counts.bounded
    assert (counts.bounded > 0) == (lr == 1.0)


@pytest.mark.parametrize("options", [{"averaging": 0.5}, {"averaging": 0.9, "refresh": 2}], ids=str)
@pytest.mark.parametrize("name", NETS)
def test_averaged_moments(name, options):
    expected, _ = train(name, "cpu", torch.float64, **options)
    actual, _ = train(name, "cuda", torch.float32, waits=False, **options)
    moved = (weights(expected) - weights(NETS[name]()[0])).norm()
    assert (weights(actual) - weights(expected)).norm() <= 1e-2 * moved


def test_a_refreshed_step_in_a_cuda_graph_is_refused():
    model, inputs = dense().cuda(), torch.randn(16, 192, device="cuda")
    optimizer = consequent.CSGD(model, lr=0.01, refresh=4)

    def step():
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    def captured():
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            step()

    for _ in range(3):
        step()
    with pytest.raises(RuntimeError, match="averaging= or refresh= cannot be captured"):
        captured()
