"""On a GPU a step promises no more than the loss has, as on a CPU in float64, and nothing waits for the device."""

import pytest
import torch
from gpu.test_gpu import batch, full_precision, weights  # noqa: F401
from gpu.test_gpu_defaults import NETS as WITHOUT_NORMS
from torch import nn
from torch.nn.functional import cross_entropy

import consequent

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

RATES = (0.001, 3.0)  # at which no step promises too much, and most do
NETS = WITHOUT_NORMS | {"norms, which are not corrected": lambda: (normed(), batch("cpu")[0].flatten(1))}


def normed():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(192, 50), nn.LayerNorm(50), nn.ReLU(), nn.Linear(50, 10))


def made(name, device, dtype, lr, **options):
    model, inputs = NETS[name]()
    model, inputs = model.to(device, dtype), inputs.to(device, dtype)
    labels = torch.arange(len(inputs), device=device) % 10
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    correction = consequent.attach(optimizer, model, **{"promise": 0.5} | options)

    def step(factor=1.0, scaler=None, clip=None):
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs * factor), labels)
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None:
            scaler.unscale_(optimizer)
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()

    return model, correction, step


def assert_as_on_a_cpu(name, model, expected, tolerance=1e-2):
    moved = (weights(expected) - weights(NETS[name]()[0])).norm()
    assert (weights(model) - weights(expected)).norm() <= tolerance * moved


@pytest.mark.parametrize("bound", [0.2, None])
@pytest.mark.parametrize("lr", RATES)
@pytest.mark.parametrize("name", NETS)
def test_as_on_a_cpu(name, lr, bound):
    expected, counted, step = made(name, "cpu", torch.float64, lr, bound=bound)
    model, correction, its_step = made(name, "cuda", torch.float32, lr, bound=bound)
    try:
        for number in range(5):
            step(1 + 0.1 * number)
            if number == 2:
                torch.cuda.set_sync_debug_mode("error")
            its_step(1 + 0.1 * number)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_as_on_a_cpu(name, model, expected)
    assert correction.counters == counted.counters
    assert (correction.counters.promised > 1) == (lr == RATES[1])


@pytest.mark.parametrize("name", NETS)
def test_scaled_and_clipped(name):
    expected, counted, step = made(name, "cpu", torch.float64, 1000.0)
    model, correction, its_step = made(name, "cuda", torch.float32, 1000.0)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    for number in range(3):
        step(1 + 0.1 * number, clip=0.1)
        its_step(1 + 0.1 * number, scaler, clip=0.1)
    assert_as_on_a_cpu(name, model, expected)
    assert correction.counters.promised == counted.counters.promised > 0


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("lr", RATES)
def test_in_a_cuda_graph(name, lr):
    expected, counted, step = made(name, "cpu", torch.float64, lr)
    model, correction, its_step = made(name, "cuda", torch.float32, lr)
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            its_step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        its_step()
    for _ in range(3):
        graph.replay()
    for _ in range(6):
        step()
    assert_as_on_a_cpu(name, model, expected)
    assert correction.counters.steps == 6
    assert correction.counters.promised == counted.counters.promised
    assert (correction.counters.promised > 1) == (lr == RATES[1])


def two_towers():
    torch.manual_seed(0)
    towers = [nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 3)) for _ in range(2)]
    return nn.ModuleList(towers)


def test_a_pass_that_was_zeroed_does_not_count():
    found = []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.float32)):
        model = two_towers().to(device, dtype)
        inputs = torch.linspace(-1, 1, 180, device=device, dtype=dtype).view(9, 20).sin()
        optimizer = torch.optim.SGD(model.parameters(), lr=30.0)
        correction = consequent.attach(optimizer, model, promise=1.0, bound=None, loss_reduction="mse")
        for _ in range(3):
            (100 * model[0](inputs).square().mean()).backward()
            optimizer.zero_grad(set_to_none=False)
            model[1](inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append((weights(model[1]), correction.counters.promised))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-3, atol=1e-4)
    assert found[0][1] == found[1][1] == 3


def losses(model, inputs):
    return model(inputs).square().mean()


def test_a_negative_loss_is_refused_at_the_first_step():
    model, inputs = NETS["few rows"]()
    model, inputs = model.cuda(), inputs.cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    consequent.attach(optimizer, model, promise=1.0)
    (losses(model, inputs) - 100).backward()
    with pytest.raises(ValueError, match="is for losses that are never below zero, and this one is -9"):
        optimizer.step()


@pytest.mark.parametrize("name", ["few rows", "convolutions"])
@pytest.mark.parametrize("bad", [-100.0, float("nan"), float("inf")])
def test_later_the_device_skips_a_step_whose_loss_is_none(name, bad):
    model, inputs = NETS[name]()
    model, inputs = model.cuda(), inputs.cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    correction = consequent.attach(optimizer, model, promise=1.0)
    for added in (0.0, bad, 0.0):
        before = weights(model)
        optimizer.zero_grad()
        (losses(model, inputs) + added).backward()
        optimizer.step()
        assert torch.equal(weights(model), before) == (added != 0)
    assert correction.counters.skipped == 1
    assert correction.counters.steps == 3


def test_a_rate_on_the_device_is_refused():
    model, inputs = NETS["few rows"]()
    model, inputs = model.cuda(), inputs.cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1, device="cuda"))
    consequent.attach(optimizer, model, promise=1.0)
    losses(model, inputs).backward()
    with pytest.raises(RuntimeError, match="its learning rate no tensor on a GPU"):
        optimizer.step()
