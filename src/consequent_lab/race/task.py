"""What a task of the race is: data on a device, a model with its first weights, a loss, and a measure."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from torch import nn

from consequent_lab.learner import Augmentation
from consequent_lab.race.measures import Measure
from consequent_lab.samples import Data, Loss

SEARCH_SEED = 1000  # the first one of the search; the finals have seeds from 0 on


@dataclass(frozen=True)
class Task:
    """All that is the same for every contestant."""

    name: str  # on the command line, and of the file of results
    title: str  # in a sentence
    load: Callable[[Path | None, int], Data]  # from a folder or file, on the CPU; a seed, where it splits at random
    model: Callable[[str], nn.Module]  # of a variant, "" or "BN"; called under the run's seed
    loss: Loss
    measure: Measure  # what the search goes by
    contestants: tuple[str, ...]
    batch_size: int
    epochs: int  # the last batch of each is dropped if it is not full
    evaluations: int  # in a run, evenly spread; the learning rate stays the same from one to the next
    reported: tuple[Measure, ...] = ()  # what else the table has
    metric: Literal["accuracy", "psnr", ""] = ""  # beside the loss
    evaluated: int | None = None  # training samples, the first ones; None is all
    search_epochs: int | None = None  # of a trial in the search, if fewer
    search_seeds: int = 1  # runs of a trial, which is judged by their mean
    loss_reduction: str | Callable[[float], float] = "mean"  # of a loss, as `consequent.attach` wants it
    splits: bool = False  # every seed has its own training and test samples
    augment: Augmentation | None = None
    searches_decay: bool = False  # weight decay is a knob of every contestant
    settings_from: str | None = None  # the task whose search is taken over, so that this one has finals alone
    choices: dict[str, tuple[dict[str, float], ...]] = field(default_factory=dict)  # to try first, the rest taken over
    starts: dict[str, dict[str, float]] = field(default_factory=dict)  # of searches that begin elsewhere than usual

    def steps(self, samples: int, *, search: bool = False) -> int:
        """Returns how many a run has."""
        epochs = self.search_epochs if search and self.search_epochs else self.epochs
        return epochs * self.steps_per_epoch(samples)

    def steps_per_epoch(self, samples: int) -> int:
        """Returns how many full batches the samples make."""
        if samples < self.batch_size:
            raise ValueError(f"{self.name}: {samples} samples make no batch of {self.batch_size}")
        return samples // self.batch_size

    @property
    def holds_out(self) -> bool:
        """Whether the search is judged by data that it is not trained on."""
        return self.measure.metric.startswith("test")

    @property
    def seeds_of_search(self) -> range:
        """The seeds of a trial."""
        return range(SEARCH_SEED, SEARCH_SEED + self.search_seeds)

    def data_seed(self, seed: int) -> int:
        """Returns the seed that the data of a run are loaded with: always the same, unless every seed has its own."""
        return seed if self.splits else 0

    def recipe(self) -> dict[str, Any]:
        """Returns what results must have in common to be in one file."""
        return {
            "task": self.name,
            "measure": str(self.measure),
            "batch_size": self.batch_size,
            "epochs": self.epochs,
            "evaluations": self.evaluations,
            "search_epochs": self.search_epochs,
            "settings_from": self.settings_from,
            **({} if self.search_seeds == 1 else {"search_seeds": self.search_seeds}),
        }

    def with_epochs(self, epochs: int) -> "Task":
        """Returns a shorter or longer form, with a name of its own."""
        per_epoch = self.evaluations / self.epochs
        return replace(
            self,
            name=f"{self.name}-{epochs}ep",
            epochs=epochs,
            evaluations=max(1, round(per_epoch * epochs)),
            search_epochs=None if self.search_epochs is None else min(self.search_epochs, epochs),
        )
