"""A run as it is read, wherever it is kept: how it ended, its lines of metrics, and curves of these."""

from dataclasses import dataclass
from typing import Any

from consequent_lab.runs import RunFolder
from consequent_lab.train_config import TrainConfig

UNFINISHED = "unfinished"

Line = dict[str, Any]  # of metrics, with an iteration


@dataclass(frozen=True)
class KeptRun:
    """A run: a finished one, or as far as it got."""

    recipe: str  # what it belongs to: an experiment, or a task of a race
    variant: str
    seed: int
    outcome: dict[str, Any]  # in a word, after how many iterations, and after how many seconds of training
    lines: list[Line]

    @property
    def name(self) -> str:
        """As in messages."""
        return f"{self.recipe}/{self.variant}/seed{self.seed}"

    @property
    def label(self) -> str:
        """Its name up to the seed, where runs are compared."""
        return self.variant if self.recipe in ("", "train") else f"{self.recipe}/{self.variant}"

    @property
    def is_finished(self) -> bool:
        """Whether it came to an end, good or bad."""
        return bool(self.outcome["outcome"] != UNFINISHED)

    @property
    def diverged(self) -> bool:
        """Whether its loss stopped being finite."""
        return bool(self.outcome["outcome"] == "diverged")

    @property
    def iterations(self) -> int:
        """Iterations so far."""
        return int(self.lines[-1]["iteration"]) if self.lines else 0

    def curve(self, *metrics: str, by: str = "iteration") -> list[tuple[float, float]]:
        """Returns the first of these metrics that the run has, against iterations or seconds."""
        for metric in metrics:
            found = [(line[by], line[metric]) for line in self.lines if _has(line, by) and _has(line, metric)]
            if found:
                return found
        return []

    def last(self, *metrics: str) -> float | None:
        """Returns the last value of the first of these metrics that the run has, or None."""
        curve = self.curve(*metrics)
        return curve[-1][1] if curve else None

    def at(self, metric: str, iteration: float) -> float | None:
        """Returns the value of a metric at an iteration, or None if there is none."""
        return dict(self.curve(metric)).get(iteration)


@dataclass(frozen=True)
class TrainedRun(KeptRun):
    """A run that a config stands for, as `consequent train` and the paper's experiments have them."""

    config: TrainConfig
    starts: list[dict[str, Any]]  # what it ran on, every time it was started


def run_in(folder: RunFolder) -> TrainedRun:
    """Returns the run of a folder, as far as it got."""
    outcome, lines = folder.outcome(), folder.metrics()
    if outcome is None:
        last = lines[-1] if lines else {"iteration": 0, "seconds": 0.0}
        outcome = {"outcome": UNFINISHED, "iteration": last["iteration"], "seconds": last["seconds"]}
    outcome = {key: value for key, value in outcome.items() if key != "metrics"}
    config = folder.config(TrainConfig)
    recipe, variant = folder.path.parent.parent.name, folder.path.parent.name
    return TrainedRun(recipe, variant, config.seed, outcome, lines, config, folder.environment())


def _has(line: Line, name: str) -> bool:
    value = line.get(name)
    return value is not None and value == value
