"""Eight residual problems: five differential equations, two regressions, one picture.

Each has terms (residuals of one sample, as a user writes them), its samples, and an error that is measured elsewhere:
relative, root mean square, on held-out points. The picture alone is judged on its own pixels.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import grad, hessian

PI = torch.pi
MANY_SAMPLES = "robot-arm, 4,000 samples"  # 4,610 parameters
NEW_SAMPLES = "poisson-5d, new samples"  # at each step
Function = Callable[[nn.Module, Tensor], Tensor]


@dataclass
class Problem:
    """A network, what is to be zero, and how wrong the network is."""

    name: str
    model: nn.Module
    terms: dict[str, Callable[..., Tensor]]
    batches: dict[str, tuple[Tensor, ...]]
    points: Tensor  # where the error is measured,
    truth: Tensor  # and against what
    weights: dict[str, float] = field(default_factory=dict)
    draw: Callable[[], dict[str, tuple[Tensor, ...]]] | None = None  # other samples, where each step has new ones

    @torch.no_grad()
    def error(self) -> float:
        """How far the network is from the truth, relative to it."""
        return float((self.model(self.points) - self.truth).norm() / self.truth.norm())

    def to(self, device: str) -> "Problem":
        """The same there."""
        batches = {name: tuple(one.to(device) for one in its) for name, its in self.batches.items()}
        points, truth = self.points.to(device), self.truth.to(device)
        return replace(self, model=self.model.to(device), batches=batches, points=points, truth=truth)


def perceptron(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def value_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: model(x).squeeze()


def boundary(model: nn.Module, x: Tensor, u: Tensor) -> Tensor:
    return model(x) - u


def on_faces(points: Tensor, low: float, high: float) -> Tensor:
    """Points of a cube moved to its faces, in turn."""
    for face in range(2 * points.shape[1]):
        points[face :: 2 * points.shape[1], face // 2] = (low, high)[face % 2]
    return points


def differential_equation(
    name: str,
    widths: tuple[int, ...],
    exact: Callable[[Tensor], Tensor],
    equation: Function,
    size: int,
    low: float,
    new_samples: bool = False,
) -> Problem:
    """An equation on a cube, whose solution is known on its faces."""

    def draw() -> dict[str, tuple[Tensor, ...]]:
        inside = low + (1 - low) * torch.rand(size, widths[0])
        edge = on_faces(low + (1 - low) * torch.rand(size // 5, widths[0]), low, 1.0)
        return {"interior": (inside,), "boundary": (edge, exact(edge)[:, None])}

    batches, points = draw(), low + (1 - low) * torch.rand(5000, widths[0])
    terms, truth = {"interior": equation, "boundary": boundary}, exact(points)[:, None]
    weights = {"boundary": 100.0}
    return Problem(name, perceptron(*widths), terms, batches, points, truth, weights, draw if new_samples else None)


def poisson_2d() -> Problem:
    def equation(model: nn.Module, x: Tensor) -> Tensor:
        return hessian(value_of(model))(x).trace() + 2 * PI**2 * (PI * x).sin().prod()

    return differential_equation("poisson-2d", (2, 32, 32, 32, 1), lambda x: (PI * x).sin().prod(1), equation, 500, 0.0)


def poisson_5d(new_samples: bool = False) -> Problem:
    def equation(model: nn.Module, x: Tensor) -> Tensor:
        return hessian(value_of(model))(x).trace() + PI**2 * (PI * x).cos().sum()

    widths = (5, 32, 32, 32, 1)
    return differential_equation("poisson-5d", widths, lambda x: (PI * x).cos().sum(1), equation, 500, 0.0, new_samples)


def helmholtz() -> Problem:
    def exact(x: Tensor) -> Tensor:
        return (PI * x[..., 0]).sin() * (4 * PI * x[..., 1]).sin()

    def equation(model: nn.Module, x: Tensor) -> Tensor:
        return hessian(value_of(model))(x).trace() + model(x).squeeze() + (17 * PI**2 - 1) * exact(x)

    return differential_equation("helmholtz", (2, 32, 32, 32, 1), exact, equation, 700, -1.0)


def heat() -> Problem:
    """u_t = u_xx / 4 on [0, 1] for a unit of time; samples are (t, x)."""

    def exact(x: Tensor) -> Tensor:
        return (-(PI**2) / 4 * x[:, 0]).exp() * (PI * x[:, 1]).sin()

    def equation(model: nn.Module, x: Tensor) -> Tensor:
        u = value_of(model)
        return grad(u)(x)[0] - hessian(u)(x)[1, 1] / 4

    return evolution("heat", exact, equation, 500, 0.0, 1.0, exact)


def burgers() -> Problem:
    """u_t + u u_x = 0.1/π u_xx on [-1, 1], from −sin πx; usual is a tenth of that, whose shock needs more points."""

    def equation(model: nn.Module, x: Tensor) -> Tensor:
        u = value_of(model)
        value, slope, curvature = u(x), grad(u)(x), hessian(u)(x)[1, 1]
        return slope[0] + value * slope[1] - 0.1 / PI * curvature

    def at_edge(x: Tensor) -> Tensor:
        return torch.where(x[:, 0] == 0, -(PI * x[:, 1]).sin(), 0.0)

    return evolution("burgers", at_edge, equation, 900, -1.0, 1.0, burgers_exact)


def evolution(
    name: str,
    at_edge: Callable[[Tensor], Tensor],
    equation: Function,
    size: int,
    low: float,
    high: float,
    exact: Callable[[Tensor], Tensor],
) -> Problem:
    """An equation of time and space, with initial values and values at both ends."""
    scale = torch.tensor([1.0, high - low])
    shift = torch.tensor([0.0, low])
    inside, first, ends, points = (torch.rand(number, 2) * scale + shift for number in (size, 80, 80, 5000))
    first[:, 0] = 0
    ends[::2, 1], ends[1::2, 1] = low, high
    terms = {"interior": equation, "initial": boundary, "ends": boundary}
    batches = {
        "interior": (inside,),
        "initial": (first, at_edge(first)[:, None]),
        "ends": (ends, at_edge(ends)[:, None]),
    }
    model = perceptron(2, 32, 32, 32, 1)
    weights = {"initial": 10.0, "ends": 10.0}
    return Problem(name, model, terms, batches, points, exact(points)[:, None], weights)


def burgers_exact(x: Tensor, nu: float = 0.1 / np.pi) -> Tensor:
    """By the transform of Cole and Hopf, and quadrature."""
    nodes, mass = np.polynomial.hermite.hermgauss(200)
    time, place = x[:, :1].numpy(), x[:, 1:].numpy()
    moved = place - np.sqrt(4 * nu * time) * nodes
    logarithm = -np.cos(np.pi * moved) / (2 * np.pi * nu)
    kernel = mass * np.exp(logarithm - logarithm.max(1, keepdims=True))
    return torch.from_numpy(-(np.sin(np.pi * moved) * kernel).sum(1) / kernel.sum(1))


def fit(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return model(x) - y


def robot_arm(samples: int = 600, width: int = 40) -> Problem:
    """Where the tip of an arm of four joints is, without noise."""

    def tip(angles: Tensor) -> Tensor:
        directions, lengths = (PI / 2 * angles).cumsum(1), torch.tensor([1.0, 0.8, 0.6, 0.4])
        return torch.stack([(lengths * directions.cos()).sum(1), (lengths * directions.sin()).sum(1)], 1)

    x, points = 2 * torch.rand(samples, 4) - 1, 2 * torch.rand(5000, 4) - 1
    return Problem("robot-arm", perceptron(4, width, width, 2), {"": fit}, {"": (x, tip(x))}, points, tip(points))


def friedman() -> Problem:
    """Friedman's first function of ten inputs, of which five count; samples have noise, the truth has none."""

    def function(x: Tensor) -> Tensor:
        y = 10 * (PI * x[:, 0] * x[:, 1]).sin() + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
        return (y[:, None] - 14.4) / 4.9

    x, points = torch.rand(1000, 10), torch.rand(5000, 10)
    y = function(x) + torch.randn(1000, 1) / 4.9
    model = nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1))
    return Problem("friedman", model, {"": fit}, {"": (x, y)}, points, function(points))


