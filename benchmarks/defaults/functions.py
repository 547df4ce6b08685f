"""Networks that stand for functions: a smooth one, an image, the solution of an equation; and signals over time."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from benchmarks.defaults.task import Batch, Task, full_batch, of, perceptron, random_numbers, shuffled


def smooth_function(seed: int) -> Task:
    """A sum of waves in the plane with a little noise, the full batch at each step."""
    generator = random_numbers(seed)
    waves = 2 * torch.randn(2, 6, generator=generator)
    phases = 2 * math.pi * torch.rand(6, generator=generator)
    points = 2 * torch.rand(512, 2, generator=generator) - 1
    test_points = 2 * torch.rand(512, 2, generator=generator) - 1
    values, test_values = ((torch.sin(at @ waves + phases)).mean(1, keepdim=True) for at in (points, test_points))
    values = values + 0.02 * torch.randn(values.shape, generator=generator)

    torch.manual_seed(seed)
    model = perceptron(2, 64, 64, 1, activation=nn.Tanh)

    def loss(points: Tensor, values: Tensor) -> Tensor:
        return nn.functional.mse_loss(model(points), values)

    return Task(
        model,
        full_batch(points, values),
        loss,
        steps=400,
        measure=of(loss, points, values),
        loss_reduction=lambda samples: samples * 1 / 2,
        test=of(loss, test_points, test_values),
    )


class Siren(nn.Module):
    """Coordinates to brightness through three hidden layers ``sin(30 (W x + b))`` (Sitzmann et al., 2020)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Linear(2, width), nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 1)]
        )
        for index, layer in enumerate(self.layers):
            bound = 1 / 2 if index == 0 else math.sqrt(6 / width) / 30
            nn.init.uniform_(layer.weight, -bound, bound)

    def forward(self, points: Tensor) -> Tensor:
        """``[points, 2]`` to ``[points, 1]``."""
        *hidden, last = self.layers
        for layer in hidden:
            points = torch.sin(30 * layer(points))
        return last(points)


def picture(side: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Discs with edges over stripes: places ``[pixels, 2]`` and brightness ``[pixels, 1]`` from −1 to 1."""
    places = torch.cartesian_prod(*(2 * [torch.linspace(-1, 1, side)]))
    direction = 8 * torch.randn(2, 1, generator=generator)
    brightness = 0.4 * torch.sin(places @ direction)
    for _ in range(4):
        centre, radius = 2 * torch.rand(2, generator=generator) - 1, 0.2 + 0.3 * torch.rand(1, generator=generator)
        is_inside = ((places - centre).norm(dim=1, keepdim=True) < radius).float()
        brightness = brightness * (1 - is_inside) + is_inside * (2 * torch.rand(1, generator=generator) - 1)
    return places, brightness


def coordinate_network(seed: int) -> Task:
    """A picture as a function of its coordinates (SIREN), the full batch at each step.

    There are about as many pixels as parameters: with fewer pixels the loss falls to float32's rounding.
    """
    places, brightness = picture(48, random_numbers(seed))
    torch.manual_seed(seed)
    model = Siren()

    def loss(places: Tensor, brightness: Tensor) -> Tensor:
        return nn.functional.mse_loss(model(places), brightness)

    return Task(
        model,
        full_batch(places, brightness),
        loss,
        steps=200,
        measure=of(loss, places, brightness),
        loss_reduction=lambda samples: samples * 1 / 2,
    )


def poisson(seed: int) -> Task:
    """The equation u″ = f on [−1, 1] with u = 0 at both ends, as a physics-informed network; the test is u itself.

    The kept runs are of the second edition. Since the third, gradients that are differentiated stay plain, and C-
    versions correct here what the ends contribute, and nothing else.
    """
    generator = random_numbers(seed)
    frequencies = math.pi * torch.arange(1, 4)
    strengths = torch.randn(3, generator=generator) / frequencies**2
    strengths /= (strengths * frequencies**2).norm() / math.sqrt(2)  # f has a mean square of 1
    ends = torch.tensor([[-1.0], [1.0]])

    def solution(points: Tensor) -> Tensor:
        return (strengths * torch.sin(frequencies * points)).sum(1, keepdim=True)

    def right_side(points: Tensor) -> Tensor:
        return -(strengths * frequencies**2 * torch.sin(frequencies * points)).sum(1, keepdim=True)

    torch.manual_seed(seed)
    model = perceptron(1, 32, 32, 32, 1, activation=nn.Tanh)

    def loss(points: Tensor) -> Tensor:
        points = points.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(points).sum(), points, create_graph=True)
        (curvature,) = torch.autograd.grad(slope.sum(), points, create_graph=True)
        inside = nn.functional.mse_loss(curvature, right_side(points.detach()))
        return inside + 10 * nn.functional.mse_loss(model(ends), torch.zeros(2, 1))

    def batches() -> Iterator[Batch]:
        while True:
            yield (2 * torch.rand(128, 1, generator=generator) - 1,)

    def distance(points: Tensor) -> Tensor:
        return nn.functional.mse_loss(model(points), solution(points))

    grid = torch.linspace(-1, 1, 512)[:, None]
    return Task(
        model,
        batches(),
        loss,
        steps=300,
        measure=lambda: loss(grid).detach(),
        loss_reduction=lambda samples: samples * 1 / 2,
        test=of(distance, grid),
    )


def signals(seed: int) -> Task:
    """Two numbers from three channels over 40 moments, by convolutions over time: how strong, and how delayed."""
    generator = random_numbers(seed)
    samples, test_samples, moments = 2048, 1024, 40
    count = samples + test_samples
    source = torch.randn(count, moments + 10, generator=generator)
    source = nn.functional.avg_pool1d(source[:, None], 3, 1, 1).squeeze(1)  # neighbours in time are alike
    delays = torch.randint(10, (count,), generator=generator)
    strengths = 0.2 + torch.rand(count, generator=generator)
    times = torch.arange(moments) + 10
    echo = strengths[:, None] * source.gather(1, times - delays[:, None])
    other = torch.randn(count, moments, generator=generator)
    inputs = torch.stack([source[:, times], echo + 0.1 * other, other], 1)
    targets = torch.stack([(strengths - 0.7) / 0.3, (delays - 4.5) / 2.9], 1)

    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv1d(3, 16, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv1d(16, 24, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv1d(24, 24, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(24 * 5, 2),
    )

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.mse_loss(model(inputs), targets)

    return Task(
        model,
        shuffled(32, inputs[:samples], targets[:samples], seed=seed),
        loss,
        steps=400,
        measure=of(loss, inputs[:samples], targets[:samples]),
        loss_reduction=lambda samples: samples * 2 / 2,
        test=of(loss, inputs[samples:], targets[samples:]),
    )
