"""The paper's first experiment: two separate inputs, weights and outputs, and the way of the weights to the optimum.

Computed in float64 with the library's own C-SGD and torch's SGD; a moment's work on any machine.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from consequent import CSGD
from consequent_lab.paper.findings import Axis, Contours, Figure, Finding, Panel, Series, Statement, Table
from consequent_lab.paper.measures import detour, overshoot, steps_until, swings
from consequent_lab.paper.statements import Outcome, judged

NAME = "loss-surface"
INPUTS = (0.5, 2.0)  # the loss bends 16 times as much along the second weight as along the first
START = (-4.0, 3.0)
OPTIMUM = (1.0, 1.0)
HIGH_RATE = 0.48  # SGD is stable below 2 / 2² = 0.5
LOW_RATE = 0.1
MOMENTUM = 0.8
# The paper does not say its rates and momentum: what it says of momentum is looked at over these.
MOMENTA = (0.5, 0.7, 0.8, 0.9, 0.95)
HIGH_RATES = (0.3, 0.4, 0.45, HIGH_RATE)
STEPS = 200
STRAIGHT = 1e-6  # a detour that is rounding, or what is left of the tiny damping
BENT = 0.01  # a detour that is none of these
LABELS = ("C-SGD", "SGD", "SGD with momentum")


@dataclass(frozen=True)
class Path2D:
    """The way of both weights with one optimiser at one learning rate."""

    label: str
    rate: float
    first: list[float]
    second: list[float]  # the weight along which the loss bends more

    @property
    def detour(self) -> float:
        """How far it leaves the straight line."""
        return detour(list(zip(self.first, self.second, strict=True)))

    @property
    def swings(self) -> int:
        """How often the second weight passes its optimum."""
        return swings(self.second, OPTIMUM[1])

    @property
    def passed(self) -> float:
        """How far the first weight goes beyond its optimum."""
        return overshoot(self.first, OPTIMUM[0])

    @property
    def steps(self) -> int | None:
        """Steps until the distance from the optimum stays within 1 % of the first one."""
        points = zip(self.first, self.second, strict=True)
        return steps_until([math.dist(point, OPTIMUM) for point in points])


def walk(label: str, rate: float, momentum: float = MOMENTUM) -> Path2D:
    """Returns the way from the start with an optimiser; the momentum is that of SGD with momentum."""
    layers = [nn.Linear(1, 1, bias=False, dtype=torch.float64) for _ in START]  # side by side; nothing is shared
    for layer, weight in zip(layers, START, strict=True):
        nn.init.constant_(layer.weight, weight)
    model = nn.ModuleList(layers)
    optimizer: Optimizer
    if label == "C-SGD":
        optimizer = CSGD(model, lr=rate, damping=1e-12, bound=None, loss_reduction="sum")
    else:
        optimizer = SGD(model.parameters(), lr=rate, momentum=momentum if label == "SGD with momentum" else 0.0)
    inputs = torch.tensor([INPUTS], dtype=torch.float64)
    targets = inputs * torch.tensor([OPTIMUM], dtype=torch.float64)
    points = [START]
    for _ in range(STEPS):
        optimizer.zero_grad()
        outputs = torch.cat(
            [layer(column) for layer, column in zip(layers, inputs.split(1, dim=1), strict=True)], dim=1
        )
        (0.5 * (outputs - targets).square().sum()).backward()
        optimizer.step()
        points.append((layers[0].weight.item(), layers[1].weight.item()))
    first, second = (list(values) for values in zip(*points, strict=True))
    return Path2D(label, rate, first, second)


def finding(*runs: Path) -> Finding:
    """Computes the experiment; needs no runs."""
    paths = {(label, rate): walk(label, rate) for label in LABELS for rate in (HIGH_RATE, LOW_RATE)}
    return Finding(
        name=NAME,
        title="Loss surface",
        summary="Two weights on separate inputs of different strength: the loss bends 16 times as much along one "
        "weight as along the other. Plain gradients point across the ellipses; consequentialism undoes the bending.",
        figures=[_figure(paths)],
        statements=statements(paths),
        tables=[_table(paths)],
    )


def statements(paths: dict[tuple[str, float], Path2D]) -> list[Statement]:
    """Returns the paper's statements on these paths."""
    detours = {key: path.detour for key, path in paths.items()}
    sgd = {rate: walk("SGD", rate) for rate in (*HIGH_RATES, LOW_RATE)}
    momentum = {(rate, m): walk("SGD with momentum", rate, m) for rate in (*HIGH_RATES, LOW_RATE) for m in MOMENTA}
    settings = [(rate, m) for rate in HIGH_RATES for m in MOMENTA]
    both = (HIGH_RATE, LOW_RATE)
    reduced = [0 < momentum[key].swings < sgd[key[0]].swings for key in settings]
    passed = [momentum[key].passed > BENT >= sgd[key[0]].passed for key in settings]
    calmed = [momentum[LOW_RATE, m].swings < momentum[HIGH_RATE, m].swings for m in MOMENTA]
    slow, fast = (sgd[rate].steps or STEPS + 1 for rate in (LOW_RATE, HIGH_RATE))
    outcomes = {
        "straight": Outcome(
            " and ".join(f"{detours['C-SGD', rate]:.1g}" for rate in both) + ".",
            [detours["C-SGD", rate] < STRAIGHT for rate in both],
        ),
        "along_the_gradients": Outcome(
            " and ".join(f"{detours['SGD', rate]:.2f}" for rate in both) + ".",
            [detours["SGD", rate] > BENT for rate in both],
        ),
        "momentum_calms": Outcome(
            f"At {HIGH_RATE:g}: SGD {sgd[HIGH_RATE].swings}, with momentum "
            f"{momentum[HIGH_RATE, MOMENTUM].swings} times. It holds in {sum(reduced)} of {len(settings)} settings.",
            reduced,
        ),
        "momentum_overshoots": Outcome(
            f"At {HIGH_RATE:g}: {100 * momentum[HIGH_RATE, MOMENTUM].passed:.0f} % with momentum "
            f"{MOMENTUM:g}, {100 * sgd[HIGH_RATE].passed:.0f} % with SGD. It holds in {sum(passed)} of "
            f"{len(settings)} settings, and together with the statement before in "
            f"{sum(a and b for a, b in zip(reduced, passed, strict=True))}.",
            passed,
        ),
        "low_rate_calms": Outcome(
            f"SGD passes {sgd[LOW_RATE].swings} times; fewer with {sum(calmed)} of {len(MOMENTA)} momenta; "
            f"iterations of SGD: {fast} at {HIGH_RATE:g}, {slow} at {LOW_RATE:g}.",
            [sgd[LOW_RATE].swings == 0, *calmed, slow > fast],
        ),
    }
    shown = {
        "rates": " and ".join(f"{rate:g}" for rate in both),
        "settings": len(settings),
        "momenta": len(MOMENTA),
    }
    return judged(NAME, "toy", outcomes, globals() | shown)


