"""How the statements on ResNet-20 are measured on one run or on pairs of runs."""

import math
from collections.abc import Sequence
from itertools import product
from statistics import median

from consequent_lab.paper.archive import KeptRun
from consequent_lab.paper.entries import Entry
from consequent_lab.paper.measures import advantage, crossing, first_above, smoothed, stays_above

ALL_CORRECT = 0.9999  # over an epoch: 5 of 50,000 samples may be wrong, each was seen before its step
SMOOTHED = 5  # epochs, before it is looked where losses cross


def reaches(run: KeptRun, level: float = ALL_CORRECT) -> float | None:
    """Returns the iteration at which the accuracy over an epoch is first at the level."""
    return first_above(run.curve("epoch_accuracy"), level)


def stays_at_all(run: KeptRun) -> float | None:
    """Returns the iteration from which the paper's reading, one mini-batch every 100 iterations, stays at 100 %."""
    readings = [(place, value) for place, value in run.curve("batch_accuracy") if place % run.config.log_every == 0]
    return stays_above(readings, 1.0)


def forgotten_after(run: KeptRun, iteration: float) -> int:
    """Returns how many samples of the training set were correct at one evaluation after this and wrong at the next."""
    return int(sum(value for place, value in run.curve("forgotten") if place > iteration))


def lowered(entry: Entry, other: Entry, by: str = "iteration", until: float = math.inf) -> list[float]:
    """Returns by how many decades the loss over the epochs is lower on average, for every pair of runs.

    Args:
        entry: whose loss should be lower.
        other: than whose.
        by: compares at equal iterations, or seconds.
        until: leaves out what comes later.
    """
    cut = [
        [[point for point in curve if point[0] <= until] for curve in one.curves("epoch_loss", by)]
        for one in (entry, other)
    ]
    return [gain for one, two in product(*cut) if one and two and (gain := advantage(one, two)) is not None]


def lowered_at_the_end(entry: Entry, other: Entry) -> list[float]:
    """Returns by how many decades the loss is lower over the last epoch that both runs have, for every pair of runs."""
    pairs = product(*([dict(curve) for curve in one.curves("epoch_loss")] for one in (entry, other)))
    found = [(one[last], two[last]) for one, two in pairs if (last := max(one.keys() & two.keys(), default=None))]
    return [math.log10(theirs / mine) for mine, theirs in found if mine > 0 and theirs > 0]


def crossings(entry: Entry, other: Entry, beyond: int) -> list[float | None]:
    """Returns where the first one's loss gets below the other's for good, for every pair of runs; None: it does not.

    Args:
        entry: whose loss gets below.
        other: whose it crosses.
        beyond: leaves out pairs of which one is not longer than this.
    """
    longer = [
        [smoothed(run.curve("epoch_loss"), SMOOTHED) for run in one.runs if run.outcome["iteration"] > beyond]
        for one in (entry, other)
    ]
    return [crossing(one, two) for one, two in product(*longer)]


def seconds_to(entry: Entry, level: float) -> list[float | None]:
    """Returns the seconds at which the accuracy over an epoch is first at the level, for every run."""
    return [first_above(curve, level) for curve in entry.curves("epoch_accuracy", "seconds")]


def layer_norms(run: KeptRun) -> list[tuple[int, list[float]]]:
    """Returns the norms of the plain gradient, layer by layer from the first to the last, at a few iterations.

    Layers are convolutions and the last one; a BatchNorm, kept as the second of a pair, is none.
    """
    found = []
    for line in run.lines:
        norms = line.get("gradient_norms", {}).get("plain", {})
        layers = [name for name in norms if not (name.endswith(".1") and f"{name.removesuffix('.1')}.0" in norms)]
        if layers:
            found.append((line["iteration"], [norms[name] for name in layers]))
    return found


def span_of_norms(runs: Sequence[KeptRun]) -> float | None:
    """Returns the largest norm of a layer's gradient ÷ the smallest at the same time, median over readings."""
    ratios = [
        max(norms) / min(norms) if min(norms) > 0 else float("inf") for run in runs for _, norms in layer_norms(run)
    ]
    return median(ratios) if ratios else None
