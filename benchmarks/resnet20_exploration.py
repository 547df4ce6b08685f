"""Where to look for ResNet-20 without BatchNorm, augmented: short runs, one seed, before a search that counts.

Of the first 20,000 images a tenth is held out; `--whole` trains on all 50,000 and looks at the test images.

    python benchmarks/resnet20_exploration.py DATA --epochs 10 >> results/resnet20-exploration.jsonl
    python benchmarks/resnet20_exploration.py DATA --epochs 60 --whole --only C-Nesterov zero 0.15 0.1 3e-4

DATA has the .npz files of `consequent race data cifar10 --images 50000 10000`, or CIFAR-10 in its official layout.
"""

import argparse
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from consequent_lab.models import BasicBlock, residual_net
from consequent_lab.race.contestants import Settings, contestant_named
from consequent_lab.race.tasks import TASKS
from consequent_lab.race.training import curve_of

TASK = TASKS["resnet20-cifar10"]
EVALUATIONS = 8


def configurations() -> Iterator[tuple[str, str, Settings]]:
    """Yields contestants, how the last convolution of a block starts, and settings."""
    for start, lr, damping, decay in itertools.product(
        ("zero", "kaiming"), (0.03, 0.1, 0.3), (0.1, 0.3, 1.0), (1e-4, 5e-4)
    ):
        yield "C-Nesterov", start, {"lr": lr, "relative_damping": damping, "decay": decay}
    for lr, damping in itertools.product((3e-4, 1e-3, 3e-3), (0.1, 0.3)):
        yield "C-AdamW", "zero", {"lr": lr, "relative_damping": damping, "decay": 3e-4}
    for lr in (0.01, 0.03, 0.1):
        yield "Nesterov", "zero", {"lr": lr, "decay": 1e-4}
    yield "Nesterov-BN", "kaiming", {"lr": 0.1, "decay": 5e-5}


def network(start: str) -> Callable[[str], nn.Module]:
    """Returns what makes the model of a variant; with "zero" every block without BatchNorm begins as its shortcut."""

    def make(variant: str) -> nn.Module:
        model = residual_net((16, 32, 64), 3, batch_norm=variant == "BN")
        if start == "zero" and variant != "BN":
            for block in model.modules():
                if isinstance(block, BasicBlock):
                    nn.init.zeros_(block.second.weight)  # type: ignore[arg-type]
        return model

    return make


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--only", nargs=5, metavar=("CONTESTANT", "START", "LR", "DAMPING", "DECAY"))
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = TASK.load(options.data, 0)
    data = (data if options.whole else data.first(20_000).with_validation()).to(device)
    chosen = list(configurations())
    if options.only:
        name, start, lr, damping, decay = options.only
        chosen = [(name, start, {"lr": float(lr), "relative_damping": float(damping), "decay": float(decay)})]
    seed = 0 if options.whole else 1000
    for name, start, settings in chosen:
        task = replace(TASK, model=network(start), epochs=options.epochs, evaluations=EVALUATIONS)
        steps = task.steps(len(data.train))
        curve, _ = curve_of(task, contestant_named(name), settings, data, seed, steps, True, lambda curve: False)
        line = {"contestant": name, "start": start, "settings": settings, "whole": options.whole, "seed": seed}
        print(json.dumps(line | {"epochs": options.epochs, "curve": curve}), flush=True)


if __name__ == "__main__":
    main()
