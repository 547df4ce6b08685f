"""Plays the matches of the table of targets and sets them beside it, as what JSON can hold."""

from dataclasses import asdict, replace
from functools import partial
from typing import Any

from consequent_lab.targets import Comparison, Match
from consequent_lab.timing import (
    PeakMemory,
    Plan,
    Quartiles,
    Timings,
    made,
    measure,
    peak_memory,
    release_memory,
)
from consequent_lab.workloads import TrainingStep

Record = dict[str, Any]


def play(match: Match, device: str, plan: Plan, *, judge: bool) -> tuple[list[Record], Record]:
    """Measures a match; an entrant that fails is left out, with its error. `met` is None where nothing is judged.

    Returns:
        A line for every comparison, and what was measured of every entrant.
    """
    errors: dict[str, str] = {}
    makers = {entrant.name: partial(TrainingStep, match.task, entrant, device) for entrant in match.entrants}
    memory: dict[str, PeakMemory] = {}
    if device == "cuda" and any(comparison.quantity == "memory" for comparison in match.comparisons):
        memory = made({name: partial(peak_memory, make) for name, make in makers.items()}, errors)
    release_memory()
    fit = {name: partial(make, graph=match.graph) for name, make in makers.items() if name not in errors}
    steps = made(fit, errors)
    timings = measure(steps, device, replace(plan, period=match.period))
    for name in list(timings.milliseconds):
        if not steps[name]().isfinite():
            errors[name] = "the loss is not finite: what was timed is no training"
            del timings.milliseconds[name]
    timings.errors |= errors
    failed = {name: step.failed for name, step in steps.items()}
    steps.clear()
    release_memory()
    rows = [compared(match, comparison, timings, memory, judge) for comparison in match.comparisons]
    return rows, {
        "name": match.name,
        "task": match.task.title,
        "device": device,
        "mode": match.mode,
        "rounds": max(map(len, timings.milliseconds.values()), default=0),
        "steps_per_sample": timings.steps_per_sample,
        "entrants": [
            {
                "name": name,
                "milliseconds": asdict(Quartiles.of(times)) if (times := timings.milliseconds.get(name)) else None,
                "memory_mib": asdict(memory[name]) if name in memory else None,
                "failed": failed.get(name),
                "error": timings.errors.get(name),
            }
            for name in (entrant.name for entrant in match.entrants)
        ],
    }


def compared(
    match: Match, comparison: Comparison, timings: Timings, memory: dict[str, PeakMemory], judge: bool
) -> Record:
    """Returns the line of a comparison."""
    found, target = _ratio(comparison, timings, memory), comparison.target
    is_judged = judge and target is not None and found["ratio"] is not None
    return (
        {"name": match.name, "task": match.task.title, "mode": match.mode, "quantity": comparison.quantity}
        | {"unit": "MiB" if comparison.quantity == "memory" else "ms"}
        | {"way": next((entrant.way for entrant in match.entrants if entrant.name == comparison.ours), "")}
        | found
        | {"target": target, "met": found["ratio"]["median"] <= target if is_judged else None}
    )


def _ratio(comparison: Comparison, timings: Timings, memory: dict[str, PeakMemory]) -> Record:
    """Returns the numbers of ours and of the other (milliseconds or mebibytes), or why there are none."""
    sides = {"ours": comparison.ours, "baseline": comparison.baseline}
    samples = timings.milliseconds
    errors = [f"{name}: {timings.errors[name]}" for name in sides.values() if name in timings.errors]
    if comparison.quantity == "memory":
        samples = {name: [peak.later] for name, peak in memory.items()}
        errors = errors or [f"no peak memory of {name}" for name in sides.values() if name not in samples]
    if errors:
        nothing = {side: {"name": name, "value": None} for side, name in sides.items()}
        return nothing | {"ratio": None, "error": "; ".join(errors)}
    found = {side: {"name": name, "value": Quartiles.of(samples[name]).median} for side, name in sides.items()}
    ratio = Timings(samples).ratio(*sides.values())
    return found | {"ratio": asdict(ratio), "error": None}
