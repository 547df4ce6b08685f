"""Tables: a regression with correlated columns of very different scales, and many classes."""

import torch
from torch import Tensor, nn

from benchmarks.defaults.task import LEARNED_BY_HEART, Task, of, perceptron, random_numbers, shuffled


def standardised(values: Tensor) -> Tensor:
    """Columns with mean 0 and standard deviation 1."""
    return (values - values.mean(0)) / values.std(0)


def friedman(seed: int) -> Task:
    """Friedman's function of five columns, among ten others, five of which are mixtures of the five."""
    generator = random_numbers(seed)
    samples, test_samples = 4096, 2048
    columns = torch.rand(samples + test_samples, 10, generator=generator)
    mixtures = columns[:, :5] @ torch.rand(5, 5, generator=generator)
    mixtures += 0.1 * torch.randn(mixtures.shape, generator=generator)
    targets = 10 * torch.sin(torch.pi * columns[:, 0] * columns[:, 1]) + 20 * (columns[:, 2] - 0.5) ** 2
    targets += 10 * columns[:, 3] + 5 * columns[:, 4] + 0.5 * torch.randn(len(columns), generator=generator)
    scales = 10 ** (6 * torch.rand(15, generator=generator) - 3)
    inputs = standardised(torch.cat([columns, mixtures], 1) * scales)
    targets = standardised(targets)[:, None]

    torch.manual_seed(seed)
    model = perceptron(15, 64, 64, 1)

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.mse_loss(model(inputs), targets)

    return Task(
        model,
        shuffled(64, inputs[:samples], targets[:samples], seed=seed),
        loss,
        steps=400,
        measure=of(loss, inputs[:samples], targets[:samples]),
        loss_reduction=lambda samples: samples * 1 / 2,
        test=of(loss, inputs[samples:], targets[samples:]),
    )


def many_classes(seed: int) -> Task:
    """Thirty classes, each of three clusters in 16 dimensions, that overlap."""
    generator = random_numbers(seed)
    samples, test_samples, classes = 6000, 2000, 30
    centres = 1.5 * torch.randn(classes, 3, 16, generator=generator)
    labels = torch.randint(classes, (samples + test_samples,), generator=generator)
    clusters = torch.randint(3, labels.shape, generator=generator)
    inputs = centres[labels, clusters] + torch.randn(len(labels), 16, generator=generator)
    inputs = standardised(inputs @ torch.randn(16, 16, generator=generator))

    torch.manual_seed(seed)
    model = perceptron(16, 96, 96, classes)

    def loss(inputs: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(inputs), labels)

    return Task(
        model,
        shuffled(64, inputs[:samples], labels[:samples], seed=seed),
        loss,
        steps=400,
        measure=of(loss, inputs[:samples], labels[:samples]),
        test=of(loss, inputs[samples:], labels[samples:]),
        floor=LEARNED_BY_HEART,
    )