class Sine(nn.Module):
    """Of a SIREN with ω₀ = 15."""

    def forward(self, x: Tensor) -> Tensor:
        """Element by element."""
        return (15 * x).sin()


def picture() -> Problem:
    """A photograph of 36² grey pixels as a SIREN, judged on its own pixels."""
    from skimage.data import camera

    pixels = torch.from_numpy(camera().astype(np.float64))[None] / 127.5 - 1
    y = torch.nn.functional.adaptive_avg_pool2d(pixels, 36).flatten()[:, None]
    x = torch.cartesian_prod(*2 * [torch.linspace(-1, 1, 36)])
    widths, layers = (2, 40, 40, 1), []
    for number, (fan_in, fan_out) in enumerate(pairwise(widths)):
        layer = nn.Linear(fan_in, fan_out)
        bound = 1 / fan_in if number == 0 else (6 / fan_in) ** 0.5 / 15
        nn.init.uniform_(layer.weight, -bound, bound)
        layers += [layer, Sine()]
    return Problem("picture", nn.Sequential(*layers[:-1]), {"": fit}, {"": (x, y)}, x, y)


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "poisson-2d": poisson_2d,
    "poisson-5d": poisson_5d,
    "heat": heat,
    "burgers": burgers,
    "helmholtz": helmholtz,
    "robot-arm": robot_arm,
    "friedman": friedman,
    "picture": picture,
}


def problem_of(name: str, seed: int, device: str = "cpu") -> Problem:
    """The problem, with the first weights and the samples of a seed, in float64."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(seed)
    others = {MANY_SAMPLES: lambda: robot_arm(4000, 64), NEW_SAMPLES: lambda: poisson_5d(new_samples=True)}
    return (PROBLEMS | others)[name]().to(device)
