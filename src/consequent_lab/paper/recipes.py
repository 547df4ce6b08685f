"""What a recipe runs: contestants, each searched, trained and timed; and which of these runs can start now."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal

from typing_extensions import Self

from consequent_lab.paper.archive import Archive
from consequent_lab.paper.rates import Chosen, Search, Searched, chosen, hardly_measured, rate_at, searched, variant_at
from consequent_lab.runs import RunFolder
from consequent_lab.train_config import TrainConfig

Step = Literal["search", "train", "timing"]
STEPS: tuple[Step, ...] = ("search", "train", "timing")


@dataclass(frozen=True)
class Job:
    """A run to be trained."""

    recipe: str
    variant: str
    config: TrainConfig
    urgency: tuple[int, ...] = ()  # the lowest starts first
    alone: bool = False  # nothing else may run beside it

    @property
    def name(self) -> str:
        """As in messages; tells it from any other."""
        return f"{self.recipe}/{self.variant}/seed{self.config.seed}"

    def folder(self, runs: Path) -> RunFolder:
        """Returns where it lives."""
        return RunFolder.of(runs, self.recipe, self.variant, self.config.seed)


@dataclass(frozen=True)
class Contestant:
    """One model with one optimiser; the learning rate is searched."""

    variant: str
    label: str
    config: TrainConfig  # up to learning rate and seed
    seeds: tuple[int, ...] = (0,)
    setting: str = ""  # what the label leaves out: the data set, say
    headline: bool = False
    timed_with: str = ""  # another one's variant, if that one's iterations do the same work

    @property
    def timing_variant(self) -> str:
        """Under which name its seconds per iteration are kept."""
        return self.timed_with or self.variant


@dataclass(frozen=True)
class Recipe(ABC):
    """Runs of contestants that belong together, under one name."""

    name: str
    contestants: tuple[Contestant, ...]

    def select(self, patterns: tuple[str, ...], seeds: tuple[int, ...]) -> Self:
        """Returns the recipe with fewer contestants (none given: with all) or other seeds (none given: with theirs)."""
        kept = (one for one in self.contestants if not patterns or matches(one.variant, patterns))
        return replace(self, contestants=tuple(replace(one, seeds=seeds or one.seeds) for one in kept))

    @abstractmethod
    def jobs(self, archive: Archive, steps: tuple[Step, ...]) -> list[Job]:
        """Returns the runs that are not finished and need no other run first."""


@dataclass(frozen=True)
class Race(Recipe):
    """Contestants that are searched by the same rules, then trained, then timed one by one."""

    search: Search
    timed_iterations: int
    steps: tuple[Step, ...] = STEPS  # that are run of it at all

    def searched(self, contestant: Contestant, archive: Archive) -> Searched:
        """Returns how far a contestant's search is."""
        return searched(self.search, self.name, contestant.variant, archive)

    def chosen(self, contestant: Contestant, archive: Archive) -> Chosen | None:
        """Returns the rate that a contestant is trained with, once it is known."""
        return chosen(self.searched(contestant, archive), self.name, contestant.variant, archive)

    def jobs(self, archive: Archive, steps: tuple[Step, ...]) -> list[Job]:
        """Returns the runs that can start now; headlines first, then by seeds, so that little is missing early."""
        found = []
        steps = tuple(step for step in steps if step in self.steps)
        for place, contestant in enumerate(self.contestants):
            rank = 0 if contestant.headline else 1
            search = self.searched(contestant, archive)
            if "search" in steps:
                for rung in search.missing:
                    variant, config = variant_at(contestant.variant, rung), self.search.config(contestant.config, rung)
                    found.append(Job(f"{self.name}-search", variant, config, (rank, 0, 0, place)))
            rate = chosen(search, self.name, contestant.variant, archive)
            if "train" in steps and rate is not None and not rate.all_failed:
                variant = variant_at(contestant.variant, rate.rung)
                for number, seed in enumerate(contestant.seeds):
                    config = replace(contestant.config, lr=rate.rate, seed=seed)
                    found.append(Job(self.name, variant, config, (rank, 1, number, place)))
            if "timing" in steps and contestant.timing_variant == contestant.variant:
                found.append(self._timing_job(contestant, place))
        return [job for job in found if archive.run(job.recipe, job.variant, job.config.seed) is None]

    def _timing_job(self, contestant: Contestant, place: int) -> Job:
        """A short run with nothing beside it. Its rate is so low that it cannot diverge; that costs the same."""
        config = replace(
            contestant.config,
            lr=rate_at(self.search.lowest),
            seed=self.search.seed,
            epochs=None,
            iterations=self.timed_iterations,
            log_every=max(1, self.timed_iterations // 20),
        )
        timed = hardly_measured(config)
        return Job(f"{self.name}-timing", contestant.variant, timed, (9, 0, 0, place), alone=True)


@dataclass(frozen=True)
class Sweep(Recipe):
    """Contestants at every one of some learning rates."""

    rungs: tuple[int, ...]

    def jobs(self, archive: Archive, steps: tuple[Step, ...]) -> list[Job]:
        """Returns the runs that are not finished."""
        if "train" not in steps:
            return []
        return [
            Job(self.name, variant_at(one.variant, rung), replace(one.config, lr=rate_at(rung), seed=seed), (2, number))
            for one in self.contestants
            for rung in self.rungs
            for number, seed in enumerate(one.seeds)
            if archive.run(self.name, variant_at(one.variant, rung), seed) is None
        ]


def matches(variant: str, patterns: Iterable[str]) -> bool:
    """Returns whether a variant is one of those that are named, with * and ? as in file names."""
    return any(fnmatch(variant, pattern) for pattern in patterns)
