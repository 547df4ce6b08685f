"""What becomes of the paper's statements on deep perceptrons (its third experiment)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean

from consequent_lab.paper.archive import Archive
from consequent_lab.paper.findings import Axis, Figure, Finding, Panel, Statement
from consequent_lab.paper.kept_contestants import (
    ITERATIONS_OR_SECONDS,
    NOT_MEASURED,
    NOT_TIMED,
    KeptContestant,
    circumstances,
    kept_contestants,
    lowered,
    mean_of,
    race_kept,
    rates_table,
    runs_table,
    search_figure,
    seconds_note,
    small_note,
)
from consequent_lab.paper.measures import EPOCHS_OF_A_DROP, apart, crossing, roughness, sharp_drop
from consequent_lab.paper.mlp_recipe import NAME, NORMALISATIONS, race, title_of, variant_of
from consequent_lab.paper.recipes import Race

BEGINNING = 5  # epochs
COMPETITIVE = -0.05  # decades of loss at equal seconds: no more than about a tenth above
IDENTICAL = 0.1  # decades of loss at equal seconds, above or below
SUBSTANTIAL = 0.3  # decades of loss at equal seconds: half
HELPS = 0.02  # decades of loss at equal iterations

Cell = tuple[str, str]  # a data set and a normalisation
Cells = dict[Cell, dict[str, KeptContestant]]  # SGD and C-SGD of each


def finding(*runs: Path) -> Finding:
    """Returns the finding from what is kept."""
    archive = Archive(*runs, unfinished=True)
    kept = race_kept(race, archive)
    cells = cells_of(kept, archive)
    contestants = [one for cell in cells.values() for one in cell.values()]
    panels = {title_of(*cell): list(some.values()) for cell, some in cells.items()}
    is_small = kept.name != NAME
    return Finding(
        name=NAME,
        title="Fully connected networks",
        summary=small_note(kept)
        if is_small
        else "Eight hidden layers with ReLU, Kaiming's initialisation, mini-batches of 32; SGD against C-SGD on "
        "three sets, with inputs in [0, 1] (λ = 0.001) and with normalised features (NF, λ = 0.01). The loss is of "
        "the full training set, after every epoch. One seed.",
        commands=[f"consequent reproduce {NAME}{' --quick' if is_small else ''}"],
        figures=[_figure(panels, contestants), search_figure(f"{NAME}-search", kept, panels)],
        statements=[] if is_small else statements(kept, cells),
        tables=[rates_table(contestants), runs_table(contestants)],
        is_small=is_small,
    )


def cells_of(kept: Race, archive: Archive) -> Cells:
    """Returns the contestants by data set and normalisation."""
    contestants = kept_contestants(kept, archive)
    datasets = dict.fromkeys(contestant.config.dataset for contestant in kept.contestants)
    return {
        (dataset, normalisation): {
            label: contestants[variant_of(dataset, normalisation, label)] for label in ("SGD", "C-SGD")
        }
        for dataset, normalisation in product(datasets, NORMALISATIONS)
    }


# ---- measures ----------------------------------------------------------------------------------------------------


def ahead_at_first(one: KeptContestant, other: KeptContestant) -> bool | None:
    """Returns whether all losses of the first epochs are lower, in every pair of runs; None if runs are missing."""
    pairs = list(product(one.curves("train_loss"), other.curves("train_loss")))
    early = slice(1, BEGINNING + 1)  # before the first epoch both have the same weights
    wins = [mine < yours for a, b in pairs for (_, mine), (_, yours) in zip(a[early], b[early], strict=False)]
    return all(wins) if wins else None


def unsteadiness(one: KeptContestant) -> float | None:
    """Returns the mean rise of the loss from one epoch to the next, in decades; falls count as 0."""
    return mean_of(one.curves("train_loss"), lambda curve: roughness([loss for _, loss in curve]))


def drop_of(one: KeptContestant) -> float | None:
    """Returns the iteration of the sharp drop; None if one run has none."""
    return mean_of(one.curves("train_loss"), sharp_drop)


def gain(one: KeptContestant, other: KeptContestant, by: str = "iteration") -> float | None:
    """Returns by how many decades the loss is lower on average, at equal iterations or seconds."""
    gains = lowered(one, other, by, "train_loss")
    return fmean(gains) if gains else None


def loss_dependence(unit: KeptContestant, features: KeptContestant) -> float | None:
    """Returns how far apart the losses are with the two normalisations, in decades, on average over the epochs."""
    gaps = lowered(unit, features, quantity="train_loss", measure=lambda a, b: apart(a[1:], b[1:]))
    return fmean(gaps) if gaps else None


def accuracy_dependence(unit: KeptContestant, features: KeptContestant) -> float | None:
    """Returns by how many points the last test accuracies differ with the two normalisations."""
    means = []
    for one in (unit, features):
        found = [value for run in one.runs if (value := run.last("test_accuracy")) is not None]
        if not found:
            return None
        means.append(fmean(found))
    return 100 * abs(means[0] - means[1])


# ---- statements --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Judge:
    """What is judged."""

    race: Race
    cells: Cells

    def statement(
        self,
        paper: str,
        measure: str,
        measured: str,
        parts: Iterable[bool | None],
        datasets: Sequence[str] = (),
        *,
        remark: str = "",
    ) -> Statement:
        """Returns a statement on some data sets (none given: all), with test accuracies, seeds and search beside it."""
        on = [one for cell in self.only(*datasets) for one in self.cells[cell].values()]
        beside = circumstances(self.race, on)
        return Statement(paper, "empirical", measure, measured, tuple(parts), beside, remark)

    def only(self, *datasets: str) -> list[Cell]:
        """Returns the cells of these data sets; none given: all."""
        return [cell for cell in self.cells if not datasets or cell[0] in datasets]

    def gains(self, by: str = "iteration", *datasets: str) -> dict[Cell, float | None]:
        """Returns by how many decades C-SGD's loss is below SGD's."""
        return {cell: gain(self.cells[cell]["C-SGD"], self.cells[cell]["SGD"], by) for cell in self.only(*datasets)}


def statements(race: Race, cells: Cells) -> list[Statement]:
    """Returns the paper's statements on what is kept."""
    judge = Judge(race, cells)
    return [
        _from_the_beginning(judge),
        _steadier(judge),
        _less_dependent(judge),
        _both_drop(judge),
        _earlier_drop(judge),
        _competitive_in_time(judge),
        _same_in_time(judge),
        _substantial(judge),
        _cifar100_drops_faster(judge),
        _normalising_helps_neither(judge),
    ]


