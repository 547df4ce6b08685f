"""The paper's fourth experiment: ResNet-20 on CIFAR-10, three optimisers, plain and C-, and BatchNorm.

The paper's SGD has momentum here, 0.95 as Nesterov has. Two controls are not the paper's.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from consequent_lab.kept_runs import KeptRun
from consequent_lab.paper.findings import Axis, Figure, Finding, Lead, Number, Panel, Series, Table
from consequent_lab.paper.kept_contestants import KeptContestant, kept_race, spread
from consequent_lab.paper.race_finding import ITERATIONS_OR_SECONDS, race_finding, search_figure, seconds_note
from consequent_lab.paper.rates import Search
from consequent_lab.paper.recipes import Contestant, Race
from consequent_lab.paper.resnet20_statements import (
    ALL_CORRECT,
    CONTROL,
    NAME,
    forgotten,
    last_common_epoch,
    layer_norms,
    reaches,
    statements,
    stays_at_all,
    without_controls,
)
from consequent_lab.train_config import Optimiser, TrainConfig

SEEDS = (0, 1, 2)
LONG, SHORT = 40_000, 10_000  # iterations; the paper has C-SGD and SGD-BN cross after 25,000
# In the order of importance. Those with three seeds carry the headlines, controls aside.
LABELS = {
    "C-SGD": (LONG, SEEDS),
    "SGD-BN": (LONG, SEEDS),
    "C-Nesterov": (SHORT, SEEDS),
    "Nesterov-BN": (SHORT, SEEDS),
    "SGD": (SHORT, SEEDS),
    "Nesterov": (SHORT, SEEDS),
    "Adam": (SHORT, SEEDS[:1]),
    "C-Adam": (SHORT, SEEDS[:1]),
    "Adam-BN": (SHORT, SEEDS[:1]),
    "C-SGD-BN": (SHORT, SEEDS[:1]),
    "SGD control": (SHORT, SEEDS),
    "SGD-BN control": (SHORT, SEEDS),
}
OPTIMISERS: dict[str, Optimiser] = {"SGD": "momentum", "Nesterov": "nesterov", "Adam": "adam"}
HEADLINES = ("C-SGD", "SGD", "SGD-BN")
WITHOUT_BN = ("C-SGD", "C-Nesterov", "C-Adam", "SGD", "Nesterov", "Adam")
WITH_BN = ("C-SGD", "C-Nesterov", "C-SGD-BN", "SGD-BN", "Nesterov-BN", "Adam-BN")
LONG_RUNS = ("C-SGD", "SGD-BN")
WITH_CONTROLS = ("C-SGD", "SGD", "SGD control", "SGD-BN", "SGD-BN control")
# What panels show: whom, and up to which iteration, so that no panel is longer than its curves.
PANELS = {
    "without BatchNorm": (WITHOUT_BN, SHORT),
    "with BatchNorm, and C-": (WITH_BN, SHORT),
    "to the end": (LONG_RUNS, math.inf),
}
TEST_ACCURACY = Axis("test_accuracy", "test accuracy")
Cell = Callable[[KeptContestant], str | Number]  # of a table with a row for every contestant


# ---- what is run -------------------------------------------------------------------------------------------------


def race(quick: bool = False) -> Race:
    """Returns the experiment, or a really small one on the digits."""
    contestants = tuple(
        Contestant(
            label.lower().replace(" ", "-"),
            label,
            _config(label, iterations, quick),
            seeds[:2] if quick else seeds,
            headline=len(seeds) > 1 and not label.endswith(CONTROL),
        )
        for label, (iterations, seeds) in LABELS.items()
    )
    if quick:
        search = Search(epochs=2, lowest=-8, highest=-6, extensions=0, half_ways=False)
        return Race(f"{NAME}-quick", contestants, search, timed_iterations=20)
    return Race(NAME, contestants, Search(epochs=3), timed_iterations=300)


def _config(label: str, iterations: int, quick: bool) -> TrainConfig:
    consequentialist, base = label.startswith("C-"), label.removesuffix(CONTROL)
    has_its_inputs = consequentialist or label != base
    config = TrainConfig(
        dataset="cifar10",
        model="resnet20-bn" if base.endswith("-BN") else "resnet20",
        optimiser=OPTIMISERS[base.removeprefix("C-").removesuffix("-BN")],
        consequentialist=consequentialist,
        head_lr_factor=0.1 if has_its_inputs else 1.0,
        momentum=0.95,
        betas=(0.9, 0.999),
        damping=0.03,
        batch_size=128,
        iterations=iterations,
        normalisation="centred" if has_its_inputs else "symmetric",
        log_every=100,
        gradient_norms="both",
        checkpoint_every=2000,
    )
    if not quick:
        return config
    config = replace(config, dataset="digits", widths=(4, 8), blocks=1, batch_size=32)
    return replace(config, iterations=iterations // 500 + 70, log_every=10, checkpoint_every=40)


# ---- what comes out ----------------------------------------------------------------------------------------------


def finding(*runs: Path) -> Finding:
    """Returns the finding from what is kept."""
    kept, every = kept_race(race, runs)
    contestants = {one.label: one for one in every}
    of_the_paper = without_controls(contestants)
    searched = {
        "without BatchNorm": [contestants[label] for label in (*WITHOUT_BN, f"SGD{CONTROL}")],
        "with BatchNorm": [one for one in every if one.label.removesuffix(CONTROL).endswith("-BN")],
    }
    return race_finding(
        NAME,
        "ResNet-20",
        "CIFAR-10, mini-batches of 128, momentum 0.95, λ = 0.03. Plain optimisers with and without BatchNorm (inputs "
        "in [−1, 1]) against their C- versions without it (inputs in [−½, ½], the last layer's learning rate × 0.1), "
        "as in the paper. No augmentation, no weight decay. Controls, which are not the paper's: plain SGD with the C- "
        "versions' inputs and last layer's rate.",
        (kept, every),
        [
            _headline_figure(of_the_paper),
            _epoch_figure(of_the_paper),
            _batch_figure(of_the_paper),
            _norms_figure(of_the_paper),
            _controls_figure(contestants),
            search_figure(f"{NAME}-search", kept, searched),
        ],
        lambda: statements(kept, contestants),
        [headlines_table(every)],
        lambda: lead(of_the_paper),
    )


def _by_heart(one: KeptContestant) -> str:
    """Returns the iteration from which the training set is known by heart."""
    return spread([reaches(run) for run in one.runs], within=_shortest(one), counted=False)


def _shortest(one: KeptContestant) -> float:
    return min(float(run.outcome["iteration"]) for run in one.runs)


def _at(one: KeptContestant, metric: str, iteration: float, form: str, factor: float = 1.0) -> str:
    found = [run.at(metric, iteration) for run in one.runs]
    return spread([factor * value for value in found if value is not None], form, counted=False)


def _table(title: str, contestants: Iterable[KeptContestant], columns: dict[str, Cell]) -> Table:
    return Table(title, [*columns], [[cell(one) for cell in columns.values()] for one in contestants])


def lead(contestants: dict[str, KeptContestant]) -> Lead | None:
    """Returns what a report begins with; None if runs are missing."""
    shown = [contestants[label] for label in HEADLINES]
    if not all(one.runs for one in shown):
        return None
    end = last_common_epoch(list(contestants.values()))
    columns: dict[str, Cell] = {
        "ResNet-20, CIFAR-10": lambda one: one.label,
        "seeds": lambda one: float(len(one.runs)),
        "learning rates searched": lambda one: float(len(one.search.losses)),
        "iteration from which the training set is known by heart": _by_heart,
        f"training loss at {end:,}": lambda one: _at(one, "epoch_loss", end, ".2g"),
        f"test accuracy at {end:,}, %": lambda one: _at(one, "test_accuracy", end, ".1f", 100),
    }
    effects = _table("Sizes of effects: mean (range) over seeds", shown, columns)
    (soon, late, later), (ours, plain, with_norm) = (
        [str(row[place]).split(" (")[0] for row in effects.rows] for place in (3, 5)
    )
    return Lead(
        f"{NAME}-headline",
        [
            "Without BatchNorm, ResNet-20 knows CIFAR-10's whole training set by heart after "
            f"{soon} iterations with C-SGD (SGD: {late}; SGD with BatchNorm: {later}).",
            f"On the test set, which the paper does not report, C-SGD is right in {ours} %, SGD in {plain} % and SGD "
            f"with BatchNorm in {with_norm} %.",
        ],
        effects,
    )


def headlines_table(contestants: Iterable[KeptContestant]) -> Table:
    """Returns what the runs came to, compared after the last epoch that all of the headlines' runs have."""
    present = [one for one in contestants if one.runs]
    end = last_common_epoch(present)

    def iterations(one: KeptContestant) -> str:
        ends = [run.outcome["iteration"] for run in one.runs]
        return " to ".join(f"{iteration:,}" for iteration in sorted({min(ends), max(ends)}))

    def learnt(one: KeptContestant) -> str:
        return spread([stays_at_all(run) for run in one.runs], within=_shortest(one), counted=False)

    def lost(one: KeptContestant) -> str:
        compared = [run for run in one.runs if run.at("test_accuracy", end) is not None]
        return spread([forgotten(run, until=end) for run in compared], counted=False)

    columns: dict[str, Cell] = {
        "contestant": lambda one: one.label,
        "seeds": lambda one: float(len(one.runs)),
        "learning rate": lambda one: one.runs[0].config.lr,
        "iterations": iterations,
        f"iteration of {100 * ALL_CORRECT:g} % over an epoch": _by_heart,
        "last mini-batches at 100 % from iteration": learnt,
        f"loss over the epoch until {end:,}": lambda one: _at(one, "epoch_loss", end, ".2g"),
        f"test accuracy at {end:,}": lambda one: _at(one, "test_accuracy", end, ".3f"),
        f"samples forgotten until {end:,}": lost,
    }
    return _table("Mean and range over the seeds", present, columns)


