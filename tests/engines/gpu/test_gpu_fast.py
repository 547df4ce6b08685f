"""The fast ways on a GPU: kernels, side streams and CUDA graphs give the numbers of the plain form."""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from by_layer import second_moment
from test_gpu import batch, net, weights
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import consequent
from consequent.capture.use import Entry, Use
from consequent.engines.gpu import kernels
from consequent.layers.linear import Linear
from consequent.reports.counters import Counters
from consequent.statistics.row_matrices import RowMatrices
from consequent_lab.models import mlp, residual_net

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def convolutions():
    torch.manual_seed(0)
    return residual_net((8, 16), 2, batch_norm=False).cuda()


def images(samples=16, side=12):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, 3, side, side, generator=generator)
    return inputs.cuda(), torch.randint(0, 10, (samples,), generator=generator).cuda()


def take_step(model, optimizer, inputs, labels, micro_batches=1):
    optimizer.zero_grad()
    for part, wanted in zip(inputs.chunk(micro_batches), labels.chunk(micro_batches), strict=True):
        (nn.functional.cross_entropy(model(part), wanted) / micro_batches).backward()
    optimizer.step()


def trained(model, *, steps=4, micro_batches=1, dtype=torch.float32, device="cuda"):
    model = copy.deepcopy(model).to(device, dtype)
    optimizer = consequent.CSGD(model, lr=0.05, momentum=0.9, nesterov=True, damping=0.1)
    inputs, labels = images()
    for _ in range(steps):
        take_step(model, optimizer, inputs.to(device, dtype), labels.to(device), micro_batches)
    return model, optimizer


def distance(model, other, start):
    return ((weights(model) - weights(other)).norm() / (weights(other) - weights(start)).norm()).item()


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_kernels_and_side_streams_train_as_float64_does(memory_format, micro_batches):
    start = convolutions()
    expected, _ = trained(start, dtype=torch.float64, device="cpu")
    actual, optimizer = trained(start.to(memory_format=memory_format), micro_batches=micro_batches)
    assert distance(actual, expected, start) < 2e-2  # TF32 in the model's own convolutions, four steps
    assert optimizer.correction.counters == Counters(steps=4)


def test_kernels_give_what_torch_gives(monkeypatch):
    start = convolutions()
    actual, _ = trained(start, steps=3)
    monkeypatch.setattr(kernels, "run_on", lambda device: False)
    expected, _ = trained(start, steps=3)
    assert distance(actual, expected, start) < 2e-2


def test_more_rows_than_the_dense_kernel_takes():
    torch.manual_seed(0)
    start = mlp(200, [180, 190], 10).cuda()
    generator = torch.Generator().manual_seed(1)
    inputs, labels = torch.randn(100, 200, generator=generator), torch.randint(0, 10, (100,), generator=generator)
    models = []
    for device, dtype in (("cuda", torch.float32), ("cpu", torch.float64)):
        model = copy.deepcopy(start).to(device, dtype)
        optimizer = consequent.CSGD(model, lr=0.05, damping=0.1)
        for _ in range(4):
            take_step(model, optimizer, inputs.to(device, dtype), labels.to(device))
        assert repr(optimizer.correction).count("solved on the sample side") == 3
        models.append(model)
    assert distance(models[0], models[1], start) < 1e-3


