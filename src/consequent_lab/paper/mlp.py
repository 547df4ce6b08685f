"""The paper's third experiment: a deep perceptron on three data sets, SGD against C-SGD."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from consequent_lab.paper.findings import Axis, Figure, Finding, Statement
from consequent_lab.paper.kept_contestants import (
    KeptContestant,
    Places,
    all_below,
    all_earlier,
    decades,
    kept_race,
    lowered,
    spread,
)
from consequent_lab.paper.measures import EPOCHS_OF_A_DROP, crossing, distance, sharp_drop
from consequent_lab.paper.race_finding import circumstances, curve_panels, race_finding, search_figure, seconds_note
from consequent_lab.paper.rates import Search
from consequent_lab.paper.recipes import Contestant, Race
from consequent_lab.paper.statements import Found, Outcome, judged, statement_rows
from consequent_lab.train_config import Normalisation, TrainConfig

T = TypeVar("T")

NAME = "mlp"
TITLES = {"digits": "Digits", "cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "fashion-mnist": "Fashion-MNIST"}
DATASETS = ("cifar10", "cifar100", "fashion-mnist")
NORMALISATIONS: tuple[Normalisation, ...] = ("unit", "features")
SEEDS = {"cifar10": (0, 1, 2), "cifar100": (0, 1), "fashion-mnist": (0, 1, 2)}
DAMPING = {"unit": 1e-3, "features": 1e-2}
BEGINNING = 5  # epochs
COMPETITIVE = -0.05  # decades of loss at equal seconds: no more than about a tenth above
IDENTICAL = 0.1  # decades of loss at equal seconds, above or below
SUBSTANTIAL = 0.3  # decades of loss at equal seconds: half
HELPS = 0.02  # decades of loss at equal iterations

Cell = tuple[str, str]  # a data set and a normalisation
Cells = dict[Cell, dict[str, KeptContestant]]  # SGD and C-SGD of each
DROP = (
    f"A sharp drop: the first epoch after which the loss is a tenth, or less, of that {EPOCHS_OF_A_DROP} epochs before"
)


# ---- what is run -------------------------------------------------------------------------------------------------


def race(quick: bool = False) -> Race:
    """Returns the experiment, or a small one on the digits."""
    contestants = tuple(
        Contestant(
            variant_of(dataset, normalisation, label),
            label,
            _config(dataset, normalisation, label, quick),
            SEEDS.get(dataset, (0,)),
            setting=title_of(dataset, normalisation),
            timed_with=variant_of(dataset, NORMALISATIONS[0], label),
        )
        for dataset in (("digits",) if quick else DATASETS)
        for normalisation in NORMALISATIONS
        for label in ("C-SGD", "SGD")
    )
    if quick:
        search = Search(epochs=2, lowest=-8, highest=-4, extensions=0, half_ways=False)
        return Race(f"{NAME}-quick", contestants, search, timed_iterations=40)
    return Race(NAME, contestants, Search(epochs=2), timed_iterations=1000)


def title_of(dataset: str, normalisation: str) -> str:
    """Returns a data set's name as in the paper.

    >>> title_of("cifar10", "features"), title_of("cifar100", "unit")
    ('CIFAR-10 NF', 'CIFAR-100')
    """
    return TITLES[dataset] + (" NF" if normalisation == "features" else "")


def variant_of(dataset: str, normalisation: str, label: str) -> str:
    """Returns a contestant's name.

    >>> variant_of("cifar10", "unit", "C-SGD")
    'cifar10-unit-c-sgd'
    """
    return f"{dataset}-{normalisation}-{label.lower()}"


def _config(dataset: str, normalisation: Normalisation, label: str, quick: bool) -> TrainConfig:
    width, layers = (1600 if dataset == "cifar100" else 800), 8
    if quick:
        width, layers = 32, 3
    return TrainConfig(
        dataset=dataset,
        model="mlp",
        hidden=(width,) * layers,
        optimiser="sgd",
        consequentialist=label == "C-SGD",
        damping=DAMPING[normalisation],
        normalisation=normalisation,
        batch_size=32,
        epochs=6 if quick else 100,
        log_every=15 if quick else 500,
        checkpoint_every=90 if quick else 10_000,
    )


# ---- what comes out ----------------------------------------------------------------------------------------------


def finding(*runs: Path) -> Finding:
    """Returns the finding from what is kept."""
    kept, contestants = kept_race(race, runs)
    cells = cells_of(contestants)
    panels = {title_of(*cell): list(some.values()) for cell, some in cells.items()}
    in_order = [one for some in panels.values() for one in some]
    return race_finding(
        NAME,
        "Fully connected networks",
        "Eight hidden layers with ReLU, Kaiming's initialisation, mini-batches of 32; SGD against C-SGD on three sets, "
        "with inputs in [0, 1] (λ = 0.001) and with normalised features (NF, λ = 0.01). The loss is of the full "
        f"training set, after every epoch. {_seeds_note(in_order)}",
        (kept, in_order),
        [_figure(panels, in_order), search_figure(f"{NAME}-search", kept, panels)],
        lambda: statements(kept, cells),
    )


def cells_of(contestants: Iterable[KeptContestant]) -> Cells:
    """Returns the contestants by data set and normalisation, SGD before C-SGD."""
    cells: Cells = {}
    for one in sorted(contestants, key=lambda one: one.label, reverse=True):
        config = one.config
        cells.setdefault((config.dataset, config.normalisation), {})[one.label] = one
    return cells


# ---- measures ----------------------------------------------------------------------------------------------------


def ahead_at_first(one: KeptContestant, other: KeptContestant) -> bool | None:
    """Returns whether all losses of the first epochs are lower, in every pair of runs; None if runs are missing."""
    pairs = list(product(one.curves("train_loss"), other.curves("train_loss")))
    early = slice(1, BEGINNING + 1)  # before the first epoch both have the same weights
    wins = [mine < yours for a, b in pairs for (_, mine), (_, yours) in zip(a[early], b[early], strict=False)]
    return all(wins) if wins else None


def drops(one: KeptContestant) -> Places:
    """Returns the iteration of the sharp drop of every run; nothing if one is too short to have one."""
    curves = one.curves("train_loss")
    return [sharp_drop(curve) for curve in curves] if min(map(len, curves), default=0) >= 2 * EPOCHS_OF_A_DROP else []


def gains(one: KeptContestant, other: KeptContestant, by: str = "iteration") -> list[float]:
    """Returns by how many decades the loss is lower on average, at equal iterations or seconds, for every pair."""
    return lowered(one, other, by, "train_loss")


def loss_dependence(unit: KeptContestant, features: KeptContestant) -> float | None:
    """Returns how far apart the losses are with the two normalisations, in decades, over epochs and pairs of runs."""
    return _mean(
        lowered(unit, features, quantity="train_loss", measure=lambda a, b: distance(a[1:], b[1:], in_decades=True))
    )


def accuracy_dependence(unit: KeptContestant, features: KeptContestant) -> float | None:
    """Returns by how many points the means of the last test accuracies differ with the two normalisations."""
    first, second = (
        _mean([value for run in one.runs if (value := run.last("test_accuracy")) is not None])
        for one in (unit, features)
    )
    return None if first is None or second is None else 100 * abs(first - second)


# ---- statements --------------------------------------------------------------------------------------------------


def statements(race: Race, cells: Cells) -> list[Statement]:
    """Returns the paper's statements on what is kept."""
    outcomes = {}
    for name, row in statement_rows(NAME).items():
        some = {cell: pair for cell, pair in cells.items() if cell[0] in row.get("datasets", (cell[0],))}
        contestants = [one for pair in some.values() for one in pair.values()]
        outcomes[name] = Outcome(*MEASURED[name](some), circumstances(race, contestants))
    return judged(NAME, "empirical", outcomes, globals())


