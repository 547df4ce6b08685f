"""What `at="step"`, `at="backward"` and `refresh=10` cost beside plain SGD, with the default damping and bound.

`python benchmarks/step_or_backward.py --device cpu`

Whole training steps (zero_grad, forward, backward, step) in one process, in turns of a few steps each; medians and
quartiles over the turns. Ratios are to the plain optimiser without BatchNorm.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import consequent
from consequent_lab.models import resnet20

PERIOD = 10  # of the steps that refresh averaged moments; turns are whole periods

ENTRANTS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "step": {"at": "step"},
    "backward": {"at": "backward"},
    "refresh": {"averaging": 0.9, "refresh": PERIOD},
}


def mlp() -> nn.Module:
    widths = [3072, *[800] * 8, 10]
    layers: list[nn.Module] = []
    for wide, next_wide in pairwise(widths):
        layers += [nn.Linear(wide, next_wide), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def training_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Callable[[], None]:
    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def captured(step: Callable[[], None]) -> Callable[[], None]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(5):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def measure(steps: dict[str, Callable[[], None]], device: str, turns: int, length: int) -> dict[str, dict[str, float]]:
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(turns + 1):  # the first one warms up
        for name, step in steps.items():
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(length):
                step()
            if device == "cuda":
                torch.cuda.synchronize()
            if turn:
                times[name].append((time.perf_counter() - start) / length * 1e3)
    found = {}
    for name, taken in times.items():
        low, middle, high = statistics.quantiles(taken, n=4)
        ratio = middle / statistics.median(times["plain"])
        found[name] = {"milliseconds": middle, "from": low, "to": high, "ratio": ratio}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="of a CPU")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = arguments.device
    torch.set_num_threads(arguments.threads)
    if device == "cuda":
        torch.set_float32_matmul_precision("high")
    machine = torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()}, {arguments.threads} threads"
    command = f"python benchmarks/step_or_backward.py --device {device} --threads {arguments.threads}"
    record = {"command": command, "machine": machine, "torch": torch.__version__, "rows": []}
    works = [(f"MLP 3072-8×800-10, batch {batch}", mlp, (batch, 3072)) for batch in (32, 128)]
    images = 128 if device == "cuda" else 32
    works.append((f"ResNet-20, batch {images}", lambda: resnet20(batch_norm=False), (images, 3, 32, 32)))
    kept: list[object] = []  # models, optimisers and data must outlive the graphs that were captured of them
    for title, build, shape in works:
        for mode in ("eager", "graph") if device == "cuda" else ("eager",):
            steps = {}
            for name, options in ENTRANTS.items():
                if name == "refresh" and mode == "graph":
                    continue  # refused
                torch.manual_seed(0)
                model = build().to(device)
                x, y = (torch.rand(shape) - 0.5).to(device), torch.randint(0, 10, shape[:1]).to(device)
                if x.ndim == 4:
                    model, x = (one.to(memory_format=torch.channels_last) for one in (model, x))
                optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, nesterov=True)
                if options is not None:
                    kept.append(consequent.attach(optimizer, model, **options))
                step = training_step(model, optimizer, x, y)
                kept.append((model, optimizer, step))
                steps[name] = captured(step) if mode == "graph" else step
            turns, length = (15, 3 * PERIOD) if device == "cuda" else (9, PERIOD)
            row = {"work": title, "mode": mode, "entrants": measure(steps, device, turns, length)}
            record["rows"].append(row)
            shown = {name: f"{one['milliseconds']:.2f} ms, {one['ratio']:.2f}" for name, one in row["entrants"].items()}
            print(title, mode, shown, flush=True)
            if arguments.out is not None:
                arguments.out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