def _headline_figure(contestants: dict[str, KeptContestant]) -> Figure:
    shown = [contestants[label] for label in HEADLINES]
    return Figure(
        name=f"{NAME}-headline",
        title="Learnt by heart, and what is left of it on the test set",
        caption="ResNet-20 on CIFAR-10 without BatchNorm (C-SGD, SGD) and with it (SGD-BN), three seeds each, the "
        f"first {SHORT:,} iterations. " + seconds_note(shown),
        panels=_short_panels(shown, ITERATIONS_OR_SECONDS),
    )


def _controls_figure(contestants: dict[str, KeptContestant]) -> Figure:
    return Figure(
        name=f"{NAME}-controls",
        title="Controls: plain SGD with the inputs and the last layer's rate of C-SGD",
        caption="Inputs in [−½, ½] and the last layer's learning rate × 0.1, which the paper has for C- versions "
        f"alone; three seeds each, the first {SHORT:,} iterations. The controls were not timed.",
        panels=_short_panels([contestants[label] for label in WITH_CONTROLS], ITERATIONS_OR_SECONDS[:1]),
    )


def _short_panels(shown: list[KeptContestant], x: list[Axis]) -> list[Panel]:
    """Returns training loss and test accuracy over the iterations that all have."""
    series = [series for one in shown for series in one.series(("epoch_loss", "test_accuracy"), SHORT)]
    loss = Axis("epoch_loss", "training loss over the epoch", log=True)
    return [Panel("training loss", series, x, [loss]), Panel("test accuracy", series, x, [TEST_ACCURACY])]