def _from_the_beginning(cells: Cells) -> Found:
    curves = {cell: [some[label].curves("train_loss") for label in ("SGD", "C-SGD")] for cell, some in cells.items()}
    crossed = {cell: [crossing(*pair) for pair in product(*both)] for cell, both in curves.items()}
    text = _by_cell(_gains(cells), decades, "Decades of loss below SGD's, on average over the run: ")
    text += _by_cell(crossed, partial(_places, of="pairs of seeds"), " In the end SGD's is lower, from iteration: ")
    return text, [ahead_at_first(some["C-SGD"], some["SGD"]) for some in cells.values()]


def _steadier(cells: Cells) -> Found:
    pairs = _pairs(cells, lambda one: one.unsteadiness("train_loss"))
    return _by_cell(pairs, _both(partial(spread, form=".4f")), "C-SGD and SGD: "), [
        all_below(*pair) if pair else None for pair in pairs.values()
    ]


def _less_dependent(cells: Cells) -> Found:
    parts: list[bool | None] = []
    shown = []
    for measure, unit, digits in ((loss_dependence, "decades", 2), (accuracy_dependence, "points", 1)):
        for dataset in dict.fromkeys(dataset for dataset, _ in cells):
            some, normalised = cells[dataset, "unit"], cells[dataset, "features"]
            mine, yours = (measure(some[label], normalised[label]) for label in ("C-SGD", "SGD"))
            if mine is None or yours is None:
                parts.append(None)
                continue
            parts.append(mine < yours)
            shown.append(f"{title_of(dataset, 'unit')} {mine:.{digits}f} and {yours:.{digits}f} {unit}")
    return f"C-SGD and SGD: {'; '.join(shown)}.", parts


