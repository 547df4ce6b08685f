"""How much tuning a learning rate needs: loss against the rate over four decades, plain and C-."""

import math
from pathlib import Path
from statistics import fmean

from consequent_lab.paper.archive import Archive
from consequent_lab.paper.entries import NOT_MEASURED
from consequent_lab.paper.findings import Axis, Figure, Finding, Number, Panel, Series, Statement, Table
from consequent_lab.paper.learning_rates_recipe import NAME, resnet20_race, sweep
from consequent_lab.paper.rates import rate_at, score, variant_at
from consequent_lab.paper.recipes import Sweep
from consequent_lab.paper.verdicts import all_of

GOOD = 1.25  # times the best loss of the same contestant
Losses = dict[str, dict[int, list[float]]]  # by label and rung: of every seed; infinity if it diverged


def finding(*runs: Path) -> Finding:
    """Returns the finding from what is kept."""
    archive = Archive(*runs)
    quick = sweep(True).name in archive.recipes() and sweep(False).name not in archive.recipes()
    perceptron = sweep_losses(sweep(quick), archive)
    resnet = search_losses(quick, archive)
    parts = {"a small perceptron": perceptron, "ResNet-20": resnet}
    return Finding(
        name=NAME,
        title="Learning rates",
        summary="Short runs at learning rates over four decades: a perceptron with four hidden layers of 128 on "
        "Fashion-MNIST (one epoch, three seeds), and ResNet-20 on CIFAR-10 without BatchNorm (three epochs, one seed: "
        "the runs of its search). The loss is the mean over the last epoch's mini-batches.",
        commands=[f"consequent reproduce {NAME}{' --quick' if quick else ''}"],
        figures=[_figure(parts)],
        statements=[statement(parts)],
        tables=[_table(parts)],
    )


def sweep_losses(recipe: Sweep, archive: Archive) -> Losses:
    """Returns what a sweep found."""
    return {
        contestant.label: {
            rung: [score(run) for run in runs]
            for rung in recipe.rungs
            if (runs := archive.runs(recipe.name, variant_at(contestant.variant, rung)))
        }
        for contestant in recipe.contestants
    }


def search_losses(quick: bool, archive: Archive) -> Losses:
    """Returns what the search of ResNet-20 found, on its grid."""
    race = resnet20_race(quick)
    return {
        contestant.label: {
            rung: [loss] for rung, loss in sorted(race.searched(contestant, archive).losses.items()) if rung % 2 == 0
        }
        for contestant in race.contestants
    }


def good_decades(losses: dict[int, list[float]]) -> float | None:
    """Returns over how many decades of learning rates the mean loss is within a quarter above the best one.

    A grid of two rates to a decade: every good rate stands for half a decade.
    """
    means = [fmean(values) for values in losses.values()]
    finite = [mean for mean in means if math.isfinite(mean)]
    if not finite:
        return None
    return 0.5 * sum(1 for mean in finite if mean <= GOOD * min(finite))


def statement(parts: dict[str, Losses]) -> Statement:
    """Returns the paper's statement on tuning."""
    checks: list[bool | None] = []
    shown = []
    for title, losses in parts.items():
        for label in [name for name in losses if not name.startswith("C-")]:
            mine, yours = good_decades(losses[f"C-{label}"]), good_decades(losses[label])
            checks.append(None if mine is None or yours is None else mine > yours)
            if mine is not None and yours is not None:
                shown.append(f"{title}, C-{label} {mine:g} and {label} {yours:g}")
    return Statement(
        "Consequentialism makes the outputs of each layer more predictable: hyper-parameters should be easy to select.",
        f"Decades of learning rates with a loss within a quarter above the best: {'; '.join(shown)}."
        if shown
        else NOT_MEASURED,
        all_of(checks),
        remark="Holds where more rates are good for the C- version than for the plain one.",
    )


def _figure(parts: dict[str, Losses]) -> Figure:
    return Figure(
        NAME,
        "Loss against the learning rate",
        "Means over seeds. A rate without a point diverged with at least one seed.",
        [
            Panel(
                title,
                [_series(label, by_rung) for label, by_rung in losses.items() if by_rung],
                [Axis("rate", "learning rate", log=True)],
                [Axis("loss", "mean training loss over the last epoch", log=True)],
            )
            for title, losses in parts.items()
        ],
    )


def _series(label: str, losses: dict[int, list[float]]) -> Series:
    columns: dict[str, list[Number]] = {
        "rate": [rate_at(rung) for rung in losses],
        "loss": [mean if math.isfinite(mean := fmean(values)) else None for values in losses.values()],
    }
    return Series(label, columns, style="line+markers")


def _table(parts: dict[str, Losses]) -> Table:
    rows: list[list[str | Number]] = []
    for title, losses in parts.items():
        for label, by_rung in losses.items():
            finite = {rung: mean for rung, values in by_rung.items() if math.isfinite(mean := fmean(values))}
            if finite:
                best = min(finite, key=lambda rung: finite[rung])
                rows.append([title, label, rate_at(best), finite[best], good_decades(by_rung)])
    return Table("The best rate of each", ["network", "optimiser", "best rate", "its loss", "good decades"], rows)
