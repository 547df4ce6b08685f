"""What becomes of the paper's statements on deep perceptrons (its third experiment)."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from consequent_lab.paper.archive import Archive
from consequent_lab.paper.entries import (
    ITERATIONS_OR_SECONDS,
    NOT_MEASURED,
    NOT_TIMED,
    Entry,
    entries_of,
    mean_of,
    mean_over_pairs,
    race_kept,
    rates_table,
    runs_table,
    search_figure,
    seconds_note,
    small_note,
)
from consequent_lab.paper.findings import Axis, Figure, Finding, Panel, Statement
from consequent_lab.paper.measures import READINGS_OF_A_DROP, Curve, advantage, crossing, roughness, sharp_drop
from consequent_lab.paper.mlp_recipe import NAME, NORMALISATIONS, TITLES, race, variant_of
from consequent_lab.paper.recipes import Race
from consequent_lab.paper.verdicts import all_of

BEGINNING = 5  # epochs
COMPETITIVE = -0.05  # decades of loss at equal seconds: no more than about a tenth above
IDENTICAL = 0.1  # decades of loss at equal seconds, above or below
HELPS = 0.02  # decades of loss at equal iterations

Cell = tuple[str, str]  # a data set and a normalisation
Cells = dict[Cell, dict[str, Entry]]  # SGD and C-SGD of each


def finding(*runs: Path) -> Finding:
    """Returns the finding from what is kept."""
    archive = Archive(*runs, unfinished=True)
    kept = race_kept(race, archive)
    cells = cells_of(kept, archive)
    entries = [entry for cell in cells.values() for entry in cell.values()]
    panels = {title_of(cell): list(some.values()) for cell, some in cells.items()}
    return Finding(
        name=NAME,
        title="Fully connected networks",
        summary=small_note(kept, NAME)
        + "Eight hidden layers with ReLU, Kaiming's initialisation, mini-batches of 32; SGD against C-SGD on "
        "three sets, with inputs in [0, 1] (λ = 0.001) and with normalised features (NF, λ = 0.01). The loss is of "
        "the full training set, after every epoch.",
        commands=[f"consequent reproduce {NAME}{' --quick' if kept.name != NAME else ''}"],
        figures=[_figure(panels, entries), search_figure(f"{NAME}-search", kept, panels)],
        statements=statements(cells),
        tables=[rates_table(entries), runs_table("Every run", entries)],
    )


def cells_of(kept: Race, archive: Archive) -> Cells:
    """Returns the contestants by data set and normalisation."""
    entries = entries_of(kept, archive)
    datasets = dict.fromkeys(contestant.config.dataset for contestant in kept.contestants)
    return {
        (dataset, normalisation): {
            label: entries[variant_of(dataset, normalisation, label)] for label in ("SGD", "C-SGD")
        }
        for dataset in datasets
        for normalisation in NORMALISATIONS
    }


def title_of(cell: Cell) -> str:
    """Returns a cell's name as in the paper.

    >>> title_of(("cifar10", "features")), title_of(("cifar100", "unit"))
    ('CIFAR-10 NF', 'CIFAR-100')
    """
    dataset, normalisation = cell
    return TITLES[dataset] + (" NF" if normalisation == "features" else "")


# ---- measures ----------------------------------------------------------------------------------------------------


def ahead_at_first(entry: Entry, other: Entry) -> bool | None:
    """Returns whether all losses of the first epochs are lower, in every pair of runs; None if runs are missing."""
    pairs = [(one, two) for one in entry.curves("train_loss") for two in other.curves("train_loss")]
    if not pairs:
        return None
    return all(
        mine[1] < yours[1]
        for one, two in pairs
        for mine, yours in list(zip(one, two, strict=False))[
            1 : BEGINNING + 1
        ]  # the first reading is of the same weights
    )


def unsteadiness(entry: Entry) -> float | None:
    """Returns the mean rise of the loss from one epoch to the next, in decades; falls count as 0."""
    return mean_of(entry.curves("train_loss"), lambda curve: roughness([loss for _, loss in curve]))


def drop_of(entry: Entry) -> float | None:
    """Returns the iteration of the sharp drop; None if one run has none."""
    return mean_of(entry.curves("train_loss"), sharp_drop)


def gain(entry: Entry, other: Entry, by: str = "iteration") -> float | None:
    """Returns by how many decades the loss is lower on average, at equal iterations or seconds."""
    return mean_over_pairs(entry.curves("train_loss", by), other.curves("train_loss", by), advantage)


def dependence(plain: Entry, normalised: Entry) -> float | None:
    """Returns how far apart the losses are with the two normalisations, in decades, on average over the epochs."""

    def apart(curve: Curve, other: Curve) -> float | None:
        gaps = [
            abs(advantage([(0.0, mine)], [(0.0, yours)]) or 0.0)
            for (_, mine), (_, yours) in list(zip(curve, other, strict=False))[1:]
        ]
        return sum(gaps) / len(gaps) if gaps else None

    return mean_over_pairs(plain.curves("train_loss"), normalised.curves("train_loss"), apart)


# ---- statements --------------------------------------------------------------------------------------------------


def statements(cells: Cells) -> list[Statement]:
    """Returns the paper's statements on what is kept."""
    return [
        _from_the_beginning(cells),
        _steadier(cells),
        _earlier_drop(cells),
        _less_dependent(cells),
        _competitive_in_time(cells),
        _same_in_time(cells),
        _cifar100_gains_most(cells),
        _cifar100_drops_faster(cells),
        _normalising_helps_neither(cells),
    ]


