"""What the README's advice rests on: C-SGD on digits over learning rate, damping, momentum and the inputs' range.

python benchmarks/where_to_start.py > results/where_to_start.jsonl
"""

import itertools
import json
import statistics

import torch
from sklearn.datasets import load_digits
from torch import nn

import consequent

EPOCHS, SEEDS = 3, (0, 1, 2)


def final_loss(seed: int, lr: float, damping: float, momentum: float, lowest: float) -> float:
    digits = load_digits()
    inputs = torch.tensor(digits.data, dtype=torch.float32) / 16 + lowest
    labels = torch.tensor(digits.target)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = consequent.CSGD(model, lr=lr, momentum=momentum, nesterov=momentum > 0, damping=damping, bound=None)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(inputs)).split(32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs[batch]), labels[batch]).backward()
            optimizer.step()
    with torch.no_grad():
        return nn.functional.cross_entropy(model(inputs), labels).item()


def main() -> None:
    torch.set_num_threads(1)
    for lowest, momentum, damping, lr in itertools.product(
        (0.0, -0.5), (0.0, 0.9), (0.01, 0.1, 1.0), (0.01, 0.03, 0.1, 0.3, 1.0)
    ):
        losses = [final_loss(seed, lr, damping, momentum, lowest) for seed in SEEDS]
        row = {"inputs": [lowest, lowest + 1], "momentum": momentum, "damping": damping, "lr": lr}
        row |= {"training_loss": [round(loss, 4) for loss in losses], "median": round(statistics.median(losses), 4)}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