def _both_drop(cells: Cells) -> Found:
    pairs = _pairs(cells, drops)
    ours, plain = ([None if not pair else None not in pair[which] for pair in pairs.values()] for which in (0, 1))
    counted = sum(map(bool, pairs.values()))
    return f"C-SGD has one in {ours.count(True)}, SGD in {plain.count(True)} of {counted}.", [*ours, *plain]


def _earlier_drop(cells: Cells) -> Found:
    pairs = _pairs(cells, drops)
    return _by_cell(pairs, _both(_places), "Iterations, C-SGD and SGD: "), [
        all_earlier(*pair) if pair else None for pair in pairs.values()
    ]


def _in_time(is_good: Callable[[float], bool]) -> Callable[[Cells], Found]:
    """Returns what judges the decades of loss below SGD's at equal seconds, of every pair of runs."""

    def measured(cells: Cells) -> Found:
        found = _gains(cells, "seconds")
        return _by_cell(found, decades), [all(map(is_good, values)) if values else None for values in found.values()]

    return measured


def _cifar100_drops_faster(cells: Cells) -> Found:
    found = {cell: drops(some["C-SGD"]) for cell, some in cells.items()}
    return _by_cell(found, _places, "Iterations: "), [
        all_earlier(found.get(("cifar100", normalisation), []), found.get(("cifar10", normalisation), []))
        for normalisation in NORMALISATIONS
    ]


def _normalising_helps_neither(cells: Cells) -> Found:
    if not cells:
        return "", [None]
    unit, features = cells["cifar100", "unit"], cells["cifar100", "features"]
    helped = {label: gains(features[label], unit[label]) for label in ("C-SGD", "SGD")}
    shown = [f"{label} {decades(values)}" for label, values in helped.items() if values]
    return f"{', '.join(shown)}.", [max(values) <= HELPS if values else None for values in helped.values()]


MEASURED: dict[str, Callable[[Cells], Found]] = {
    "from_the_beginning": _from_the_beginning,
    "steadier": _steadier,
    "less_dependent": _less_dependent,
    "both_drop": _both_drop,
    "earlier_drop": _earlier_drop,
    "competitive_in_time": _in_time(lambda value: value >= COMPETITIVE),
    "same_in_time": _in_time(lambda value: abs(value) <= IDENTICAL),
    "substantial": _in_time(lambda value: value >= SUBSTANTIAL),
    "cifar100_drops_faster": _cifar100_drops_faster,
    "normalising_helps_neither": _normalising_helps_neither,
}


def _gains(cells: Cells, by: str = "iteration") -> dict[Cell, list[float]]:
    """Returns by how many decades C-SGD's loss is below SGD's."""
    return {cell: gains(some["C-SGD"], some["SGD"], by) for cell, some in cells.items()}


def _pairs(cells: Cells, measure: Callable[[KeptContestant], Sequence[T]]) -> dict[Cell, list[Sequence[T]]]:
    """Returns what is measured of C-SGD and SGD, or nothing where one of them has nothing."""
    found = {cell: [measure(some[label]) for label in ("C-SGD", "SGD")] for cell, some in cells.items()}
    return {cell: pair if all(pair) else [] for cell, pair in found.items()}


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _places(places: Places, of: str = "seeds") -> str:
    return spread(places, of=of) if any(places) else "not in 100 epochs"


def _both(form: Callable[[Any], str]) -> Callable[[Sequence[Any]], str]:
    """Returns how two are written."""
    return lambda pair: " and ".join(map(form, pair))


def _by_cell(values: Mapping[Cell, Sequence[Any]], form: Callable[[Any], str], opening: str = "") -> str:
    shown = [f"{title_of(*cell)} {form(value)}" for cell, value in values.items() if value]
    return f"{opening}{'; '.join(shown)}."


def _seeds_note(contestants: Iterable[KeptContestant]) -> str:
    counts: dict[str, set[int]] = {}
    for one in contestants:
        counts.setdefault(TITLES[one.config.dataset], set()).add(len(one.runs))
    shown = [f"{title} {' or '.join(map(str, sorted(some)))}" for title, some in counts.items()]
    return f"Seeds: {', '.join(shown)}."


# ---- figures -----------------------------------------------------------------------------------------------------


def _figure(panels: dict[str, list[KeptContestant]], contestants: Iterable[KeptContestant]) -> Figure:
    axes = [
        Axis("train_loss", "loss on the training set", log=True),
        Axis("train_accuracy", "accuracy on the training set"),
        Axis("test_accuracy", "test accuracy"),
    ]
    return Figure(
        name=NAME,
        title="Loss over the full training set, SGD and C-SGD",
        caption=f"NF: normalised features. After every epoch. {seconds_note(contestants)}",
        panels=curve_panels(panels, axes),
    )