def _from_the_beginning(cells: Cells) -> Statement:
    checks = {cell: ahead_at_first(some["C-SGD"], some["SGD"]) for cell, some in cells.items()}
    gains = {cell: gain(some["C-SGD"], some["SGD"]) for cell, some in cells.items()}
    return Statement(
        "C-SGD optimises faster than SGD from the beginning, regardless of the distribution of the features.",
        _by_cell(gains, lambda value: f"{value:+.2f}", "Decades of loss below SGD's, on average over the run: "),
        all_of(checks.values()),
        remark=f"Holds where C-SGD's loss is the lower one after each of the first {BEGINNING} epochs.",
    )


def _steadier(cells: Cells) -> Statement:
    pairs = {cell: (unsteadiness(some["C-SGD"]), unsteadiness(some["SGD"])) for cell, some in cells.items()}
    return Statement(
        "C-SGD shows more overall stability throughout the training.",
        _by_cell(pairs, lambda pair: f"{pair[0]:.4f} and {pair[1]:.4f}", "Mean rise of the loss, C-SGD and SGD: "),
        all_of(_less(pair) for pair in pairs.values()),
        remark="Measured as the mean rise of log₁₀ of the loss from one epoch to the next; falls count as 0.",
    )


def _earlier_drop(cells: Cells) -> Statement:
    pairs = {cell: (drop_of(some["C-SGD"]), drop_of(some["SGD"])) for cell, some in cells.items()}

    def earlier(cell: Cell) -> bool | None:
        curves = [curve for entry in cells[cell].values() for curve in entry.curves("train_loss")]
        if not all(entry.runs for entry in cells[cell].values()) or min(map(len, curves)) < 2 * READINGS_OF_A_DROP:
            return None
        mine, yours = pairs[cell]
        return mine is not None and (yours is None or mine < yours)

    shown = {
        cell: f"{_shown(mine)} and {_shown(yours)}" if earlier(cell) is not None else None
        for cell, (mine, yours) in pairs.items()
    }
    return Statement(
        "Both reach a point where the loss drops sharply, usually earlier for C-SGD.",
        _by_cell(shown, lambda text: text, "Iterations, C-SGD and SGD: "),
        all_of(earlier(cell) for cell in cells),
        remark="The drop: the first epoch after which the loss is a tenth, or less, of that "
        f"{READINGS_OF_A_DROP} epochs before. Never, in a hundred epochs, is later.",
    )


def _less_dependent(cells: Cells) -> Statement:
    pairs: dict[Cell, tuple[float | None, float | None]] = {}
    for dataset in dict.fromkeys(dataset for dataset, _ in cells):
        unit, features = cells[dataset, "unit"], cells[dataset, "features"]
        pairs[dataset, "unit"] = (
            dependence(unit["C-SGD"], features["C-SGD"]),
            dependence(unit["SGD"], features["SGD"]),
        )
    return Statement(
        "SGD is more sensitive to the probability distribution of the inputs.",
        _by_cell(pairs, lambda pair: f"{pair[0]:.2f} and {pair[1]:.2f}", "Decades between both, C-SGD and SGD: "),
        all_of(_less(pair) for pair in pairs.values()),
        remark="The mean distance of log₁₀ of the losses with inputs in [0, 1] and with normalised features.",
    )


def _competitive_in_time(cells: Cells) -> Statement:
    wanted = _cells_with(cells, "cifar10", "cifar100")
    gains = {cell: gain(cells[cell]["C-SGD"], cells[cell]["SGD"], "seconds") for cell in wanted}
    return Statement(
        "C-SGD maintains its competitiveness on CIFAR-10 and CIFAR-100 even by taking the time into account.",
        _by_cell(gains, lambda value: f"{value:+.2f}", "Decades of loss below SGD's at equal seconds: ", NOT_TIMED),
        all_of(None if value is None else value >= COMPETITIVE for value in gains.values()),
        remark=f"Holds at {COMPETITIVE:+.2f} decades or more, on average over the time that both have.",
    )


