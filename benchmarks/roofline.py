"""Where the time of a C-Nesterov step of ResNet-20 goes on a GPU, and how far its kernels are from the roofline.

    python benchmarks/roofline.py [results/roofline.json]

Counted are the fewest bytes that must be moved (every input read once, every output written once) and the
multiplications and additions of the exact algorithm that is used; the ceilings are measured in the same run. Kernel
times are medians of replays of a CUDA graph that holds nothing else.
"""

import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import consequent
from consequent.layers import kind_of
from consequent_lab.models import mlp, resnet20

OURS = (
    "_turn",
    "_multiply",
    "_put",
    "_add_splits",
    "_gather",
    "_product",
    "_gram",
    "_factor",
    "_solve",
    "_look",
    "_write",
    "write_",
)


def replay_time(function: Callable[[], object], replays: int = 50) -> float:
    """Microseconds of one call inside a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return statistics.median(times)


def ceilings() -> dict[str, float]:
    """Bytes and TF32 operations per second that this device reaches."""
    source = torch.empty(2**28, device="cuda")
    target = torch.empty_like(source)
    copy = replay_time(lambda: target.copy_(source), 10)
    square = torch.randn(8192, 8192, device="cuda")
    product = replay_time(lambda: square @ square, 10)
    return {"bytes_per_s": 2 * source.nbytes / copy * 1e6, "tf32_flop_per_s": 2 * 8192**3 / product * 1e6}


def moments(ceiling: dict[str, float]) -> list[dict[str, object]]:
    """The second moments of ResNet-20's layers, 128 images, in the groups that the backward pass makes."""
    rows = []
    for channels, side, stride, layers in (
        (64, 8, 1, 5),
        (32, 16, 2, 1),
        (32, 16, 1, 5),
        (16, 32, 2, 1),
        (16, 32, 1, 6),
    ):
        layer = nn.Conv2d(channels, channels, 3, stride, 1).cuda()
        shape = (128, channels, side, side)
        inputs = [
            torch.randn(*shape, device="cuda").relu().contiguous(memory_format=torch.channels_last)
            for _ in range(layers)
        ]
        calls = [kind_of(layer).of(layer).canonical(tensor) for tensor in inputs]
        operation, canonical = calls[0].operation, [call.inputs for call in calls]
        time = replay_time(partial(operation.second_moments, canonical, ones=True))
        size, positions = 9 * channels + 1, 128 * (side // stride) ** 2
        lags = 13 if stride == 1 else 45  # blocks of channels × channels that are computed
        flops = layers * 2 * lags * channels**2 * positions
        moved = sum(tensor.nbytes for tensor in inputs) + layers * 4 * size**2
        title = f"moment {size}², {positions} rows, {layers} layer{'s' * (layers > 1)}"
        rows.append(entry(title, time, flops, moved, ceiling))
    return rows


def factors(ceiling: dict[str, float]) -> list[dict[str, object]]:
    """Their factorisations: L and its inverse."""
    from consequent.engines.gpu.kernels.factor import inverse_factor

    rows = []
    for size, layers in ((577, 5), (289, 6), (145, 6)):
        X = torch.randn(layers, 4 * size, size, device="cuda")
        moment = X.mT @ X
        time = replay_time(lambda moment=moment: inverse_factor(moment, 0.03))
        flops = layers * 2 * size**3 / 3  # n³/3 for L, as much for its inverse
        rows.append(entry(f"factor {size}², {layers} layers", time, flops, 2 * moment.nbytes, ceiling))
    return rows


def entry(title: str, time: float, flops: float, moved: float, ceiling: dict[str, float]) -> dict[str, object]:
    floor = 1e6 * max(flops / ceiling["tf32_flop_per_s"], moved / ceiling["bytes_per_s"])
    return {
        "what": title,
        "microseconds": round(time, 1),
        "gigaflop": round(flops / 1e9, 3),
        "megabytes": round(moved / 1e6, 2),
        "floor_microseconds": round(floor, 2),
        "times_the_floor": round(time / floor, 1),
    }


def where_the_time_goes(model: nn.Module, inputs: Tensor, momentum: float) -> dict[str, object]:
    """Kernel time of one eager C- step, by whose kernels they are."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=momentum, nesterov=momentum > 0)
    consequent.attach(optimizer, model, damping=0.03)
    labels = torch.randint(0, 10, (len(inputs),), device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

    for _ in range(5):
        step()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    ours: dict[str, list[float]] = {}
    rest = [0.0, 0.0]
    for event in profiler.key_averages():
        time = event.self_device_time_total
        if any(event.key.startswith(name) for name in OURS):
            ours[event.key] = [round(time, 1), event.count]
        else:
            rest = [rest[0] + time, rest[1] + event.count]
    largest = dict(sorted(ours.items(), key=lambda item: -item[1][0]))
    return {"correction": largest, "everything_else": [round(rest[0], 1), rest[1]], "unit": "[microseconds, launches]"}


def main() -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    ceiling = ceilings()
    images = (torch.rand(128, 3, 32, 32, device="cuda") - 0.5).contiguous(memory_format=torch.channels_last)
    resnet = resnet20(batch_norm=False).cuda().to(memory_format=torch.channels_last)
    result = {
        "command": "python benchmarks/roofline.py",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "ceilings": ceiling,
        "kernels": moments(ceiling) + factors(ceiling),
        "resnet20": where_the_time_goes(resnet, images, 0.95),
        "mlp": where_the_time_goes(mlp(3072, [800] * 8, 10).cuda(), torch.rand(32, 3072, device="cuda"), 0.0),
    }
    text = json.dumps(result, indent=1, ensure_ascii=False)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
