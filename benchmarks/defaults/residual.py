"""Residual networks for small regressions, as a user had one: what C-SGD at the advised rate ruins."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.defaults.task import Task, of, random_numbers, shuffled


class Block(nn.Module):
    """A residual block of two dense layers, whose activation writes to its own inputs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, width)
        self.activation = nn.SiLU(inplace=True)

    def forward(self, inputs: Tensor) -> Tensor:
        """``[samples, width]`` to the same."""
        return inputs + self.outer(self.activation(self.inner(inputs)))


def residual(seed: int, batch: int, function: Callable[[Tensor, Tensor], Tensor]) -> Task:
    """Three smooth functions of six numbers, by five residual blocks of width 48."""
    generator = random_numbers(seed)
    samples, columns, width = 2000, 6, 48
    inputs = torch.randn(samples + 1000, columns, generator=generator)
    mixed = [inputs @ torch.randn(columns, 3, generator=generator) / columns**0.5 for _ in range(2)]
    targets = function(*mixed)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(columns, width), *(Block(width) for _ in range(5)), nn.Linear(width, 3))

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.mse_loss(model(inputs), targets)

    return Task(
        model,
        shuffled(batch, inputs[:samples], targets[:samples], seed=seed),
        loss,
        steps=250,
        measure=of(loss, inputs[:samples], targets[:samples]),
        loss_reduction=lambda samples: samples * 3 / 2,
        test=of(loss, inputs[samples:], targets[samples:]),
    )


def sines(first: Tensor, second: Tensor) -> Tensor:
    """Waves along three directions."""
    return torch.sin(first)


def squares(first: Tensor, second: Tensor) -> Tensor:
    """The same and parabolas along three others."""
    return torch.sin(first) + 0.5 * second.square() - 0.5


RESIDUAL: dict[str, Callable[[int], Task]] = {
    f"residual-{function.__name__}-{batch}": lambda seed, batch=batch, function=function: residual(
        seed, batch, function
    )
    for function in (sines, squares)
    for batch in (64, 500)
}
