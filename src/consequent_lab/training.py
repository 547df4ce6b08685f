"""The training loop, as one would write it in a script, with a clock that runs only while the model trains.

The clock counts processor time. With one thread that is the wall-clock time on an idle machine, and it stays true when
other work runs beside.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from consequent_lab.digits import Digits


@dataclass(frozen=True)
class Point:
    """One evaluation during training."""

    epoch: float
    seconds: float  # spent in training steps so far; evaluations are not counted
    loss: float  # mean cross-entropy over the full training set


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    digits: Digits,
    *,
    seed: int,
    epochs: int,
    batch_size: int,
    evaluations_per_epoch: int,
) -> Iterator[Point]:
    """Trains and yields the full-training-set loss several times an epoch, at the start first.

    Stops early when the loss is no longer finite.

    Args:
        model: what is trained, in place.
        optimizer: any torch optimiser over the model's parameters.
        digits: the data.
        seed: of the order of samples; equal seeds see equal mini-batches.
        epochs: passes over the training set.
        batch_size: samples per step.
        evaluations_per_epoch: how often the loss is measured.
    """
    samples = len(digits.train_labels)
    generator = torch.Generator().manual_seed(seed)
    steps_per_epoch = math.ceil(samples / batch_size)
    interval = max(1, steps_per_epoch // evaluations_per_epoch)
    seconds = 0.0
    yield Point(0.0, seconds, training_loss(model, digits))
    for epoch in range(epochs):
        batches = torch.randperm(samples, generator=generator).split(batch_size)
        for first in range(0, steps_per_epoch, interval):
            last = min(first + interval, steps_per_epoch)
            start = time.process_time()
            for batch in batches[first:last]:
                optimizer.zero_grad()
                cross_entropy(model(digits.train_inputs[batch]), digits.train_labels[batch]).backward()
                optimizer.step()
            seconds += time.process_time() - start
            loss = training_loss(model, digits)
            yield Point(epoch + last / steps_per_epoch, seconds, loss)
            if not math.isfinite(loss):
                return


@torch.no_grad()
def training_loss(model: nn.Module, digits: Digits) -> float:
    """Returns the mean cross-entropy over the full training set."""
    return cross_entropy(model(digits.train_inputs), digits.train_labels).item()


@torch.no_grad()
def accuracy_on_test_set(model: nn.Module, digits: Digits) -> float:
    """Returns the fraction of test images that the model classifies correctly."""
    predictions: Tensor = model(digits.test_inputs).argmax(dim=1)
    return (predictions == digits.test_labels).float().mean().item()
