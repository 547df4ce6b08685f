"""How the statements on ResNet-20 are measured on runs."""

import math
from collections.abc import Sequence
from statistics import median

from consequent_lab.kept_runs import KeptRun, TrainedRun
from consequent_lab.paper.kept_contestants import KeptContestant
from consequent_lab.paper.measures import first_above, stays_above

ALL_CORRECT = 0.9999  # over an epoch: 5 of 50,000 samples may be wrong, each was seen before its step


def reaches(run: KeptRun, level: float = ALL_CORRECT) -> float | None:
    """Returns the iteration at which the accuracy over an epoch is first at the level."""
    return first_above(run.curve("epoch_accuracy"), level)


def stays_at_all(run: TrainedRun) -> float | None:
    """Returns the iteration from which the paper's curve, one mini-batch every 100 iterations, stays at 100 %."""
    shown = [(place, value) for place, value in run.curve("batch_accuracy") if place % run.config.log_every == 0]
    return stays_above(shown, 1.0)


def forgotten(run: KeptRun, after: float = 0, until: float = math.inf) -> float:
    """Returns how many samples of the training set were correct at one evaluation and wrong at the next, in all."""
    return float(sum(value for place, value in run.curve("forgotten") if after < place <= until))


def last_common_epoch(contestants: Sequence[KeptContestant]) -> float:
    """Returns the iteration of the last epoch that all runs of the headlines have; 0 if there is none."""
    headlines = [run for one in contestants if one.contestant.headline for run in one.runs]
    epochs = [dict(run.curve("epoch_loss")).keys() & dict(run.curve("test_accuracy")).keys() for run in headlines]
    return max(set.intersection(*map(set, epochs)), default=0) if epochs else 0


def seconds_to(one: KeptContestant, level: float) -> list[float | None]:
    """Returns the seconds at which the accuracy over an epoch is first at the level, for every run."""
    return [first_above(curve, level) for curve in one.curves("epoch_accuracy", "seconds")]


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
    """Returns the largest norm of a layer's gradient ÷ the smallest at the same time, median over iterations."""
    ratios = [
        max(norms) / min(norms) if min(norms) > 0 else float("inf") for run in runs for _, norms in layer_norms(run)
    ]
    return median(ratios) if ratios else None