def _from_the_beginning(judge: Judge) -> Statement:
    crossed = {
        cell: _iteration(_mean(lowered(some["SGD"], some["C-SGD"], quantity="train_loss", measure=crossing)))
        for cell, some in judge.cells.items()
        if some["SGD"].runs and some["C-SGD"].runs
    }
    return judge.statement(
        "C-SGD optimizes faster than SGD from the beginning regardless of the distribution of the features.",
        f"A part for each set and normalisation: holds if C-SGD's loss is lower after each of the first {BEGINNING} "
        "epochs.",
        _by_cell(judge.gains(), "{:+.2f}".format, "Decades of loss below SGD's, on average over the run: ")
        + (_by_cell(crossed, str, " In the end SGD's is lower, from iteration: ") if crossed else ""),
        [ahead_at_first(some["C-SGD"], some["SGD"]) for some in judge.cells.values()],
    )


def _steadier(judge: Judge) -> Statement:
    pairs = {cell: (unsteadiness(some["C-SGD"]), unsteadiness(some["SGD"])) for cell, some in judge.cells.items()}
    return judge.statement(
        "the graphs display more overall stability throughout the training for C-SGD.",
        "A part for each: mean rise of log₁₀ of the loss from one epoch to the next, falls counted as 0; holds if "
        "C-SGD's is smaller.",
        _by_cell(pairs, lambda pair: f"{pair[0]:.4f} and {pair[1]:.4f}", "C-SGD and SGD: "),
        [_less(pair) for pair in pairs.values()],
    )


