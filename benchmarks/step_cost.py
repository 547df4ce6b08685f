"""How long a consequentialist step takes, beside the plain step: eager mode, medians, both contestants interleaved.

python benchmarks/step_cost.py [cpu|cuda] >> results/step_cost.jsonl
"""

import itertools
import json
import os
import statistics
import sys
import time

import torch
from torch import nn

import consequent


class Block(nn.Module):
    """A residual block without BatchNorm."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1)
        self.stride = stride

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block."""
        z = self.second(nn.functional.relu(self.first(x)))
        short = x[:, :, :: self.stride, :: self.stride]
        short = nn.functional.pad(short, (0, 0, 0, 0, 0, z.shape[1] - short.shape[1]))
        return nn.functional.relu(z + short)


def resnet20() -> nn.Module:
    widths = [(16, 16, 1)] * 3 + [(16, 32, 2)] + [(32, 32, 1)] * 2 + [(32, 64, 2)] + [(64, 64, 1)] * 2
    blocks = [Block(*width) for width in widths]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    return nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1), nn.ReLU(), *blocks, *head)


def mlp() -> nn.Module:
    sizes = [3072] + [800] * 8
    hidden = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(800, 10))


def measure(make_model, shape, device: str, repeats: int) -> dict[str, list[float]]:
    inputs = torch.rand(*shape, device=device)
    labels = torch.randint(0, 10, shape[:1], device=device)
    contestants = {}
    for name in ("plain", "consequentialist"):
        torch.manual_seed(0)
        model = make_model().to(device)
        if len(shape) == 4:
            model.to(memory_format=torch.channels_last)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, nesterov=True)
        if name == "consequentialist":
            consequent.attach(optimizer, model, damping=0.03)
        contestants[name] = (model, optimizer)
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for repeat in range(repeats + 3):
        for name, (model, optimizer) in contestants.items():
            synchronize(device)
            start = time.perf_counter()
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            synchronize(device)
            if repeat >= 3:
                times[name].append(1e3 * (time.perf_counter() - start))
    return times


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    machine = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {os.cpu_count()} cores"
    repeats = 50 if device == "cuda" else 9
    for name, make_model, shape in (
        ("MLP 3072-8×800-10, batch 32", mlp, (32, 3072)),
        ("ResNet-20 without BatchNorm, batch 128", resnet20, (128, 3, 32, 32)),
    ):
        times = measure(make_model, shape, device, repeats)
        plain, ours = (statistics.median(times[which]) for which in ("plain", "consequentialist"))
        spread = {which: [round(min(t), 2), round(max(t), 2)] for which, t in times.items()}
        result = {
            "model": name,
            "mode": "eager, Nesterov, TF32 allowed" if device == "cuda" else "eager, Nesterov",
            "machine": machine,
            "torch": torch.__version__,
            "plain_ms": round(plain, 2),
            "consequentialist_ms": round(ours, 2),
            "ratio": round(ours / plain, 2),
            "range_ms": spread,
            "repeats": repeats,
            "command": f"python benchmarks/step_cost.py {device}",
        }
        print(json.dumps(result, ensure_ascii=False), flush=True)


if __name__ == "__main__":
    main()
