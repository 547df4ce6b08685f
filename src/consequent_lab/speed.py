"""Plays the matches of the table of targets and sets them beside it."""

from dataclasses import asdict, dataclass, field
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
        """Returns a line of the table for every comparison."""
        return [self._row(comparison) for comparison in self.match.comparisons]

    def _row(self, comparison: Comparison) -> "Row":
        names = comparison.ours, comparison.baseline
        errors = [f"{name}: {self.timings.errors[name]}" for name in names if name in self.timings.errors]
        if errors:
            return Row(self.match, comparison, error="; ".join(errors))
        if comparison.quantity == "memory":
            missing = [name for name in names if name not in self.memory]
            if missing:
                return Row(self.match, comparison, error=f"no peak memory of {', '.join(missing)}")
            ours, baseline = (self.memory[name].later for name in names)
            return Row(self.match, comparison, ours, baseline, Quartiles.of([ours / baseline]))
        ours, baseline = (Quartiles.of(self.timings.milliseconds[name]).median for name in names)
        return Row(self.match, comparison, ours, baseline, self.timings.ratio(*names))

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
    ours: float | None = None
    baseline: float | None = None
    ratio: Quartiles | None = None
    error: str | None = None

    @property
    def met(self) -> bool | None:
        """Whether the median ratio keeps to the target; None without one, or without a measurement."""
        if self.comparison.target is None or self.ratio is None:
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
            "ours": {"name": self.comparison.ours, "value": self.ours},
            "baseline": {"name": self.comparison.baseline, "value": self.baseline},
            "ratio": None if self.ratio is None else asdict(self.ratio),
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
    played.timings = measure(steps, device, plan)
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