def _less_dependent(judge: Judge) -> Statement:
    parts: list[bool | None] = []
    shown = []
    for measure, unit, digits in ((loss_dependence, "decades", 2), (accuracy_dependence, "points", 1)):
        for dataset in dict.fromkeys(dataset for dataset, _ in judge.cells):
            some, normalised = judge.cells[dataset, "unit"], judge.cells[dataset, "features"]
            mine, yours = (measure(some[label], normalised[label]) for label in ("C-SGD", "SGD"))
            parts.append(_less((mine, yours)))
            if mine is not None and yours is not None:
                shown.append(f"{title_of(dataset, 'unit')} {mine:.{digits}f} and {yours:.{digits}f} {unit}")
    return judge.statement(
        "SGD is more sensitive to the probability distribution of the inputs",
        "What the other normalisation changes, by training loss (decades, on average over the epochs) and by the last "
        "test accuracy (points): two parts for each set; holds where SGD's changes more.",
        f"C-SGD and SGD: {'; '.join(shown)}." if shown else NOT_MEASURED,
        parts,
    )


def _drops(judge: Judge) -> dict[Cell, tuple[float | None, float | None] | None]:
    """Returns the drops of C-SGD and SGD, or None where runs are missing or too short to have one."""
    found: dict[Cell, tuple[float | None, float | None] | None] = {}
    for cell, some in judge.cells.items():
        curves = [curve for one in some.values() for curve in one.curves("train_loss")]
        known = all(one.runs for one in some.values()) and min(map(len, curves)) >= 2 * EPOCHS_OF_A_DROP
        found[cell] = (drop_of(some["C-SGD"]), drop_of(some["SGD"])) if known else None
    return found


DROP = (
    f"A sharp drop: the first epoch after which the loss is a tenth, or less, of that {EPOCHS_OF_A_DROP} epochs before"
)


def _both_drop(judge: Judge) -> Statement:
    drops = _drops(judge)
    counted = [pair for pair in drops.values() if pair is not None]
    return judge.statement(
        "both algorithms reach a point that the loss drops sharply, then the progress becomes slow",
        f"{DROP}. A part for each optimiser, set and normalisation: holds where there is one in 100 epochs.",
        f"C-SGD has one in {sum(pair[0] is not None for pair in counted)}, SGD in "
        f"{sum(pair[1] is not None for pair in counted)} of {len(counted)}."
        if counted
        else NOT_MEASURED,
        [None if pair is None else pair[which] is not None for which in (0, 1) for pair in drops.values()],
    )


def _earlier_drop(judge: Judge) -> Statement:
    drops = _drops(judge)
    shown = {cell: None if pair is None else " and ".join(map(_iteration, pair)) for cell, pair in drops.items()}
    return judge.statement(
        "which usually occurs earlier for C-SGD.",
        f"{DROP}. A part for each: holds where C-SGD's is at an earlier iteration, or SGD has none in 100 epochs.",
        _by_cell(shown, str, "Iterations, C-SGD and SGD: "),
        [
            None if pair is None else pair[0] is not None and (pair[1] is None or pair[0] < pair[1])
            for pair in drops.values()
        ],
    )


def _competitive_in_time(judge: Judge) -> Statement:
    gains = judge.gains("seconds", "cifar10", "cifar100")
    return judge.statement(
        "C-SGD maintains its competitiveness for CIFAR-10 and CIFAR-100 even by taking the time into account.",
        "Decades of loss below SGD's at equal seconds, on average over the time that both have; holds at "
        f"{COMPETITIVE:+.2f} or more.",
        _by_cell(gains, "{:+.2f}".format, missing=NOT_TIMED),
        [None if value is None else value >= COMPETITIVE for value in gains.values()],
        ("cifar10", "cifar100"),
    )


