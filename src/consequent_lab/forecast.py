"""How long runs will take on this machine, from a few steps and a part of an evaluation of every kind of run.

A forecast is as good as that: a machine that does other things as well takes longer, and a search that finds its best
rate at the end of its grid goes on with more runs.
"""

import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import torch

from consequent_lab.configured import ConfiguredLearner
from consequent_lab.datasets import load
from consequent_lab.paper.archive import Archive
from consequent_lab.paper.recipes import Job, Race, Recipe, Step
from consequent_lab.pool import one_thread
from consequent_lab.samples import evaluate, usual_loss
from consequent_lab.timing import synchronize
from consequent_lab.train_config import TrainConfig

TIMED_SECONDS = 0.3  # of training, for every kind of run
TIMED_STEPS = 20  # at most
TIMED_SAMPLES = 500  # that are evaluated
AROUND_A_RUN = 0.4  # seconds for its files, as found in small runs on a CPU; next to nothing in long ones


@dataclass(frozen=True)
class Cost:
    """What the parts of a run take, in seconds."""

    start: float
    step: float
    evaluated_sample: float
    samples: int  # of the training set
    test_samples: int

    def run(self, config: TrainConfig) -> float:
        """Returns what a whole run takes.

        >>> config = TrainConfig(iterations=100, evaluate_every=50, batch_size=10, evaluate_training=False)
        >>> Cost(start=2.0, step=0.5, evaluated_sample=0.25, samples=1000, test_samples=4).run(config)
        55.4
        """
        per_epoch = self.samples // config.batch_size
        iterations = config.total_iterations(per_epoch)
        evaluations = 1 + -(-iterations // (config.evaluate_every or per_epoch))
        evaluated = self.test_samples + (self.samples if config.evaluate_training else 0)
        return AROUND_A_RUN + self.start + iterations * self.step + evaluations * evaluated * self.evaluated_sample


def expected_jobs(recipes: Iterable[Recipe], archive: Archive, steps: tuple[Step, ...]) -> list[Job]:
    """Returns the runs that can start now, and those that a search will open."""
    found: list[Job] = []
    for recipe in recipes:
        found += recipe.jobs(archive, steps)
        if isinstance(recipe, Race) and {"search", "train"} <= {*steps} & {*recipe.steps}:
            found += [
                Job(recipe.name, one.variant, replace(one.config, seed=seed))
                for one in recipe.contestants
                if recipe.chosen(one, archive) is None
                for seed in one.seeds
            ]
    return found


def forecast(jobs: Iterable[Job], workers: int, cost: Callable[[TrainConfig], Cost]) -> float:
    """Returns the seconds that all runs take side by side, but for those that need the machine for themselves."""
    every = list(jobs)
    first = {kind_of(job.config): job.config for job in reversed(every)}
    costs = {kind: cost(config) for kind, config in first.items()}
    return sum(costs[kind_of(job.config)].run(job.config) / (1 if job.alone else workers) for job in every)


def kind_of(config: TrainConfig) -> Hashable:
    """Returns what the time of a step depends on most: not the rate, nor the optimiser that is corrected."""
    return (
        config.dataset, config.model, config.hidden, config.widths, config.blocks, config.batch_size,
        config.consequentialist, config.normalisation == "features",
    )  # fmt: skip


def measured_cost(device: str, data: Path | None) -> Callable[[TrainConfig], Cost]:
    """Returns a function that times a few steps and a part of an evaluation, with one thread, as runs have."""
    loaded = cache(partial(load, folder=data))
    place = torch.device(device)

    @one_thread()
    def cost(config: TrainConfig) -> Cost:
        dataset = loaded(config.dataset)
        test = slice(TIMED_SAMPLES)
        few = replace(dataset, test_images=dataset.test_images[test], test_labels=dataset.test_labels[test])
        ConfiguredLearner(config, few, place).settle()  # the first one pays for what is only done once
        begun = time.perf_counter()
        learner = ConfiguredLearner(config, few, place)
        learner.settle()
        synchronize(device)
        ready, steps = time.perf_counter(), 0
        while steps < TIMED_STEPS and time.perf_counter() - ready < TIMED_SECONDS:
            learner.step(steps, TIMED_STEPS)
            steps += 1
        synchronize(device)
        trained = time.perf_counter()
        evaluate(learner.model, learner.test_samples, usual_loss)
        synchronize(device)
        sample = (time.perf_counter() - trained) / len(learner.test_samples)
        samples, test_samples = len(learner.samples), len(dataset.test_labels)
        return Cost(ready - begun, (trained - ready) / steps, sample, samples, test_samples)

    return cost