def _epoch_figure(contestants: dict[str, KeptContestant]) -> Figure:
    axes = {
        "loss": [
            Axis("epoch_loss", "loss over the epoch", log=True),
            Axis("train_loss", "loss on the training set", log=True),
        ],
        "accuracy": [
            Axis("epoch_accuracy", "accuracy over the epoch"),
            Axis("train_accuracy", "accuracy on the training set"),
            TEST_ACCURACY,
        ],
    }
    caption = (
        "Means over the mini-batches of an epoch, each before the step that learns from it, and evaluations of the "
        "training and the test set at its end. " + seconds_note(contestants.values())
    )
    panels = _panels(contestants, axes)
    return Figure(f"{NAME}-epochs", "Loss and accuracy over whole epochs", caption, panels)


def _batch_figure(contestants: dict[str, KeptContestant]) -> Figure:
    axes = {
        "loss": [Axis("batch_loss", "loss of a mini-batch", log=True)],
        "accuracy": [Axis("batch_accuracy", "accuracy of a mini-batch")],
    }
    caption = "As the paper shows it: one mini-batch, before the step that learns from it. "
    caption += seconds_note(contestants.values())
    panels = _panels(contestants, axes, logged=True)
    return Figure(NAME, "Loss and accuracy of the last mini-batch of every 100 iterations", caption, panels)


def _panels(
    contestants: dict[str, KeptContestant], axes: dict[str, list[Axis]], *, logged: bool = False
) -> list[Panel]:
    columns = [axis.column for offered in axes.values() for axis in offered]
    return [
        Panel(
            f"{title}: {what}",
            [series for label in labels for series in contestants[label].series(columns, until, logged=logged)],
            ITERATIONS_OR_SECONDS,
            offered,
        )
        for what, offered in axes.items()
        for title, (labels, until) in PANELS.items()
    ]


def _norms_figure(contestants: dict[str, KeptContestant]) -> Figure:
    return Figure(
        name=f"{NAME}-gradients",
        title="Norms of the gradients, layer by layer",
        caption="Of what backpropagation left for weights and biases of every convolution and of the last layer, from "
        "first to last, at a few iterations of the first seed.",
        panels=[
            Panel(
                label,
                [series for run in contestants[label].runs[:1] for series in _norm_series(run)],
                [Axis("layer", "layer")],
                [Axis("norm", "norm of the gradient", log=True)],
            )
            for label in HEADLINES
        ],
    )


def _norm_series(run: KeptRun) -> list[Series]:
    norms = layer_norms(run)
    stride = max(1, (len(norms) - 1) // 4)
    return [
        Series(
            f"iteration {iteration:,}",
            {"layer": [float(place + 1) for place in range(len(values))], "norm": values},
            style="line+markers",
        )
        for iteration, values in norms[::stride]
    ]
