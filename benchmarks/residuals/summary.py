"""The table and the figures of docs/whole-network.md."""

import copy
import math
import pathlib
from statistics import median
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import torch
from torch import nn

import consequent
from benchmarks.idea_pictures import GREY, OURS, PLAIN, STYLE
from benchmarks.residuals.contestants import CONTESTANTS
from benchmarks.residuals.problems import PROBLEMS, perceptron
from benchmarks.residuals.runs import TRIAL

NAME = "WholeNetwork"
TITLES = {
    "poisson-2d": "Poisson, 2-D",
    "poisson-5d": "Poisson, 5-D",
    "heat": "heat",
    "burgers": "Burgers",
    "helmholtz": "Helmholtz (1, 4)",
    "robot-arm": "robot arm",
    "friedman": "Friedman, noisy",
    "picture": "picture, 36²",
}
SHORT = {"torch-levenberg-marquardt": "torch-LM"}
Line = dict[str, Any]


def finals(lines: list[Line], problem: str, contestant: str) -> list[Line]:
    return [
        one for one in lines if (one["problem"], one["contestant"]) == (problem, contestant) and one["seed"] != TRIAL
    ]


def errors(lines: list[Line], problem: str) -> dict[str, list[float]]:
    """At the end, of each contestant's seeds; infinite where a run did not get there."""
    found = {name: [one["error"] for one in finals(lines, problem, name)] for name in CONTESTANTS}
    return {name: [math.inf if e is None else e for e in its] for name, its in found.items() if its}


def best_rival(found: dict[str, list[float]]) -> str:
    return min((name for name in found if name != NAME), key=lambda name: median(found[name]))


def verdict(found: dict[str, list[float]]) -> str:
    """Ahead: all of our seeds are better than all of the others'. Behind: all of one other's are better than ours."""
    ours, others = found[NAME], [its for name, its in found.items() if name != NAME]
    if max(ours) < min(map(min, others)):
        return "ahead"
    return "behind" if any(max(its) < min(ours) for its in others) else "level"


def table(lines: list[Line]) -> str:
    """Medians, lowest and highest; bold is who is ahead."""
    rows = ["| problem | `WholeNetwork` | best rival |", "|---|---:|---:|"]
    for problem, title in TITLES.items():
        if not (found := errors(lines, problem)):
            continue
        rival, said = best_rival(found), verdict(found)
        cells = []
        for name, winning in ((NAME, "ahead"), (rival, "behind")):
            its, who = found[name], "" if name == NAME else f"{SHORT.get(name, name)} "
            best = f"{who}{median(its):.1e}"
            cells.append(f"{f'**{best}**' if said == winning else best} ({min(its):.1e}–{max(its):.1e})")
        rows.append(f"| {title} | {cells[0]} | {cells[1]} |")
    return "\n".join(rows)


def figure(lines: list[Line], path: pathlib.Path) -> None:
    """Error against seconds: medians of the seeds; the best rival is dark, the others are light."""
    with plt.rc_context(STYLE):
        drawn, panels = plt.subplots(2, 4, figsize=(9.5, 4.6), sharex=True)
        for axes, problem in zip(panels.flat, PROBLEMS, strict=True):
            rival = best_rival(errors(lines, problem))
            for name in CONTESTANTS:
                curves = [one["curve"] for one in finals(lines, problem, name)]
                points = [
                    (median(p[0] for p in points), median(math.inf if p[2] is None else p[2] for p in points))
                    for points in zip(*(reversed(curve) for curve in curves), strict=False)  # the first may be missing
                ]
                if not points:
                    continue
                is_best = name in (NAME, rival)
                colour = OURS if name == NAME else PLAIN if is_best else GREY
                axes.plot(*zip(*points, strict=True), color=colour, lw=2 if is_best else 1, alpha=1 if is_best else 0.5)
            axes.set(xscale="log", yscale="log")
            axes.set_title(TITLES[problem], fontsize=10)
            axes.annotate(SHORT.get(rival, rival), (0.04, 0.05), xycoords="axes fraction", color=PLAIN, fontsize=9)
        for axes in panels[1]:
            axes.set_xlabel("processor seconds")
            axes.set_xticks([0.1, 1, 10], ["0.1", "1", "10"])
        for axes in panels[:, 0]:
            axes.set_ylabel("error")
        drawn.tight_layout()
        drawn.savefig(path, transparent=True, metadata={"Date": None})


def one_step(path: pathlib.Path) -> None:
    """Where the outputs of a network go in one step: each layer moved as if it moved alone, and all at once."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    x = torch.linspace(-2, 2, 7)[:, None]
    start = perceptron(1, 100, 100, 100, 1)
    for module in start[::2]:
        nn.init.normal_(module.weight, std=1.5 / module.in_features**0.5)
        nn.init.normal_(module.bias)
    y = start(x).detach() + 0.4 * (3 * x).cos()
    with torch.no_grad():
        before = start(x)
        after = {"layer by layer": layer_by_layer(start, x, y), "all at once": all_at_once(start, x, y)}
    with plt.rc_context(STYLE):
        drawn, panels = plt.subplots(1, 2, figsize=(8, 2.9), sharey=True)
        for axes, (title, outputs) in zip(panels, after.items(), strict=True):
            axes.plot(x, y, "o", mfc="none", color=GREY, ms=8, label="targets")
            axes.plot(x, before, ".", color=GREY, alpha=0.6, label="before the step")
            axes.plot(x, outputs, "o", ms=4, color=OURS if title == "all at once" else PLAIN, label="after it")
            error = float((outputs - y).norm() / (before - y).norm())
            axes.set_title(f"{title}: {100 * error:.2g} % of the distance is left", fontsize=10)
        panels[1].legend(frameon=False, fontsize=8, loc="upper left")
        panels[0].set(xlabel="input", ylabel="output")
        panels[1].set_xlabel("input")
        drawn.tight_layout()
        drawn.savefig(path, transparent=True, metadata={"Date": None})


def layer_by_layer(start: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    model = copy.deepcopy(start)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    consequent.attach(optimizer, model, relative_damping=0.01, loss_reduction="sum", bound=None)
    with torch.enable_grad():
        ((model(x) - y).square().sum() / 2).backward()
    optimizer.step()
    outputs: torch.Tensor = model(x)
    return outputs


def all_at_once(start: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    model = copy.deepcopy(start)
    consequent.WholeNetwork(model, lambda model, x, y: model(x) - y, damping=1e-2).step(x, y)
    outputs: torch.Tensor = model(x)
    return outputs
