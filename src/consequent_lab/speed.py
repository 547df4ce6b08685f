"""Plays the matches of the table of targets and sets them beside it."""

import math
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from consequent_lab.targets import Comparison, Match
from consequent_lab.timing import (
    PeakMemory,
    Plan,
    Quartiles,
    Timings,
    describe_error,
    measure,
    peak_memory,
    release_memory,
)
from consequent_lab.workloads import TrainingStep


@dataclass
class Played:
    """What a match came to."""

    match: Match
    device: str
    timings: Timings
    memory: dict[str, PeakMemory] = field(default_factory=dict)  # on CUDA devices, where the match compares it
    counters: dict[str, dict[str, int]] = field(default_factory=dict)  # of the corrections: fall-backs, skipped steps

    def rows(self) -> "list[Row]":
        """Returns a line of the table for each of ours in every comparison."""
        return [row for comparison in self.match.comparisons for row in self._rows(comparison)]

    def _rows(self, comparison: Comparison) -> "list[Row]":
        """The best one is held against the target; where none was measured, the first."""
        rows = [self._row(comparison, name) for name in comparison.ours]
        best = min(rows, key=lambda row: math.inf if row.ratio is None else row.ratio.median)
        return [replace(row, is_best=row is best) for row in rows]

    def _row(self, comparison: Comparison, ours: str) -> "Row":
        names = ours, comparison.baseline
        row = Row(self.match, comparison, ours)
        errors = [f"{name}: {self.timings.errors[name]}" for name in names if name in self.timings.errors]
        if errors:
            return replace(row, error="; ".join(errors))
        if comparison.quantity == "memory":
            missing = [name for name in names if name not in self.memory]
            if missing:
                return replace(row, error=f"no peak memory of {', '.join(missing)}")
            value, other = (self.memory[name].later for name in names)
            return replace(row, value=value, baseline=other, ratio=Quartiles.of([value / other]))
        value, other = (Quartiles.of(self.timings.milliseconds[name]).median for name in names)
        return replace(row, value=value, baseline=other, ratio=self.timings.ratio(*names))

    def record(self) -> dict[str, Any]:
        """Returns the measurement for a JSON file."""
        entrants = [
            {
                "name": entrant.name,
                "milliseconds": _summary(self.timings.milliseconds.get(entrant.name)),
                "memory_mib": asdict(self.memory[entrant.name]) if entrant.name in self.memory else None,
                "counters": self.counters.get(entrant.name),
                "error": self.timings.errors.get(entrant.name),
            }
            for entrant in self.match.entrants
        ]
        return {
            "name": self.match.name,
            "task": self.match.task.title,
            "device": self.device,
            "mode": self.match.mode,
            "rounds": max(map(len, self.timings.milliseconds.values()), default=0),
            "steps_per_sample": self.timings.steps_per_sample,
            "entrants": entrants,
        }


@dataclass(frozen=True)
class Row:
    """A comparison with its numbers (milliseconds or mebibytes), or why there are none."""

    match: Match
    comparison: Comparison
    ours: str
    value: float | None = None
    baseline: float | None = None
    ratio: Quartiles | None = None
    error: str | None = None
    is_best: bool = True  # of ours in the comparison

    @property
    def way(self) -> str:
        """In which ours is corrected."""
        return next((entrant.way for entrant in self.match.entrants if entrant.name == self.ours), "")

    @property
    def met(self) -> bool | None:
        """Whether the median ratio keeps to the target; None without one, without a measurement, or beside a better."""
        if self.comparison.target is None or self.ratio is None or not self.is_best:
            return None
        return self.ratio.median <= self.comparison.target

    def record(self, *, judge: bool) -> dict[str, Any]:
        """Returns the line for a JSON file; `met` is null unless it is to be judged."""
        return {
            "name": self.match.name,
            "task": self.match.task.title,
            "mode": self.match.mode,
            "quantity": self.comparison.quantity,
            "unit": "MiB" if self.comparison.quantity == "memory" else "ms",
            "way": self.way,
            "ours": {"name": self.ours, "value": self.value},
            "baseline": {"name": self.comparison.baseline, "value": self.baseline},
            "ratio": None if self.ratio is None else asdict(self.ratio),
            "best": self.is_best,
            "target": self.comparison.target,
            "met": self.met if judge else None,
            "error": self.error,
        }


def play(match: Match, device: str, plan: Plan) -> Played:
    """Measures a match; an entrant that fails is left out, with its error."""
    played = Played(match, device, Timings())
    errors: dict[str, str] = {}
    if device == "cuda" and any(comparison.quantity == "memory" for comparison in match.comparisons):
        for entrant in match.entrants:
            try:
                played.memory[entrant.name] = peak_memory(partial(TrainingStep, match.task, entrant, device))
            except Exception as error:
                errors[entrant.name] = describe_error(error)
    release_memory()
    steps: dict[str, TrainingStep] = {}
    for entrant in match.entrants:
        if entrant.name in errors:
            continue
        try:
            steps[entrant.name] = TrainingStep(match.task, entrant, device, graph=match.graph)
        except Exception as error:
            errors[entrant.name] = describe_error(error)
    played.timings = measure(steps, device, replace(plan, period=match.period))
    for name in list(played.timings.milliseconds):
        if not steps[name]().isfinite():
            errors[name] = "the loss is not finite: what was timed is no training"
            del played.timings.milliseconds[name]
        played.counters[name] = steps[name].counters()
    played.timings.errors |= errors
    steps.clear()
    release_memory()
    return played


def _summary(values: list[float] | None) -> dict[str, float] | None:
    return None if values is None else asdict(Quartiles.of(values))