def _figure(paths: dict[tuple[str, float], Path2D]) -> Figure:
    def series(path: Path2D) -> Series:
        return Series(path.label, {"first": path.first, "second": path.second}, style="line+markers")

    return Figure(
        name=NAME,
        title="The way of two weights to their optimum",
        caption=f"Contours: the loss. All start at {_shown(START)} and should reach {_shown(OPTIMUM)}; "
        f"{STEPS} iterations.",
        panels=[
            Panel(
                title=f"{title} learning rate, {rate:g}",
                series=[series(paths[label, rate]) for label in LABELS],
                x=[Axis("first", "first weight")],
                y=[Axis("second", "second weight")],
                contours=_contours(),
                equal_scales=True,
            )
            for title, rate in (("High", HIGH_RATE), ("Low", LOW_RATE))
        ],
    )


def _shown(point: tuple[float, float]) -> str:
    return f"({point[0]:g}, {point[1]:g})".replace("-", "−")


def _contours() -> Contours:
    x = [-5.0 + 0.1 * step for step in range(101)]
    y = [-2.0 + 0.06 * step for step in range(101)]
    heights = [
        [0.5 * ((INPUTS[0] * (a - OPTIMUM[0])) ** 2 + (INPUTS[1] * (b - OPTIMUM[1])) ** 2) for a in x] for b in y
    ]
    return Contours(x, y, heights)


def _table(paths: dict[tuple[str, float], Path2D]) -> Table:
    return Table(
        "The paths measured",
        ["optimiser", "learning rate", "distance from the straight line", "swings", "overshoot", "iterations to 1 %"],
        [[path.label, path.rate, path.detour, path.swings, path.passed, path.steps] for path in paths.values()],
    )
