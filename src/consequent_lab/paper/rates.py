"""Learning rates: the ladder they are on, the search for the best one, and what becomes of it in full runs.

All contestants of a recipe search the same grid with the same budget, on a seed of their own. The score of a rate is
the mean training loss over the last epoch of its search run; a run that diverged scores infinity. Around the best rate
of the grid the two half-way rates are tried as well. A best rate at the edge of the grid extends it by a step, so often
at most as the search allows. Everything is derived from the runs that are kept: asking again gives the same answer.

A search is shorter than a full run and likes rates that blow up later. When a full run fails, every seed of that
contestant is run again with the next lower rate of its search.
"""

import math
from dataclasses import dataclass, replace

from consequent_lab.datasets import LAYOUTS
from consequent_lab.kept_runs import KeptRun, TrainedRun
from consequent_lab.paper.archive import Archive
from consequent_lab.train_config import TrainConfig

NEVER = 10**9  # iterations
_RUNGS = ("1", "1.7", "3", "5.5")  # of a decade


def rate_at(rung: int) -> float:
    """Returns a learning rate of the ladder, four to a decade; rung 0 is 1, even rungs are the grid.

    >>> [rate_at(rung) for rung in (-8, -7, -6, -5, -4, 0, 2)]
    [0.01, 0.017, 0.03, 0.055, 0.1, 1.0, 3.0]
    """
    decade, place = divmod(rung, len(_RUNGS))
    return float(f"{_RUNGS[place]}e{decade}")


def hardly_measured(config: TrainConfig) -> TrainConfig:
    """Returns the config of a run of which its mini-batches' loss and its time are all that counts."""
    return replace(config, gradient_norms="none", evaluate_training=False, evaluate_every=NEVER, checkpoint_every=NEVER)


@dataclass(frozen=True)
class Search:
    """How a recipe searches."""

    epochs: int
    lowest: int = -16  # rungs: 1e-4
    highest: int = 0  # 1
    extensions: int = 2
    half_ways: bool = True
    seed: int = 100  # none of those that are reported

    def config(self, config: TrainConfig, rung: int) -> TrainConfig:
        """Returns a search run's config; what the search does not need is not measured."""
        config = replace(config, lr=rate_at(rung), seed=self.seed, iterations=None, epochs=self.epochs)
        return hardly_measured(config)

    def describe(self) -> str:
        """Returns the rules in a sentence."""
        more = ", then the two half-way rates around the best" if self.half_ways else ""
        return (
            f"Learning rates {rate_at(self.lowest):g} to {rate_at(self.highest):g}, two to a decade{more}; "
            f"{self.epochs} epochs each on seed {self.seed}; the lowest mean training loss over the last of them wins."
        )


@dataclass(frozen=True)
class Searched:
    """How far a search is."""

    losses: dict[int, float]  # by rung
    missing: tuple[int, ...]  # rungs that are to be tried next; none if the search is complete
    extended: bool = False

    @property
    def best(self) -> int | None:
        """The best rung, or None if every one diverged."""
        finite = {rung: loss for rung, loss in self.losses.items() if math.isfinite(loss)}
        return min(finite, key=lambda rung: (finite[rung], rung)) if finite else None


def variant_at(variant: str, rung: int) -> str:
    """Returns the name of a contestant's runs at a rate."""
    return f"{variant}-lr{rate_at(rung):g}"


def searched(search: Search, recipe: str, variant: str, archive: Archive) -> Searched:
    """Returns how far the search of a contestant is."""
    losses: dict[int, float] = {}
    lowest, highest = search.lowest, search.highest
    rungs = list(range(lowest, highest + 1, 2))
    while True:
        missing = []
        for rung in rungs:
            run = archive.run(f"{recipe}-search", variant_at(variant, rung), search.seed)
            if run is None or not run.is_finished:
                missing.append(rung)
            else:
                losses[rung] = score(run)
        extended = (lowest, highest) != (search.lowest, search.highest)
        found = Searched(losses, tuple(missing), extended)
        if missing:
            return found
        best = found.best
        if (best is None or best == lowest) and lowest > search.lowest - 2 * search.extensions:
            lowest -= 2
            rungs = [lowest]
        elif best is not None and best == highest and highest < search.highest + 2 * search.extensions:
            highest += 2
            rungs = [highest]
        elif best is not None and best % 2 == 0 and search.half_ways and not {best - 1, best + 1} <= losses.keys():
            rungs = [best - 1, best + 1]
        else:
            return found


def score(run: KeptRun) -> float:
    """Returns the mean training loss over the last epoch; infinity for a run that diverged."""
    loss = run.last("epoch_loss")
    return math.inf if run.diverged or loss is None else loss


def failed(run: TrainedRun) -> bool:
    """Returns whether a run diverged or ended no better than by guessing: at 99 % of ln(classes) or above."""
    classes = LAYOUTS[run.config.dataset].classes if run.config.dataset in LAYOUTS else 10
    loss = run.last("epoch_loss")
    return run.diverged or (run.is_finished and (loss is None or loss >= 0.99 * math.log(classes)))


@dataclass(frozen=True)
class Chosen:
    """The rate that a contestant is reported with."""

    rung: int
    abandoned: tuple[int, ...]  # better ones in the search, with which a full run failed
    all_failed: bool = False  # then the rate is the one that the search liked best

    @property
    def rate(self) -> float:
        """The learning rate."""
        return rate_at(self.rung)

    @property
    def abandoned_rates(self) -> str:
        """The abandoned ones, as in a sentence."""
        return ", ".join(f"{rate_at(rung):g}" for rung in self.abandoned)


def chosen(search: Searched, recipe: str, variant: str, archive: Archive) -> Chosen | None:
    """Returns the rate for the full runs; None before the search is complete, or if every rate in it diverged."""
    if search.missing or search.best is None:
        return None
    candidates = [rung for rung, loss in search.losses.items() if rung <= search.best and math.isfinite(loss)]
    abandoned: list[int] = []
    for rung in sorted(candidates, reverse=True):
        if not any(failed(run) for run in archive.runs(recipe, variant_at(variant, rung))):
            return Chosen(rung, tuple(abandoned))
        abandoned.append(rung)
    return Chosen(search.best, tuple(abandoned), all_failed=True)
