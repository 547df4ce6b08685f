"""A contestant with all that is kept of it: its search, its runs at the chosen rate, its seconds per iteration."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import TypeVar

import numpy as np

from consequent_lab.kept_runs import KeptRun, TrainedRun
from consequent_lab.paper.archive import Archive
from consequent_lab.paper.findings import Number, Series
from consequent_lab.paper.measures import Curve, advantage, first_above, roughness
from consequent_lab.paper.rates import Chosen, Searched, variant_at
from consequent_lab.paper.recipes import Contestant, Race, Recipe

Kept = TypeVar("Kept", bound=Recipe)

WARM_UP = 0.25  # of the timed iterations

Places = Sequence[float | None]  # iterations, or seconds, at which something happens, of every run; None: it does not


@dataclass(frozen=True, kw_only=True)
class KeptContestant(Contestant):
    """A contestant and what is kept of it."""

    search: Searched
    choice: Chosen | None
    runs: list[TrainedRun]  # at the chosen rate, by seed
    seconds_per_iteration: float | None = None  # timed alone
    timed_as: str = ""  # CUDA graph or eager, and the device

    @property
    def full_label(self) -> str:
        """Its name where panels do not say the rest."""
        return f"{self.setting} {self.label}".strip()

    def curves(self, quantity: str, by: str = "iteration") -> list[Curve]:
        """Returns a quantity of every run, by iterations or by seconds; runs without it are left out.

        By seconds there are none unless the contestant was timed: the runs' own depend on what ran beside them, which
        is good enough for a figure that says so, and not for a verdict.
        """
        if by == "seconds" and self.seconds_per_iteration is None:
            return []
        unit = 1 if by == "iteration" else self.seconds_per_iteration or 0
        curves = [[(unit * iteration, value) for iteration, value in run.curve(quantity)] for run in self.runs]
        return [curve for curve in curves if len(curve) > 1]

    def unsteadiness(self, quantity: str) -> list[float]:
        """Returns the mean rise of a loss from one epoch to the next, in decades, for every run; falls count as 0."""
        return [roughness([loss for _, loss in curve]) for curve in self.curves(quantity)]

    def first_at(self, accuracy: float, by: str = "iteration") -> list[float | None]:
        """Returns where the accuracy over an epoch is first at a level, for every run; None: it never is."""
        return [first_above(curve, accuracy) for curve in self.curves("epoch_accuracy", by)]

    def seconds(self, line: dict[str, float]) -> float:
        """Returns the seconds of training up to a line of metrics."""
        if self.seconds_per_iteration is None:
            return line["seconds"]
        return line["iteration"] * self.seconds_per_iteration

    def series(self, columns: Sequence[str], until: float = math.inf, *, logged: bool = False) -> list[Series]:
        """Returns a curve for every run, of the lines that have all of these metrics, by iterations and by seconds.

        Up to an iteration and, if `logged`, without lines that are there for the end of an epoch alone.
        """
        found = []
        for run in self.runs:
            lines = [
                line
                for line in run.lines
                if all(line.get(name) is not None for name in columns)
                and line["iteration"] <= until
                and not (logged and line["iteration"] % run.config.log_every)
            ]
            values: dict[str, list[Number]] = {name: [float(line[name]) for line in lines] for name in columns}
            values["iteration"] = [float(line["iteration"]) for line in lines]
            values["seconds"] = [float(f"{self.seconds(line):.5g}") for line in lines]
            found.append(Series(f"{self.label}, seed {run.seed}", values, group=self.label))
        return found


def recipe_kept(make: Callable[[bool], Kept], archive: Archive) -> Kept:
    """Returns the recipe of which something is kept: the full one, else the small one, else the full one, empty."""
    for recipe in (make(False), make(True)):
        if archive.variants(recipe.name) or archive.variants(f"{recipe.name}-search"):
            return recipe
    return make(False)


def kept_race(make: Callable[[bool], Race], runs: Sequence[Path]) -> tuple[Race, list[KeptContestant]]:
    """Returns a race and its contestants, from folders of runs; the small one if nothing is kept of the full one."""
    archive = Archive(*runs, unfinished=True)
    race = recipe_kept(make, archive)
    return race, [_kept(race, contestant, archive) for contestant in race.contestants]


def _kept(race: Race, contestant: Contestant, archive: Archive) -> KeptContestant:
    search, choice = race.searched(contestant, archive), race.chosen(contestant, archive)
    runs = [] if choice is None else archive.runs(race.name, variant_at(contestant.variant, choice.rung))
    timed = [run for run in archive.runs(f"{race.name}-timing", contestant.timing_variant) if run.is_finished]
    kept = KeptContestant(**vars(contestant), search=search, choice=choice, runs=runs)
    if not timed:
        return kept
    start = timed[0].starts[-1]
    timed_as = f"{'CUDA graph' if start.get('graph') else 'eager'}, {start['device']['name']}"
    return replace(kept, seconds_per_iteration=seconds_of(timed[0]), timed_as=timed_as)


def seconds_of(run: KeptRun) -> float:
    """Returns the median seconds per iteration of a run, its first quarter left out."""
    lines = [line for line in run.lines if line["iteration"] >= WARM_UP * run.outcome["iteration"]]
    seconds, iterations = (np.diff([line[name] for line in lines]) for name in ("seconds", "iteration"))
    return float(np.median(seconds / iterations))


# ---- over seeds --------------------------------------------------------------------------------------------------


def lowered(
    one: KeptContestant,
    other: KeptContestant,
    by: str = "iteration",
    quantity: str = "epoch_loss",
    measure: Callable[[Curve, Curve], float | None] = advantage,
) -> list[float]:
    """Returns by how many decades one's loss is lower than the other's, on average, for every pair of runs.

    Compared at equal iterations, or seconds; or another measure of two curves.
    """
    pairs = product(one.curves(quantity, by), other.curves(quantity, by))
    return [value for mine, yours in pairs if (value := measure(mine, yours)) is not None]


def all_above(values: Sequence[float], limit: float = 0.0) -> bool | None:
    """Returns whether every pair of runs says so; None if there is none."""
    return all(value > limit for value in values) if values else None


def all_below(values: Sequence[float], others: Sequence[float]) -> bool | None:
    """Returns whether every value is below every other one; None if there are none."""
    return max(values) < min(others) if values and others else None


def all_earlier(places: Places, others: Places) -> bool | None:
    """Returns whether every run is there before every other one; None if there are none."""
    return all_below(late_if_never(places), late_if_never(others))


def late_if_never(places: Places) -> list[float]:
    """Returns the places, infinity for those of runs that do not get there."""
    return [math.inf if place is None else place for place in places]


def decades(values: Sequence[float]) -> str:
    """Returns mean and range of decades, of pairs of runs.

    >>> decades([0.5, 0.7]), decades([0.5]), decades([])
    ('+0.60 (+0.50 to +0.70 over 2 pairs of seeds)', '+0.50', 'not measured')
    """
    if len(values) < 2:
        return f"{values[0]:+.2f}" if values else "not measured"
    return f"{fmean(values):+.2f} ({min(values):+.2f} to {max(values):+.2f} over {len(values)} pairs of seeds)"


def spread(
    values: Sequence[float | None],
    form: str = ",.0f",
    of: str = "seeds",
    within: float | None = None,
    *,
    counted: bool = True,
) -> str:
    """Returns mean and range of what seeds, or pairs of them, have, as in a sentence; None is one that has none.

    `within` is how far was looked for one; if `counted`, it says how many there are.

    >>> spread([1000, 3000]), spread([1000, 3000], counted=False), spread([5.0]), spread([])
    ('2,000 (1,000–3,000; 2 seeds)', '2,000 (1,000–3,000)', '5', 'not measured')
    >>> spread([1000, 3000, None]), spread([5.0, None]), spread([None, None], within=10_000)
    ('in 2 of 3 seeds (1,000–3,000)', 'in 1 of 2 seeds (5)', 'not within 10,000')
    """
    known = [value for value in values if value is not None]
    if not values:
        return "not measured"
    if not known:
        return "none" if within is None else f"not within {within:,.0f}"
    ends = "–".join(format(value, form) for value in (min(known), max(known))[: len(known)])
    if len(known) < len(values):  # a mean of those alone would look better than the runs were
        return f"in {len(known)} of {len(values)} {of} ({ends})"
    if len(known) == 1:
        return ends
    count = f"; {len(known)} {of}" if counted else ""
    return f"{fmean(known):{form}} ({ends}{count})"