def _same_in_time(judge: Judge) -> Statement:
    gains = judge.gains("seconds", "fashion-mnist")
    return judge.statement(
        "For Fashion-MNIST, their performances are almost identical.",
        f"The same; holds within {IDENTICAL:.1f} decades, either way.",
        _by_cell(gains, "{:+.2f}".format, missing=NOT_TIMED),
        [None if value is None else abs(value) <= IDENTICAL for value in gains.values()],
        ("fashion-mnist",),
    )


def _substantial(judge: Judge) -> Statement:
    gains = judge.gains("seconds", "cifar100")
    return judge.statement(
        "the improvement is substantial for a more complicated and more intact dataset.",
        "The same, on CIFAR-100. Substantial: half the loss or less on average "
        f"({SUBSTANTIAL:g} decades), a part for each normalisation.",
        _by_cell(gains, "{:+.2f}".format, missing=NOT_TIMED),
        [None if value is None else value >= SUBSTANTIAL for value in gains.values()],
        ("cifar100",),
    )


def _cifar100_drops_faster(judge: Judge) -> Statement:
    wanted = judge.only("cifar10", "cifar100")
    drops = {cell: drop_of(judge.cells[cell]["C-SGD"]) for cell in wanted}
    return judge.statement(
        "the loss for CIFAR-100 drops faster than CIFAR-10.",
        f"{DROP}, with C-SGD; holds where it is at an earlier iteration, a part for each normalisation.",
        _by_cell(drops, "{:,.0f}".format, "Iterations: "),
        [
            _less((drops.get(("cifar100", normalisation)), drops.get(("cifar10", normalisation))))
            for normalisation in NORMALISATIONS
        ],
        ("cifar10", "cifar100"),
        remark="The CIFAR-100 network is twice as wide, as in the paper.",
    )


def _normalising_helps_neither(judge: Judge) -> Statement:
    helped: dict[str, float | None] = dict.fromkeys(("C-SGD", "SGD"))
    if ("cifar100", "unit") in judge.cells:
        unit, features = judge.cells["cifar100", "unit"], judge.cells["cifar100", "features"]
        helped = {label: gain(features[label], unit[label]) for label in helped}
    shown = [f"{label} {value:+.2f}" for label, value in helped.items() if value is not None]
    return judge.statement(
        "for more complicated inputs of the CIFAR-100, the feature normalization does help neither.",
        "Decades by which normalising lowers the loss at equal iterations, on average, each at its own learning rate "
        f"and λ; holds up to {HELPS:g}, a part for each optimiser.",
        f"{', '.join(shown)}." if shown else NOT_MEASURED,
        [None if value is None else value <= HELPS for value in helped.values()],
        ("cifar100",),
    )


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _less(pair: tuple[float | None, float | None]) -> bool | None:
    mine, yours = pair
    return None if mine is None or yours is None else mine < yours


def _iteration(iteration: float | None) -> str:
    return "not in 100 epochs" if iteration is None else f"{iteration:,.0f}"


def _by_cell(
    values: Mapping[Cell, object], form: Callable[..., str], opening: str = "", missing: str = NOT_MEASURED
) -> str:
    shown = [
        f"{title_of(*cell)} {form(value)}"
        for cell, value in values.items()
        if value is not None and not (isinstance(value, tuple) and None in value)
    ]
    return f"{opening}{'; '.join(shown)}." if shown else missing


# ---- figures -----------------------------------------------------------------------------------------------------


def _figure(panels: dict[str, list[KeptContestant]], contestants: Iterable[KeptContestant]) -> Figure:
    columns = ("train_loss", "train_accuracy", "test_accuracy")
    return Figure(
        name=NAME,
        title="Loss over the full training set, SGD and C-SGD",
        caption=f"NF: normalised features. After every epoch. {seconds_note(contestants)}",
        panels=[
            Panel(
                title,
                [series for one in some for series in one.series(columns)],
                ITERATIONS_OR_SECONDS,
                [
                    Axis("train_loss", "loss on the training set", log=True),
                    Axis("train_accuracy", "accuracy on the training set"),
                    Axis("test_accuracy", "test accuracy"),
                ],
            )
            for title, some in panels.items()
        ],
    )
