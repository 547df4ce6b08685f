"""The kernels that finish a training step: errors against float64, and times on a GPU.

python benchmarks/kernels_step.py [tf32x3|ieee]

The dense layers of an MLP 3072-8×800-10 at batch 32, and the twenty layers of ResNet-20.
"""

import itertools
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from consequent.engines.gpu.kernels import dense, features, table
from consequent.engines.gpu.kernels.dense import DenseLayer, DenseStep
from consequent.engines.gpu.kernels.features import FeatureLayer, prepare_features, write_features

REPLAYS = 50


def mlp_layers() -> list[DenseLayer]:
    torch.manual_seed(0)
    sizes = [3072] + [800] * 8 + [10]
    layers = []
    for inputs, outputs in itertools.pairwise(sizes):
        X = torch.rand(32, inputs, device="cuda")
        dZ = torch.randn(32, outputs, device="cuda") / 32
        gradient = (dZ.double().mT @ X.double()).float()
        layers.append(DenseLayer(X, dZ, gradient, dZ.sum(0), 1e-2, False, 32.0, 2e-3))
    return layers


def dense_reference(layer: DenseLayer) -> torch.Tensor:
    X = torch.cat([layer.inputs.double(), torch.ones(32, 1, device="cuda")], 1)
    K = X @ X.mT + layer.damping * torch.eye(32, device="cuda")
    return layer.scale * torch.linalg.solve(K, layer.output_grads.double()).mT @ X


def resnet20_layers(channels_last: bool) -> list[FeatureLayer]:
    torch.manual_seed(0)
    shapes = [(16, 3, 3, 3), *[(16, 16, 3, 3)] * 6, (32, 16, 3, 3), *[(32, 32, 3, 3)] * 5, (64, 32, 3, 3)]
    layers = []
    for shape in [*shapes, *[(64, 64, 3, 3)] * 5, (10, 64)]:
        gradient = torch.randn(*shape, device="cuda")
        if channels_last and len(shape) == 4:
            gradient = gradient.to(memory_format=torch.channels_last)
        size = gradient[0].numel() + 1
        rows = torch.randn(2 * size, size, device="cuda", dtype=torch.float64)
        moment = rows.mT @ rows
        damped = moment + 0.03 * torch.eye(size, device="cuda")
        factor = torch.linalg.inv(torch.linalg.cholesky(damped)).float().contiguous()
        status = torch.tensor([moment.trace().item(), 0.03, 1.0, 0.0], device="cuda")
        layers.append(FeatureLayer(gradient, torch.randn(shape[0], device="cuda"), factor[None], status[None], 128.0))
    return layers


def feature_reference(layer: FeatureLayer) -> torch.Tensor:
    W = layer.inverse_factor[0].double()
    return layer.scale * gradient_of(layer).double() @ W.mT @ W


def gradient_of(layer: DenseLayer | FeatureLayer) -> torch.Tensor:
    assert layer.bias_grad is not None
    return torch.cat([layer.weight_grad.flatten(1), layer.bias_grad[:, None]], 1)


def largest_error(layers: list, references: list[torch.Tensor]) -> float:
    errors = [
        ((gradient_of(layer).double() - right).abs().max() / right.abs().max()).item()
        for layer, right in zip(layers, references, strict=True)
    ]
    return max(errors)


def captured(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def replay_time(graph: torch.cuda.CUDAGraph) -> float:
    """Median microseconds of a replay."""
    for _ in range(5):
        graph.replay()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(REPLAYS)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return 1e3 * statistics.median(start.elapsed_time(end) for start, end in events)


def back_to_back_time(graph: torch.cuda.CUDAGraph) -> float:
    """Mean microseconds of replays without a pause between them: no start-up of a graph is in it."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    start.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * start.elapsed_time(end) / REPLAYS


def print_launches(graph: torch.cuda.CUDAGraph) -> None:
    """Mean microseconds of every kernel, within replays."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(20):
            graph.replay()
        torch.cuda.synchronize()
    for event in profiler.key_averages():
        if event.device_time_total > 0:
            each = event.device_time_total / event.count
            print(f"    {event.key[:40]:40} {each:7.1f} µs  × {event.count / 20:g} per step")


def host_time(work: Callable[[], object]) -> float:
    """Median microseconds that Python takes to launch."""
    times = []
    for _ in range(REPLAYS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return 1e6 * statistics.median(times)


def prepare_dense(layers: list[DenseLayer], flags: torch.Tensor) -> DenseStep:
    flags.zero_()
    step = DenseStep(layers, flags)
    step.factorise()
    step.solve()
    step.look()
    return step


def report(name: str, layers: list, references: list[torch.Tensor], prepare: Callable, write: Callable) -> None:
    bad = torch.zeros(1 + len(layers), dtype=torch.int32, device="cuda")
    counts = torch.zeros(6, dtype=torch.int64, device="cuda")
    start = time.perf_counter()
    write(prepare(layers, bad), counts)
    torch.cuda.synchronize()
    print(f"{name}: {len(layers)} layers, first call {time.perf_counter() - start:.1f} s")
    print(f"  bad {bad[0].item()}, counts {counts.tolist()}")
    print(f"  largest error against float64       {largest_error(layers, references):.1e}")

    # From here on gradients are corrected again and again. A small scale keeps them finite, and an infinite tolerance
    # keeps them from being taken for edited ones: what is timed is what an ordinary step does.
    layers = [layer._replace(scale=1e-3) for layer in layers]
    if isinstance(layers[0], DenseLayer):
        layers = [layer._replace(tolerance=float("inf")) for layer in layers]

    def step() -> None:
        write(prepare(layers, bad), counts)

    graph = captured(step)
    print(f"  graph, median of {REPLAYS} replays         {replay_time(graph):7.1f} µs")
    print(f"  graph, back to back                 {back_to_back_time(graph):7.1f} µs")
    print_launches(graph)
    prepared = prepare(layers, bad)

    def prepare_with_new_table() -> None:
        table._last_tables.clear()
        prepare(layers, bad)

    print(f"  host, prepare                       {host_time(lambda: prepare(layers, bad)):7.1f} µs")
    print(f"  host, prepare with a new table      {host_time(prepare_with_new_table):7.1f} µs")
    print(f"  host, write                         {host_time(lambda: write(prepared, counts)):7.1f} µs")
    print(f"  bad {bad[0].item()}, counts {counts.tolist()}\n", flush=True)


def main() -> None:
    precision = sys.argv[1] if len(sys.argv) > 1 else dense.PRECISION
    dense.PRECISION = features.PRECISION = precision
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, products in {precision}\n")
    layers = mlp_layers()
    report("MLP 3072-8×800-10, batch 32", layers, [dense_reference(x) for x in layers], prepare_dense, DenseStep.write)
    for channels_last in (False, True):
        convolutions = resnet20_layers(channels_last)
        references = [feature_reference(layer) for layer in convolutions]
        name = f"ResNet-20, {'channels last' if channels_last else 'contiguous'}"
        report(name, convolutions, references, prepare_features, write_features)


if __name__ == "__main__":
    main()
