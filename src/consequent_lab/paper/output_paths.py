"""The paper's second experiment: the outputs of one dense layer on their way to their targets, over a mini-batch.

Beside SGD and C-SGD the paper's first extension, NLMS for each sample by itself, shows what it fails at. Computed in
float64, a moment's work on any machine.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn
from torch.optim import SGD

from consequent import CSGD
from consequent.paper import first_extension
from consequent_lab.paper.findings import Axis, Figure, Finding, Panel, Series, Statement, Table
from consequent_lab.paper.measures import detour
from consequent_lab.paper.statements import Outcome, judged

NAME = "output-paths"
FEATURES, OUTPUTS, SAMPLES = 20, 2, 10
SHOWN_SAMPLES = (0, 1)
STEPS = 200
SEED = 0
STRAIGHT = 1e-6
C_RATES = (0.7, 0.1)  # the paper's, and another one
EXTENSION_RATES = (1.0, 0.7, 0.1)  # at 1, NLMS takes one sample to its target in one step
SGD_RATES = (0.03, 0.01)  # the paper's; they belong to a loss that sums over the samples
DIVERGED = 1e6  # times the first distance
FIRST_STEP_RATES = (0.5, 0.9, 1.0, 1.1, 1.5)  # of C-SGD, compared after one step
INDIRECT = 0.05  # a detour, as a fraction of the straight line


@dataclass(frozen=True)
class Walk:
    """The outputs of all samples over the iterations."""

    label: str
    rate: float
    outputs: Tensor  # [steps + 1, samples, outputs]
    targets: Tensor

    def path(self, sample: int) -> list[list[float]]:
        """Returns a sample's way."""
        points: list[list[float]] = self.outputs[:, sample].tolist()
        return points

    @property
    def detours(self) -> list[float]:
        """How far each sample leaves the straight line to its target."""
        ends = [[*self.path(sample), self.targets[sample].tolist()] for sample in range(SAMPLES)]
        return [detour(path) for path in ends]

    @property
    def reversals(self) -> float:
        """How often an output turns back in the first 50 iterations, on average over samples and outputs."""
        steps = self.outputs[:51].diff(dim=0)
        moving = steps[:-1].abs() > 1e-9 * steps.abs().amax()
        return int(((steps[1:] * steps[:-1] < 0) & moving).sum()) / (SAMPLES * OUTPUTS)

    @property
    def last_distance(self) -> float:
        """The distance of all outputs from their targets at the end, as a fraction of the first one."""
        distances = (self.outputs - self.targets).flatten(1).norm(dim=1)
        return float(distances[-1] / distances[0])


