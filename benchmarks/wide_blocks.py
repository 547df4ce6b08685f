"""What ``largest_block=`` saves on a wide layer, and how far its update is from the exact one.

`python benchmarks/wide_blocks.py --out results/wide-blocks-cpu.json`

An MLP 64-4096-256-10 on batches of 4,096 handwritten digits (those of scikit-learn, each also moved by a pixel): the
second layer has 4,096 features and as many rows. For each size of blocks, and for none: the layer's update beside the
exact one, before training and after some of it; whole training steps, in turns; and the loss after a few steps.
"""

import argparse
import copy
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import consequent
from consequent_lab.datasets import load_digits

WIDTH, ROWS = 4096, 4096
BLOCKS = (None, 2048, 1024, 512, 256)
STEPS = 8  # of training, before updates are looked at again and after which the loss is
RATES = (0.1, 0.3)


def moved_digits() -> tuple[Tensor, Tensor]:
    """Every digit of the training set in nine places, in a random order."""
    digits = load_digits()
    images = F.pad(digits.train.inputs.view(-1, 8, 8), (1, 1, 1, 1), value=float(digits.train.inputs.min()))
    places = [images[:, y : y + 8, x : x + 8].flatten(1) for y in range(3) for x in range(3)]
    order = torch.randperm(9 * len(images), generator=torch.Generator().manual_seed(1))
    return torch.cat(places)[order], digits.train.targets.repeat(9)[order]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, 10))


def updates(model: nn.Sequential, x: Tensor, y: Tensor) -> list[dict[str, Any]]:
    """The wide layer's update for each size of blocks, beside the exact one, and what it does to the outputs."""
    found: list[dict[str, Any]] = []
    exact = None
    for largest_block in BLOCKS:
        twin = copy.deepcopy(model)
        optimizer = torch.optim.SGD(twin.parameters(), lr=0.0)
        consequent.attach(optimizer, twin, largest_block=largest_block)
        inputs = twin[1](twin[0](x))
        outputs = twin[2](inputs)
        outputs.retain_grad()
        F.cross_entropy(twin[4](twin[3](outputs)), y).backward()
        optimizer.step()
        update = torch.cat([twin[2].weight.grad, twin[2].bias.grad[:, None]], 1).double()
        wanted = outputs.grad.double() * len(x)
        made = torch.cat([inputs.detach(), torch.ones(len(x), 1)], 1).double() @ update.T
        exact = update if exact is None else exact
        found.append(
            {
                "largest_block": largest_block,
                "cosine": float((update * exact).sum() / update.norm() / exact.norm()),
                "relative_difference": float((update - exact).norm() / exact.norm()),
                "length": float(update.norm() / exact.norm()),
                "made_cosine": float((made * wanted).sum() / made.norm() / wanted.norm()),
                "made_length": float(made.norm() / wanted.norm()),
            }
        )
        print(found[-1], flush=True)
    return found


def training_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> float:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def times(x: Tensor, y: Tensor, turns: int) -> list[dict[str, Any]]:
    """Seconds of a whole training step, in turns."""
    entrants: dict[tuple[str, int | None], Any] = {}
    for at in ("plain", "step", "backward"):
        for largest_block in BLOCKS if at != "plain" else (None,):
            model = network()
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            if at != "plain":
                consequent.attach(optimizer, model, at=at, largest_block=largest_block)
            entrants[at, largest_block] = model, optimizer
    taken: dict[tuple[str, int | None], list[float]] = {entrant: [] for entrant in entrants}
    for _ in range(turns):
        for entrant, (model, optimizer) in entrants.items():
            start = time.perf_counter()
            training_step(model, optimizer, x, y)
            taken[entrant].append(time.perf_counter() - start)
    found = []
    for (at, largest_block), seconds in taken.items():
        summary = {"seconds": statistics.median(seconds), "fastest": min(seconds), "all": seconds}
        found.append({"at": at, "largest_block": largest_block, **summary})
        print(found[-1], flush=True)
    return found


def losses(x: Tensor, y: Tensor) -> list[dict[str, Any]]:
    """The loss on one batch after a few steps on others."""
    found = []
    for name in ("plain", *BLOCKS):
        for rate in RATES:
            model = network()
            optimizer = torch.optim.SGD(model.parameters(), lr=rate)
            if name != "plain":
                consequent.attach(optimizer, model, largest_block=name)
            for step in range(STEPS):
                part = slice(ROWS * (step % 2 + 1), ROWS * (step % 2 + 2))
                training_step(model, optimizer, x[part], y[part])
            with torch.no_grad():
                loss = float(F.cross_entropy(model(x[:ROWS]), y[:ROWS]))
            found.append({"largest_block": name, "lr": rate, "steps": STEPS, "loss": loss})
            print(found[-1], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    x, y = moved_digits()
    model = network()
    fresh = updates(model, x[:ROWS], y[:ROWS])
    optimizer = torch.optim.SGD(model.parameters(), lr=RATES[0])
    consequent.attach(optimizer, model, largest_block=BLOCKS[1])
    for _ in range(STEPS):
        training_step(model, optimizer, x[ROWS : 2 * ROWS], y[ROWS : 2 * ROWS])
    record = {
        "command": f"python benchmarks/wide_blocks.py --threads {arguments.threads} --turns {arguments.turns}",
        "machine": f"{platform.machine()}, {arguments.threads} threads",
        "torch": torch.__version__,
        "updates": {"fresh": fresh, "trained": updates(copy.deepcopy(model), x[:ROWS], y[:ROWS])},
        "losses": losses(x, y),
        "times": times(x[:ROWS], y[:ROWS], arguments.turns),
    }
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
