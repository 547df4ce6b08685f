"""The method has to earn its keep: on real data it must need fewer epochs, each side at its best learning rate."""

import statistics

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

import consequent

GRID = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)  # one grid for both
SEEDS = (0, 1, 2)
TARGET_LOSS = 0.1
MOST_EPOCHS = 8


def mlp():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def convnet():
    convolutions = (nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.ReLU())
    return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), *convolutions, nn.Flatten(), nn.Linear(32, 10))


def epochs_to_target(make_model, seed, lr, momentum, damping):
    digits = load_digits()
    inputs, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    torch.manual_seed(seed)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, nesterov=momentum > 0)
    if damping is not None:
        consequent.attach(optimizer, model, damping=damping)
    for epoch in range(1, MOST_EPOCHS + 1):
        for batch in torch.randperm(len(inputs)).split(32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs[batch]), labels[batch]).backward()
            optimizer.step()
        with torch.no_grad():
            if nn.functional.cross_entropy(model(inputs), labels) < TARGET_LOSS:
                return epoch
    return MOST_EPOCHS + 1


def best_median(make_model, momentum, damping):
    runs = {lr: [epochs_to_target(make_model, seed, lr, momentum, damping) for seed in SEEDS] for lr in GRID}
    return min(statistics.median(epochs) for epochs in runs.values())


@pytest.mark.slow
@pytest.mark.parametrize(("make_model", "momentum"), [(mlp, 0.0), (mlp, 0.9), (convnet, 0.0)])
def test_fewer_epochs_than_the_plain_optimiser(make_model, momentum):
    consequentialist = best_median(make_model, momentum, damping=0.1)
    assert consequentialist <= MOST_EPOCHS
    assert consequentialist < best_median(make_model, momentum, damping=None)
