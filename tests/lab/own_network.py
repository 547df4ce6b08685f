"""A model and data of a user's own, as `consequent train --model own_network:… --dataset own_network:…` names them."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

NOT_A_FUNCTION = 3


def model(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(torch.Size(shape).numel(), 16), nn.ReLU(), nn.Linear(16, classes or 1))


def with_dropout(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, classes))


def fixed():
    return nn.Sequential(nn.Linear(6, 3))


def too_wide():
    return nn.Linear(6, 5)


def for_others():
    return nn.Linear(7, 3)


def needs_more(shape, classes, depth):
    raise AssertionError


def no_model():
    return 3


def tensors():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(80, 6, generator=generator)
    targets = inputs[:, :3].argmax(1)
    return inputs[:64], targets[:64], inputs[64:], targets[64:]


def datasets():
    train_inputs, train_targets, test_inputs, test_targets = tensors()
    return TensorDataset(train_inputs, train_targets), TensorDataset(test_inputs, test_targets)


def numbers():
    train_inputs, _, test_inputs, _ = tensors()
    return train_inputs, train_inputs[:, :1] * 2 - 1, test_inputs, test_inputs[:, :1] * 2 - 1


def flat_numbers():
    return tuple(part[:, 0] if part.shape[1] == 1 else part for part in numbers())


def images():
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (80, 3, 8, 8), dtype=torch.uint8, generator=generator)
    return pixels[:64], torch.arange(64) % 4, pixels[64:], torch.arange(16) % 4


def three_tensors():
    return tensors()[:3]


def unequal():
    train_inputs, train_targets, test_inputs, test_targets = tensors()
    return train_inputs, train_targets[:60], test_inputs, test_targets


def from_one():
    train_inputs, train_targets, test_inputs, test_targets = tensors()
    return train_inputs, train_targets - 1, test_inputs, test_targets - 1


def not_finite():
    train_inputs, train_targets, test_inputs, test_targets = tensors()
    train_inputs[3, 2] = float("nan")
    return train_inputs, train_targets, test_inputs, test_targets
