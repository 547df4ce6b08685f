"""What a task is: a model, its batches, its loss, and what is measured in the end."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, ...]
LossReduction = str | float | Callable[[int], float]

LEARNED_BY_HEART = 0.002  # a cross-entropy below which less is no better


@dataclass
class Task:
    """A model in training, as a stranger would write it.

    Attributes:
        model: the network, freshly initialised.
        batches: the training batches, without end.
        loss: the loss of a batch's tensors.
        steps: how many batches are trained on.
        measure: the loss over a large fixed part of the training set.
        loss_reduction: what the loss is divided by, as ``consequent.attach`` wants it.
        test: a loss over data that was not trained on, or the distance from a known truth.
        after_step: what else happens after a step; it is given the number of steps so far.
        floor: what counts as learned by heart.
    """

    model: nn.Module
    batches: Iterator[Batch]
    loss: Callable[..., Tensor]
    steps: int
    measure: Callable[[], Tensor]
    loss_reduction: LossReduction = "mean"
    test: Callable[[], Tensor] | None = None
    after_step: Callable[[int], None] | None = None
    floor: float = 0.0


def random_numbers(seed: int) -> torch.Generator:
    """A source of random numbers that nothing else draws from."""
    return torch.Generator().manual_seed(seed)


def shuffled(size: int, *tensors: Tensor, seed: int) -> Iterator[Batch]:
    """Mini-batches of ``size`` samples, in a new order each epoch."""
    generator = random_numbers(seed)
    while True:
        for chosen in torch.randperm(len(tensors[0]), generator=generator).split(size):
            yield tuple(tensor[chosen] for tensor in tensors)


def full_batch(*tensors: Tensor) -> Iterator[Batch]:
    """The same samples at every step."""
    while True:
        yield tensors


def of(loss: Callable[..., Tensor], *tensors: Tensor) -> Callable[[], Tensor]:
    """The loss of these tensors, without gradients."""

    @torch.no_grad()
    def measured() -> Tensor:
        return loss(*tensors)

    return measured


def perceptron(*widths: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Dense layers of these widths, an activation between any two."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*layers[:-1])