def _same_in_time(cells: Cells) -> Statement:
    wanted = _cells_with(cells, "fashion-mnist")
    gains = {cell: gain(cells[cell]["C-SGD"], cells[cell]["SGD"], "seconds") for cell in wanted}
    return Statement(
        "On Fashion-MNIST their performances in time are almost identical.",
        _by_cell(gains, lambda value: f"{value:+.2f}", "Decades of loss below SGD's at equal seconds: ", NOT_TIMED),
        all_of(None if value is None else abs(value) <= IDENTICAL for value in gains.values()),
        remark=f"Holds within {IDENTICAL:.1f} decades, on average over the time that both have.",
    )


def _cifar100_gains_most(cells: Cells) -> Statement:
    gains = {cell: gain(some["C-SGD"], some["SGD"]) for cell, some in cells.items()}
    checks: list[bool | None] = []
    for normalisation in NORMALISATIONS:
        mine = gains.get(("cifar100", normalisation))
        others = [value for cell, value in gains.items() if cell[1] == normalisation and cell[0] != "cifar100"]
        known = [value for value in others if value is not None]
        checks.append(mine > max(known) if mine is not None and known and len(known) == len(others) else None)
    crossed = {
        cell: _shown(mean_over_pairs(some["SGD"].curves("train_loss"), some["C-SGD"].curves("train_loss"), crossing))
        for cell, some in cells.items()
        if gains[cell] is not None
    }
    return Statement(
        "The improvement is substantial for a more complicated dataset: CIFAR-100 gains most.",
        _by_cell(gains, lambda value: f"{value:+.2f}", "Decades of loss below SGD's at equal iterations: ")
        + (_by_cell(crossed, str, " Iteration from which SGD's loss is the lower one: ") if crossed else ""),
        all_of(checks),
        remark="On average over the run. The more of it comes after SGD's own drop, at a constant learning rate, the "
        "less is gained.",
    )


def _cifar100_drops_faster(cells: Cells) -> Statement:
    drops = {cell: drop_of(cells[cell]["C-SGD"]) for cell in _cells_with(cells, "cifar10", "cifar100")}
    checks: list[bool | None] = []
    for normalisation in NORMALISATIONS:
        pair = [drops.get((dataset, normalisation)) for dataset in ("cifar100", "cifar10")]
        checks.append(_less((pair[0], pair[1])))
    return Statement(
        "The loss for CIFAR-100 drops faster than for CIFAR-10 with C-SGD.",
        _by_cell(drops, lambda value: f"{value:,.0f}", "Iterations until the sharp drop: "),
        all_of(checks),
        remark="The CIFAR-100 network is twice as wide, as in the paper.",
    )


def _normalising_helps_neither(cells: Cells) -> Statement:
    helped: dict[str, float | None] = dict.fromkeys(("C-SGD", "SGD"))
    if ("cifar100", "unit") in cells:
        unit, features = cells["cifar100", "unit"], cells["cifar100", "features"]
        helped = {label: gain(features[label], unit[label]) for label in helped}
    shown = [f"{label} {value:+.2f}" for label, value in helped.items() if value is not None]
    return Statement(
        "For the more complicated inputs of CIFAR-100, feature normalisation does help neither.",
        f"Decades by which normalising lowers the loss: {', '.join(shown)}." if shown else NOT_MEASURED,
        all_of(None if value is None else value <= HELPS for value in helped.values()),
        remark="At equal iterations, on average over the run, each at its own learning rate and λ.",
    )


def _cells_with(cells: Cells, *datasets: str) -> list[Cell]:
    return [cell for cell in cells if cell[0] in datasets]


def _less(pair: tuple[float | None, float | None]) -> bool | None:
    mine, yours = pair
    return None if mine is None or yours is None else mine < yours


def _shown(iteration: float | None) -> str:
    return "never" if iteration is None else f"{iteration:,.0f}"


def _by_cell(values: Mapping[Cell, object], form: Callable[..., str], opening: str, missing: str = NOT_MEASURED) -> str:
    shown = [f"{title_of(cell)} {form(value)}" for cell, value in values.items() if _is_known(value)]
    return f"{opening}{'; '.join(shown)}." if shown else missing


def _is_known(value: object) -> bool:
    return value is not None and not (isinstance(value, tuple) and None in value)


# ---- figures -----------------------------------------------------------------------------------------------------


def _figure(panels: dict[str, list[Entry]], entries: Iterable[Entry]) -> Figure:
    columns = ("train_loss", "train_accuracy", "test_accuracy")
    return Figure(
        name=NAME,
        title="Loss over the full training set, SGD and C-SGD",
        caption=f"NF: normalised features. After every epoch. {seconds_note(entries)}",
        panels=[
            Panel(
                title,
                [series for entry in some for series in entry.series(columns)],
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