@pytest.mark.parametrize("graph", [False, True])
def test_large_matrices_are_factorised_together(graph):
    """Of two sizes, one of them by blocks; eager, by recordings later on, and in a CUDA graph; against float64."""
    torch.manual_seed(0)
    start = mlp(700, [700, 1100, 1100, 700], 10)
    generator = torch.Generator().manual_seed(1)
    inputs, labels = torch.randn(3000, 700, generator=generator), torch.randint(0, 10, (3000,), generator=generator)
    models = []
    for device, dtype in (("cuda", torch.float32), ("cpu", torch.float64)):
        model = copy.deepcopy(start).to(device, dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        correction = consequent.attach(optimizer, model, damping=1.0)
        batch = inputs.to(device, dtype), labels.to(device)
        if graph and device == "cuda":
            step = captured(model, optimizer, *batch)  # after three
            for _ in range(3):
                step.replay()
        else:
            for _ in range(6):
                take_step(model, optimizer, *batch)
        assert correction.counters == Counters(steps=6)
        models.append(model.cpu())
    assert distance(models[0], models[1], start) < 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_are_multiplied_exactly(dtype):
    rows = torch.randn(300, 400, device="cuda").to(dtype)
    whole = torch.cat([rows.double(), rows.new_ones(300, 1).double()], dim=1)
    moment = second_moment(nn.Linear(400, 3).cuda(), rows, ones=True)[0].double()
    assert (moment - whole.mT @ whole).abs().max() <= 1e-5 * (whole.mT @ whole).abs().max()
    layer = nn.Linear(400, 3).cuda()
    use = Use(layer, Linear.of(layer), layer.weight, None, True, Entry(layer, 300, 0), 300, dtype)
    use.take(rows, torch.zeros(300, 3, device="cuda"))
    gram = RowMatrices([use], [], with_features=True).gram()[0].double()
    assert (gram - rows.double() @ rows.double().mT).abs().max() <= 1e-5 * gram.abs().max()


def test_no_race_between_the_streams():
    """The same numbers every time, also while other work keeps the device busy."""
    start, results = convolutions(), []
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for busy in (False, True, True):
            if busy:
                noise = torch.randn(4096, 4096, device="cuda")
                for _ in range(20):
                    noise = (noise @ noise).clamp(-1, 1)
            results.append(weights(trained(start, steps=10)[0]))
    finally:
        torch.use_deterministic_algorithms(False)
    spread = max((result - results[0]).norm().item() for result in results)
    assert spread <= 1e-3 * (results[0] - weights(start)).norm()


def recomputed(model, inputs):
    return checkpoint(model, inputs, use_reentrant=False)


def brought_back(model, inputs):
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        return model(inputs)


@pytest.mark.parametrize("forward", [recomputed, brought_back])
def test_inputs_that_come_late(forward):
    """Nothing may be read before it is there: the device is kept busy until the step is launched."""
    results = []
    start = convolutions()
    for call in (nn.Module.__call__, forward):
        model = copy.deepcopy(start)
        optimizer = consequent.CSGD(model, lr=0.05, damping=0.1)
        inputs, labels = images()
        for _ in range(3):
            torch.cuda._sleep(50_000_000)
            optimizer.zero_grad()
            nn.functional.cross_entropy(call(model, inputs), labels).backward()
            optimizer.step()
        results.append(model)
    assert distance(results[1], results[0], start) < 1e-3


def captured(model, optimizer, inputs, labels, micro_batches=1):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            take_step(model, optimizer, inputs, labels, micro_batches)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        take_step(model, optimizer, inputs, labels, micro_batches)
    return graph


def perceptron():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), mlp(432, [180, 190, 170], 10)).cuda()


def with_a_plain_layer():
    """Others than the kernels, too, look at whether all numbers are finite."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(432, 180), nn.LayerNorm(180), nn.Linear(180, 10)).cuda()


@pytest.mark.parametrize("make", [net, convolutions, perceptron, with_a_plain_layer])
def test_a_captured_step_trains_as_eager_steps_do(make):
    start = make().cuda()
    inputs, labels = batch("cuda") if make is net else images()
    model, twin = copy.deepcopy(start), copy.deepcopy(start)
    optimizer = consequent.CSGD(model, lr=0.05, damping=0.1)
    graph = captured(model, optimizer, inputs, labels)
    for _ in range(3):
        graph.replay()
    other = consequent.CSGD(twin, lr=0.05, damping=0.1)
    for _ in range(6):
        take_step(twin, other, inputs, labels)
    assert distance(model, twin, start) < 1e-2
    assert optimizer.correction.counters.steps == 6
    assert optimizer.correction.counters.skipped == 0


@pytest.mark.parametrize("options", [{"relative_damping": 0.05}, {"damping": 0.1}], ids=str)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_micro_batches_and_relative_damping_in_a_captured_step(micro_batches, options):
    start = convolutions()
    inputs, labels = images()
    models = [copy.deepcopy(start), copy.deepcopy(start)]
    for model, in_graph in zip(models, (True, False), strict=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        consequent.attach(optimizer, model, **options)
        if in_graph:
            graph = captured(model, optimizer, inputs, labels, micro_batches)
            for _ in range(3):
                graph.replay()
        else:
            for _ in range(6):
                take_step(model, optimizer, inputs, labels, micro_batches)
    assert distance(*models, start) < 1e-2


@pytest.mark.parametrize("make", [convolutions, perceptron, with_a_plain_layer])
def test_nan_in_a_captured_step_changes_nothing_and_is_counted(make):
    model = make()
    optimizer = consequent.CSGD(model, lr=0.05, damping=0.1)
    inputs, labels = images()
    graph = captured(model, optimizer, inputs, labels)
    before = weights(model)
    inputs[0, 0, 0, 0] = float("nan")
    graph.replay()
    assert torch.equal(weights(model), before)
    assert optimizer.correction.counters.skipped == 1
    inputs.nan_to_num_()
    graph.replay()
    assert not torch.equal(weights(model), before)
    assert optimizer.correction.counters.skipped == 1


def twins():
    """A network, two copies of it with their optimisers, of which the first has taken three steps, and a batch."""
    start = perceptron()
    inputs, labels = images()
    models = copy.deepcopy(start), copy.deepcopy(start)
    pairs = [(model, consequent.CSGD(model, lr=0.05, damping=0.1)) for model in models]
    for _ in range(3):
        take_step(*pairs[0], inputs, labels)
    return start, *pairs, inputs, labels


def test_two_steps_in_one_graph():
    start, (model, optimizer), (twin, other), inputs, labels = twins()
    optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(2):
            take_step(model, optimizer, inputs, labels)
    for _ in range(5):
        graph.replay()
    for _ in range(13):
        take_step(twin, other, inputs, labels)
    assert distance(model, twin, start) < 1e-3
    assert optimizer.correction.counters.steps == 13


def test_two_optimisers_on_one_loss_in_one_graph():
    """The second step's work aside could start before the first step is over: their memory must not be the same."""

    def run(replays):
        first, second = perceptron(), perceptron()
        optimizers = [consequent.CSGD(model, lr=0.05, damping=0.1) for model in (first, second)]
        inputs, labels = images()

        def step():
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=True)
            nn.functional.cross_entropy(first(inputs) + second(inputs), labels).backward()
            for optimizer in optimizers:
                optimizer.step()

        for _ in range(3 if replays else 10):
            step()
        if replays:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            for _ in range(7):
                graph.replay()
        assert all(optimizer.correction.counters == Counters(steps=10) for optimizer in optimizers)
        return first, second

    for model, twin in zip(run(True), run(False), strict=True):
        assert distance(model, twin, perceptron()) < 1e-3


