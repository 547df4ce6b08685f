"""Where to look for ResNet-20 without BatchNorm, augmented: one seed each, before a search that counts.

Of the first images a tenth is held out; `--whole` trains on all 50,000 and looks at the test images.

    python benchmarks/resnet20_exploration.py DATA short.txt --epochs 10 --share 0/4 >> exploration.jsonl

DATA has the .npz files of `consequent race data cifar10 --images 50000 10000`, or CIFAR-10 in its official layout. A
line of the text file is a contestant, how the blocks start, and settings:

    C-Nesterov zero lr=0.3 relative_damping=0.1 decay=5e-4
    C-Layerwise zero lr=3e-3 relative_damping=0.1 decay=1e-4 bound=0

Contestants are those of the race and `Layerwise`, Adam with one second moment for a whole tensor.
"""

import argparse
import json
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from consequent_lab.models import BasicBlock, residual_net
from consequent_lab.race.contestants import Contestant, Settings, contestant_named, lr
from consequent_lab.race.curves import Curve
from consequent_lab.race.networks import InBfloat16
from consequent_lab.race.tasks import TASKS
from consequent_lab.race.training import curve_of

TASK = TASKS["resnet20-cifar10"]
STARTS = {  # the fraction of Kaiming's weights that the last convolution of a block begins with
    "kaiming": 1.0,
    "zero": 0.0,  # leaves the channels dead that a block adds
    "same": 0.0,  # where a block adds no channels; 1 where it does
    "tenth": 0.1,  # as the race has it
}


class Layerwise(Optimizer):
    """Adam with one second moment for all numbers of a tensor, so that the direction stays the gradient's own."""

    def __init__(self, parameters: Any, lr: float, betas: tuple[float, float] = (0.9, 0.98)) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "capturable": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Takes a step."""
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                gradient: Tensor = parameter.grad
                state = self.state[parameter]
                if not state:
                    state["weight"] = torch.zeros((), device=parameter.device)  # of what the averages have seen
                    state["mean"] = torch.zeros_like(parameter)
                    state["square"] = torch.zeros((), device=parameter.device)
                state["weight"].lerp_(torch.ones_like(state["weight"]), 1 - second)
                state["square"].lerp_(gradient.square().mean(), 1 - second)
                size = (state["square"] / state["weight"]).sqrt().add_(1e-12)
                state["mean"].lerp_(gradient / size, 1 - first)
                parameter.sub_(state["mean"], alpha=group["lr"])


def _layerwise(model: nn.Module, settings: Settings, capturable: bool) -> list[Optimizer]:
    return [Layerwise(model.parameters(), settings["lr"])]


EXPLORED = {
    "Layerwise": Contestant("Layerwise", _layerwise, (lr(3e-3),)),
    "C-Layerwise": Contestant("C-Layerwise", _layerwise, (lr(3e-3),), correction={}),
}


def network(start: str, in_half: bool) -> Callable[[str], nn.Module]:
    """Returns what makes the model of a variant; how the blocks without BatchNorm start is one of `STARTS`."""

    def make(variant: str) -> nn.Module:
        model = residual_net((16, 32, 64), 3, batch_norm=variant == "BN")
        for block in model.modules():
            if isinstance(block, BasicBlock) and variant != "BN":
                kept = start == "same" and block.new_channels
                block.second.weight.data.mul_(1.0 if kept else STARTS[start])  # type: ignore[operator, union-attr]
        return InBfloat16(model) if in_half else model

    return make


def configurations(path: Path) -> Iterator[tuple[Contestant, str, Settings]]:
    """Yields contestants, how the blocks start, and settings."""
    for line in path.read_text().splitlines():
        if not line.strip():
            continue
        name, start, *words = line.split()
        settings = {key: float(value) for key, value in (word.split("=") for word in words)}
        contestant = EXPLORED[name] if name in EXPLORED else contestant_named(name)
        yield contestant, start, settings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("configurations", type=Path)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--images", type=int, default=20_000, help="of which a tenth is held out")
    parser.add_argument("--half", action="store_true", help="bfloat16 in the network")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--share", default="0/1", help="which of how many equal shares of the lines")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _end)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cudnn.benchmark = True
    data = TASK.load(options.data, 0)
    data = (data if options.whole else data.first(options.images).with_validation()).to(device)
    seed = options.seed if options.seed is not None else 0 if options.whole else 1000
    part, parts = (int(word) for word in options.share.split("/"))
    for contestant, start, settings in list(configurations(options.configurations))[part::parts]:
        task = replace(TASK, model=network(start, options.half), epochs=options.epochs, evaluations=options.epochs)
        bound = settings.pop("bound", None)  # 0: none
        if bound is not None:
            contestant = replace(contestant, correction={"bound": bound or None})
        steps = task.steps(len(data.train))
        line = {"contestant": contestant.name, "start": start, "settings": settings, "bound": bound, "seed": seed}
        line |= {"images": len(data.train), "whole": options.whole, "half": options.half, "epochs": options.epochs}
        curve: Curve = []
        try:
            curve_of(task, contestant, settings, {seed: data}, steps, True, partial(_kept, curve))
        finally:  # also where it is told to end
            rounded = [{name: float(f"{value:.4g}") for name, value in one.items()} for one in curve]
            print(json.dumps(line | {"curve": rounded}), flush=True)


def _kept(kept: Curve, curve: Curve) -> bool:
    kept[:] = curve
    return False


def _end(number: int, frame: object) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