def walk(label: str, rate: float, seed: int = SEED, steps: int = STEPS) -> Walk:
    """Returns what C-SGD, SGD or the First extension does with the outputs; the seed is of all numbers at first."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inputs = torch.randn(SAMPLES, FEATURES, dtype=torch.float64)
        targets = torch.randn(SAMPLES, OUTPUTS, dtype=torch.float64)
        layer = nn.Linear(FEATURES, OUTPUTS, bias=False, dtype=torch.float64)
        nn.init.xavier_uniform_(layer.weight)
    optimizer = (
        CSGD(layer, lr=rate, damping=1e-12, bound=None, loss_reduction="sum")
        if label == "C-SGD"
        else SGD(layer.parameters(), lr=rate)
    )
    outputs = [layer(inputs).detach()]
    first = (outputs[0] - targets).norm()
    for _ in range(steps):
        if label == "First extension":
            with torch.no_grad():
                layer.weight += first_extension(inputs.T, (outputs[-1] - targets).T, step_size=rate)
        else:
            optimizer.zero_grad()
            (0.5 * (layer(inputs) - targets).square().sum()).backward()
            optimizer.step()
        outputs.append(layer(inputs).detach())
        if not (outputs[-1] - targets).norm() < DIVERGED * first:
            break
    return Walk(label, rate, torch.stack(outputs), targets)


def finding(*runs: Path) -> Finding:
    """Computes the experiment; needs no runs."""
    walks = [walk("C-SGD", rate) for rate in C_RATES]
    walks += [walk("SGD", rate) for rate in SGD_RATES]
    walks += [walk("First extension", rate) for rate in EXTENSION_RATES]
    found = {(one.label, one.rate): one for one in walks}
    return Finding(
        name=NAME,
        title="The path of the outputs to their targets",
        summary=f"One dense layer, {FEATURES} inputs, {OUTPUTS} outputs, a mini-batch of {SAMPLES} normal samples, the "
        "loss ½Σe². Every sample's output should move to its target; through the shared weights each moves the others.",
        figures=[_figure(found)],
        statements=statements(found),
        tables=[_table(walks)],
    )


def statements(walks: dict[tuple[str, float], Walk]) -> list[Statement]:
    """Returns the paper's statements on these paths."""

    def worst(label: str, rate: float) -> float:
        return max(walks[label, rate].detours)

    def middle(label: str, rate: float) -> float:
        return median(walks[label, rate].detours)

    turned = {key: one.reversals for key, one in walks.items()}
    high, low = SGD_RATES
    extension = [walks["First extension", rate] for rate in EXTENSION_RATES]
    left = {rate: walk("C-SGD", rate, steps=1).last_distance for rate in FIRST_STEP_RATES}
    outcomes = {
        "straight": Outcome(
            " and ".join(f"{worst('C-SGD', rate):.1g}" for rate in C_RATES) + ".",
            [worst("C-SGD", rate) < STRAIGHT for rate in C_RATES],
        ),
        "sgd_oscillates": Outcome(
            f"{middle('SGD', high):.2f} of the length; SGD turns back {turned['SGD', high]:.1f} times, C-SGD "
            f"{turned['C-SGD', C_RATES[0]]:.1f} times.",
            [middle("SGD", high) > INDIRECT, turned["SGD", high] > turned["C-SGD", C_RATES[0]]],
        ),
        "a_lower_rate_does_not_help": Outcome(
            f"{middle('SGD', low):.2f} of the length; SGD turns back {turned['SGD', low]:.1f} times.",
            [middle("SGD", low) > INDIRECT, turned["SGD", low] > 0],
        ),
        "only_orthogonal": Outcome(
            " ".join(f"At {one.rate:g} it {_fate(one)}." for one in extension),
            [median(one.detours) > INDIRECT for one in extension],
        ),
        "the_perfect_rate": Outcome(
            "; ".join(f"{rate:g}: {value:.1g}" for rate, value in left.items()) + ".",
            [all((value < STRAIGHT) == (rate == 1) for rate, value in left.items())],
        ),
    }
    return judged(NAME, "toy", outcomes, globals())


def _fate(one: Walk) -> str:
    if one.last_distance > 1:
        return (
            f"diverges: {one.last_distance:.1g} times as far off as at first, after {len(one.outputs) - 1} iterations"
        )
    return f"arrives with a median detour of {median(one.detours):.2f}"


def _figure(walks: dict[tuple[str, float], Walk]) -> Figure:
    ours = walks["C-SGD", C_RATES[0]]
    others = [walks["SGD", rate] for rate in SGD_RATES] + [walks["First extension", C_RATES[0]]]
    names = {"First extension": "first extension"}
    return Figure(
        name=NAME,
        title="The outputs of two samples on their way to their targets",
        caption=f"2 of {SAMPLES} samples of {FEATURES} features. From the dots (start) to the crosses (targets).",
        panels=[
            _panel(f"C-SGD {ours.rate:g}, {names.get(one.label, one.label)} {one.rate:g}", [ours, one])
            for one in others
        ],
    )


def _panel(title: str, walks: list[Walk]) -> Panel:
    series = []
    for one in walks:
        for sample in SHOWN_SAMPLES:
            points = [point for point in one.path(sample) if math.hypot(*point) < 50]
            first, second = (list(side) for side in zip(*points, strict=True))
            columns = {"first": first, "second": second}
            series.append(Series(f"{one.label}, sample {sample + 1}", columns, one.label, "line+markers"))
    for label, values in (("start", walks[0].outputs[0]), ("target", walks[0].targets)):
        first, second = values[list(SHOWN_SAMPLES)].T.tolist()
        series.append(Series(label, {"first": first, "second": second}, style="markers"))
    axes = [Axis("first", "first output")], [Axis("second", "second output")]
    return Panel(title, series, *axes, equal_scales=True)


def _table(walks: list[Walk]) -> Table:
    return Table(
        f"All {SAMPLES} samples",
        ["method", "learning rate", "median detour", "largest detour", "reversals in 50 iterations", "distance left"],
        [
            [one.label, one.rate, median(one.detours), max(one.detours), one.reversals, one.last_distance]
            for one in walks
        ],
    )