def test_backward_and_step_in_graphs_of_their_own():
    start, (model, optimizer), (twin, other), inputs, labels = twins()
    optimizer.zero_grad(set_to_none=True)
    backward, step = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(backward):
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(inputs), labels).backward()
    with torch.cuda.graph(step):
        optimizer.step()
    for _ in range(4):
        backward.replay()
        step.replay()
    for _ in range(7):
        take_step(twin, other, inputs, labels)
    assert distance(model, twin, start) < 1e-3


def test_an_edit_in_a_captured_step_is_seen():
    """The gradient is looked at behind whatever the graph does to it, though the rest runs ahead."""
    model = perceptron()
    optimizer = consequent.CSGD(model, lr=0.0, damping=0.1)
    inputs, labels = images()
    for _ in range(3):
        take_step(model, optimizer, inputs, labels)
    optimizer.zero_grad(set_to_none=True)
    graph, mask = torch.cuda.CUDAGraph(), torch.ones(180, 1, device="cuda")
    with torch.cuda.graph(graph):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        model[1][0].weight.grad.data.mul_(mask)
        model[1][0].bias.grad.data.mul_(mask[:, 0])
        optimizer.step()
    graph.replay()
    assert optimizer.correction.counters.edited == 0
    mask[:60] = 0
    graph.replay()
    assert optimizer.correction.counters.edited == 1
    mask.fill_(0.5)  # a scalar is none
    graph.replay()
    assert optimizer.correction.counters.edited == 1


def test_captures_that_fail():
    """In a process of its own: after a failed capture PyTorch's allocator keeps what other streams are done with."""
    script = Path(__file__).with_name("gpu_failed_captures.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "2 passed" in done.stdout


@pytest.mark.parametrize(("make", "most"), [(net, 220), (convolutions, 150)])
def test_kernel_launches_of_a_correction(make, most):
    """Plain and corrected steps are profiled; the difference is what the correction launches."""
    launches = []
    for corrected in (False, True):
        model = make().cuda()
        inputs, labels = batch("cuda") if make is net else images()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        if corrected:
            consequent.attach(optimizer, model, damping=0.1)
        for _ in range(60):  # until launches are recorded wherever memory lies
            take_step(model, optimizer, inputs, labels)
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            take_step(model, optimizer, inputs, labels)
            torch.cuda.synchronize()
        launches.append(sum(event.count for event in profiler.key_averages()))
    assert launches[1] - launches[0] <= most, launches


@pytest.mark.parametrize("rows", [32, 100, 300])
def test_gradients_of_tf32_products_are_not_taken_for_edited(rows):
    model = nn.Sequential(nn.Linear(500, 400), nn.ReLU(), nn.Linear(400, 350), nn.ReLU(), nn.Linear(350, 10)).cuda()
    inputs, labels = torch.rand(rows, 500, device="cuda") - 0.5, torch.randint(0, 10, (rows,), device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    correction = consequent.attach(optimizer, model)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        for _ in range(20):
            take_step(model, optimizer, inputs, labels)
    finally:
        torch.set_float32_matmul_precision(before)
    assert correction.counters.edited == 0
    assert correction.counters.steps == 20
