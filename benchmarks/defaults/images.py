"""Handwritten digits of 8 × 8 pixels: classified, compressed, generated, and their halves matched.

The data, digits.npz, are the 1,797 images that scikit-learn carries with it (``sklearn.datasets.load_digits``), kept
here because the study should need torch and numpy alone: the test set of "Optical Recognition of Handwritten Digits",
E. Alpaydin and C. Kaynak, 1998, UCI Machine Learning Repository,
https://archive.ics.uci.edu/dataset/80/optical+recognition+of+handwritten+digits.
"""

import pathlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.defaults.task import LEARNED_BY_HEART, Batch, Task, of, perceptron, random_numbers, shuffled

TRAINING_SAMPLES = 1440


class Digits(NamedTuple):
    """Pixels ``[samples, 64]`` from 0 to 1, labels from 0 to 9."""

    pixels: Tensor
    labels: Tensor
    test_pixels: Tensor
    test_labels: Tensor


def load_digits(seed: int) -> Digits:
    """The digits, split at random."""
    with np.load(pathlib.Path(__file__).with_name("digits.npz")) as file:
        pixels, labels = torch.tensor(file["pixels"]) / 16, torch.tensor(file["labels"]).long()
    order = torch.randperm(len(pixels), generator=random_numbers(seed))
    train, test = order[:TRAINING_SAMPLES], order[TRAINING_SAMPLES:]
    return Digits(pixels[train], labels[train], pixels[test], labels[test])


def classification(model: nn.Module, digits: Digits, steps: int, seed: int) -> Task:
    """Which digit is it? Images enter the model as ``[samples, 1, 8, 8]``, normalised."""
    mean, deviation = digits.pixels.mean(), digits.pixels.std()

    def loss(pixels: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model((pixels.view(-1, 1, 8, 8) - mean) / deviation), labels)

    return Task(
        model,
        shuffled(32, digits.pixels, digits.labels, seed=seed),
        loss,
        steps=steps,
        measure=of(loss, digits.pixels, digits.labels),
        test=of(loss, digits.test_pixels, digits.test_labels),
        floor=LEARNED_BY_HEART,
    )


def convolutional(seed: int) -> Task:
    """Three convolutions and a dense layer."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 10),
    )
    return classification(model, load_digits(seed), 200, seed)


def deep_perceptron(seed: int) -> Task:
    """Eight hidden layers of 100, no normalisation.

    Initialised as He et al. (2015) say; with torch's own initialisation plain SGD learns nothing in so few steps.
    """
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), perceptron(64, *(8 * [100]), 10))
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
    return classification(model, load_digits(seed), 250, seed)


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, normalised: bool) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=not normalised)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=not normalised)
        self.first_norm = nn.BatchNorm2d(outputs) if normalised else nn.Identity()
        self.second_norm = nn.BatchNorm2d(outputs) if normalised else nn.Identity()
        changes = stride > 1 or inputs != outputs
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride) if changes else nn.Identity()

    def forward(self, inputs: Tensor) -> Tensor:
        """The sum of both ways."""
        hidden = torch.relu(self.first_norm(self.first(inputs)))
        return torch.relu(self.second_norm(self.second(hidden)) + self.shortcut(inputs))


def residual(seed: int, normalised: bool) -> Task:
    """A residual network of three blocks."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        Block(8, 8, 1, normalised),
        Block(8, 16, 2, normalised),
        Block(16, 32, 2, normalised),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )
    return classification(model, load_digits(seed), 180, seed)


def residual_plain(seed: int) -> Task:
    """The residual network without BatchNorm."""
    return residual(seed, normalised=False)


def residual_batchnorm(seed: int) -> Task:
    """The residual network with BatchNorm."""
    return residual(seed, normalised=True)


def autoencoder(seed: int) -> Task:
    """Digits through eight numbers and back."""
    digits = load_digits(seed)
    torch.manual_seed(seed)
    model = perceptron(64, 48, 24, 8, 24, 48, 64)

    def loss(pixels: Tensor) -> Tensor:
        return nn.functional.mse_loss(model(pixels), pixels)

    return Task(
        model,
        shuffled(64, digits.pixels, seed=seed),
        loss,
        steps=400,
        measure=of(loss, digits.pixels),
        loss_reduction=lambda samples: samples * 64 / 2,
        test=of(loss, digits.test_pixels),
    )


class Variational(nn.Module):
    """A variational autoencoder with six hidden numbers."""

    hidden = 6

    def __init__(self) -> None:
        super().__init__()
        self.encoder = perceptron(64, 64, 2 * self.hidden)
        self.decoder = perceptron(self.hidden, 64, 64)

    def forward(self, pixels: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Pixels ``[N, 64]`` and noise ``[N, 6]`` to logits, means and logarithms of variances."""
        mean, log_variance = self.encoder(pixels).chunk(2, dim=1)
        return self.decoder(mean + noise * (log_variance / 2).exp()), mean, log_variance


def variational(seed: int) -> Task:
    """The bound of a variational autoencoder, a mean over samples."""
    digits = load_digits(seed)
    torch.manual_seed(seed)
    model = Variational()
    generator = random_numbers(seed)

    def loss(pixels: Tensor, noise: Tensor) -> Tensor:
        logits, mean, log_variance = model(pixels, noise)
        wrong = nn.functional.binary_cross_entropy_with_logits(logits, pixels, reduction="sum")
        divergence = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).sum()
        return (wrong + divergence) / len(pixels)

    def noise_for(pixels: Tensor) -> Tensor:
        return torch.randn(len(pixels), model.hidden, generator=generator)

    def batches() -> Iterator[Batch]:
        for (pixels,) in shuffled(64, digits.pixels, seed=seed):
            yield pixels, noise_for(pixels)

    return Task(
        model,
        batches(),
        loss,
        steps=400,
        measure=of(loss, digits.pixels, noise_for(digits.pixels)),
        test=of(loss, digits.test_pixels, noise_for(digits.test_pixels)),
    )


class TwoTowers(nn.Module):
    """A network for upper halves and one for lower halves, both to directions in 16 dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.upper = perceptron(32, 64, 64, 16)
        self.lower = perceptron(32, 64, 64, 16)

    def forward(self, pixels: Tensor) -> Tensor:
        """Pixels ``[N, 64]`` to the similarity of each upper half with each lower one, ``[N, N]``."""
        upper, lower = pixels.chunk(2, dim=1)
        return nn.functional.normalize(self.upper(upper)) @ nn.functional.normalize(self.lower(lower)).T


def contrastive(seed: int) -> Task:
    """Which lower half belongs to this upper half, among those of a batch?"""
    digits = load_digits(seed)
    torch.manual_seed(seed)
    model = TwoTowers()

    def loss(pixels: Tensor) -> Tensor:
        similarities = model(pixels) / 0.1
        partners = torch.arange(len(pixels))
        there, back = (nn.functional.cross_entropy(logits, partners) for logits in (similarities, similarities.T))
        return (there + back) / 2

    def batched(pixels: Tensor) -> Tensor:
        return torch.stack([loss(batch) for batch in pixels.split(64) if len(batch) == 64]).mean()

    def batches() -> Iterator[Batch]:
        return (batch for batch in shuffled(64, digits.pixels, seed=seed) if len(batch[0]) == 64)

    return Task(
        model,
        batches(),
        loss,
        steps=400,
        measure=of(batched, digits.pixels),
        test=of(batched, digits.test_pixels),
        floor=LEARNED_BY_HEART,
    )
