"""The paper's first experiment: two separate inputs, weights and outputs, and the way of the weights to the optimum.

Computed in float64 with the library's own C-SGD and torch's SGD; a moment's work on any machine.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from consequent import CSGD
from consequent_lab.paper.findings import Axis, Contours, Figure, Finding, Panel, Series, Statement, Table
from consequent_lab.paper.measures import detour, overshoot, steps_until, swings
from consequent_lab.paper.verdicts import all_of

NAME = "loss-surface"
INPUTS = (0.5, 2.0)  # the loss bends 16 times as much along the second weight as along the first
START = (-4.0, 3.0)
OPTIMUM = (1.0, 1.0)
HIGH_RATE = 0.48  # SGD is stable below 2 / 2² = 0.5
LOW_RATE = 0.1
MOMENTUM = 0.8
STEPS = 200
STRAIGHT = 1e-6  # a detour that is rounding, or what is left of the tiny damping
LABELS = ("C-SGD", "SGD", "SGD with momentum")


class TwoWeights(nn.Module):
    """Two layers of one weight each, side by side; nothing is shared."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        self.second = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        with torch.no_grad():
            self.first.weight.fill_(START[0])
            self.second.weight.fill_(START[1])

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns both outputs."""
        return torch.cat([self.first(inputs[:, :1]), self.second(inputs[:, 1:])], dim=1)


@dataclass(frozen=True)
class Path2D:
    """The way of both weights with one optimiser at one learning rate."""

    label: str
    rate: float
    points: list[tuple[float, float]]

    @property
    def second(self) -> list[float]:
        """The weight along which the loss bends more."""
        return [point[1] for point in self.points]

    @property
    def first(self) -> list[float]:
        """The other weight."""
        return [point[0] for point in self.points]

    @property
    def steps(self) -> int | None:
        """Steps until the distance from the optimum stays within 1 % of the first one."""
        return steps_until([((x - OPTIMUM[0]) ** 2 + (y - OPTIMUM[1]) ** 2) ** 0.5 for x, y in self.points])


def walk(label: str, rate: float) -> Path2D:
    """Returns the way from the start with an optimiser."""
    model = TwoWeights()
    optimizer: Optimizer
    if label == "C-SGD":
        optimizer = CSGD(model, lr=rate, damping=1e-12, bound=None, loss_reduction="sum")
    else:
        optimizer = SGD(model.parameters(), lr=rate, momentum=MOMENTUM if label == "SGD with momentum" else 0.0)
    inputs = torch.tensor([INPUTS], dtype=torch.float64)
    targets = inputs * torch.tensor([OPTIMUM], dtype=torch.float64)
    points = [START]
    for _ in range(STEPS):
        optimizer.zero_grad()
        (0.5 * (model(inputs) - targets).square().sum()).backward()
        optimizer.step()
        points.append((model.first.weight.item(), model.second.weight.item()))
    return Path2D(label, rate, points)


def finding(*runs: Path) -> Finding:
    """Computes the experiment; needs no runs."""
    paths = {(label, rate): walk(label, rate) for label in LABELS for rate in (HIGH_RATE, LOW_RATE)}
    return Finding(
        name=NAME,
        title="Loss surface",
        summary="Two weights on separate inputs of different strength: the loss bends 16 times as much along one "
        "weight as along the other. Plain gradients point across the ellipses; consequentialism undoes the bending.",
        commands=[f"consequent reproduce {NAME}"],
        figures=[_figure(paths)],
        statements=statements(paths),
        tables=[_table(paths)],
    )


def statements(paths: dict[tuple[str, float], Path2D]) -> list[Statement]:
    """Returns the paper's statements on these paths."""
    high = {label: paths[label, HIGH_RATE] for label in LABELS}
    low = {label: paths[label, LOW_RATE] for label in LABELS}
    detours = {key: detour(path.points) for key, path in paths.items()}
    momentum_high, sgd_high = high["SGD with momentum"], high["SGD"]
    swung = {key: swings(path.second, OPTIMUM[1]) for key, path in paths.items()}
    passed = overshoot(momentum_high.first, OPTIMUM[0])
    shown_high, shown_low = f"{HIGH_RATE:g}", f"{LOW_RATE:g}"
    return [
        Statement(
            "The proposed algorithm moves the parameters directly towards the optimum values, regardless of "
            "the learning rate.",
            f"Largest distance from the straight line ÷ its length: {detours['C-SGD', HIGH_RATE]:.1g} at {shown_high} "
            f"and {detours['C-SGD', LOW_RATE]:.1g} at {shown_low}.",
            all_of(detours["C-SGD", rate] < STRAIGHT for rate in (HIGH_RATE, LOW_RATE)),
        ),
        Statement(
            "SGD moves perpendicular to the ellipses: fast along one weight, slowly along the other.",
            f"SGD leaves the straight line by {detours['SGD', HIGH_RATE]:.2f} of its length at {shown_high} and by "
            f"{detours['SGD', LOW_RATE]:.2f} at {shown_low}.",
            all_of(detours["SGD", rate] > 0.01 for rate in (HIGH_RATE, LOW_RATE)),
        ),
        Statement(
            "At the high rate SGD oscillates along one axis; momentum reduces that.",
            f"The second weight passes its optimum {swung['SGD', HIGH_RATE]} times with SGD and "
            f"{swung['SGD with momentum', HIGH_RATE]} times with momentum, before it is within 1 %.",
            all_of([swung["SGD", HIGH_RATE] > 0, swung["SGD with momentum", HIGH_RATE] < swung["SGD", HIGH_RATE]]),
        ),
        Statement(
            "The accumulated momentum makes the other weight pass its optimum.",
            f"The first weight goes {100 * passed:.0f} % of its first distance too far with momentum, and "
            f"{100 * overshoot(sgd_high.first, OPTIMUM[0]):.0f} % with SGD.",
            all_of([passed > 0.01, overshoot(sgd_high.first, OPTIMUM[0]) < 0.01]),
        ),
        Statement(
            "A small rate ends the oscillations of SGD and reduces those of momentum, at the cost of more iterations.",
            f"At {shown_low} the second weight passes its optimum {swung['SGD', LOW_RATE]} (SGD) and "
            f"{swung['SGD with momentum', LOW_RATE]} (momentum) times. Iterations until within 1 % of the optimum: SGD "
            f"{sgd_high.steps} at {shown_high}, {low['SGD'].steps} at {shown_low}.",
            all_of(
                [
                    swung["SGD", LOW_RATE] == 0,
                    swung["SGD with momentum", LOW_RATE] < swung["SGD with momentum", HIGH_RATE],
                    (low["SGD"].steps or STEPS + 1) > (sgd_high.steps or STEPS + 1),
                ]
            ),
        ),
    ]


def _figure(paths: dict[tuple[str, float], Path2D]) -> Figure:
    panels = [
        Panel(
            title=f"{title} learning rate, {rate:g}",
            series=[
                Series(
                    label,
                    {
                        "first": [*paths[label, rate].first],
                        "second": [*paths[label, rate].second],
                        "iteration": [float(step) for step in range(STEPS + 1)],
                    },
                    style="line+markers",
                )
                for label in LABELS
            ],
            x=[Axis("first", "first weight")],
            y=[Axis("second", "second weight")],
            contours=_contours(),
            equal_scales=True,
        )
        for title, rate in (("High", HIGH_RATE), ("Low", LOW_RATE))
    ]
    return Figure(
        name=NAME,
        title="The way of two weights to their optimum",
        caption=f"Contours: the loss. All start at {_shown(START)} and should reach {_shown(OPTIMUM)}; "
        f"{STEPS} iterations.",
        panels=panels,
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
        [
            [
                label,
                rate,
                detour(path.points),
                float(swings(path.second, OPTIMUM[1])),
                overshoot(path.first, OPTIMUM[0]),
                None if path.steps is None else float(path.steps),
            ]
            for (label, rate), path in paths.items()
        ],
    )
