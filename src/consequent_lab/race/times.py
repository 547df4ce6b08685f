"""How long a step of each contestant takes, alone on the machine, and how much memory it needs.

K-FAC and FOOF renew their factors at every one of their first steps, and then now and then. So eager steps are timed
twice: the first ones of a run, and later ones.
"""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import datetime, timezone
from functools import partial

import torch

from consequent_lab.graphs import WARM_UP_STEPS
from consequent_lab.race.contestants import Contestant, Settings, contestant_named
from consequent_lab.race.kronecker import FRESH
from consequent_lab.race.results import Line, Results, line_of
from consequent_lab.race.running import Conditions, data_of
from consequent_lab.race.task import Task
from consequent_lab.race.training import Run
from consequent_lab.records import device_name
from consequent_lab.samples import Data
from consequent_lab.timing import Plan, Quartiles, made, measure, peak_memory, release_memory, seconds_per_step

PERIOD = 100  # later steps after which every contestant has done all that it does now and then
FIRST_RUNS = 3  # of which the first steps are timed
SLOWED = 1e-3  # the fraction of the learning rate that steps are timed with: a batch is learnt again and again
PLAN = Plan(rounds=5, seconds=60, warm_up=WARM_UP_STEPS + 1, period=PERIOD)
DEMO_PLAN = Plan(rounds=9, seconds=4, sample_seconds=0.01)
TINY_PLAN = Plan(rounds=5, seconds=1, sample_seconds=0.001, warm_up=WARM_UP_STEPS + 1)


def times(
    conditions: Conditions,
    names: list[str],
    results: Results,
    say: Callable[[str], None],
    plan: Plan = PLAN,
    first: int = FRESH,
) -> None:
    """Measures the contestants and keeps a line for each; those with a line are passed over.

    Eager steps are timed one contestant after the other within a round, and so are CUDA graphs. So many first ones of a
    run are timed by themselves, when all that is compiled has been.
    """
    task = conditions.the_task()
    data = data_of(conditions, 0, search=False)
    names = [name for name in names if not results.of_kind("time", name)]
    chosen: dict[str, Settings] = {}
    for name in names:
        best = next(iter(results.finals(name)), results.best(name))
        knobs = contestant_named(name).space(task)
        chosen[name] = best["settings"] if best else {knob.name: knob.start for knob in knobs}
    lines: dict[str, Line] = {name: {"milliseconds": {}, "errors": {}} for name in names}
    ways = ("memory", "eager", "graph") if conditions.device == "cuda" else ("eager",)
    for way in ways:
        errors: dict[str, str] = {}
        makers = {
            name: partial(step_of, task, contestant_named(name), chosen[name], data, way == "graph")
            for name in names
            if way != "graph" or contestant_named(name).graphs
        }
        if way == "memory":
            peaks = made({name: partial(peak_memory, make) for name, make in makers.items()}, errors)
            for name, peak in peaks.items():
                lines[name]["memory_mib"] = asdict(peak)
        else:
            steps = made(makers, errors)
            timings = measure(steps, conditions.device, TINY_PLAN if conditions.tiny else plan)
            for name, samples in timings.milliseconds.items():
                lines[name]["milliseconds"][way] = asdict(Quartiles.of(samples))
            errors |= timings.errors
            steps.clear()
            release_memory()
            if way == "eager" and first:
                live = {name: make for name, make in makers.items() if name not in errors}
                for name, seconds in _of_first_steps(live, conditions.device, first).items():
                    lines[name]["first"] = {"steps": first, "milliseconds": 1e3 * seconds}
        for name, message in errors.items():
            lines[name]["errors"][way] = message
    machine, day = device_name(conditions.device), datetime.now(timezone.utc).date().isoformat()
    for name, line in lines.items():
        made_by = {"device": machine, "torch": str(torch.__version__), "date": day}
        kept = line_of(task, "time", name, settings=chosen[name], **made_by, **line)
        results.add(kept)
        medians = {how: f"{quartiles['median']:.3g} ms" for how, quartiles in kept["milliseconds"].items()}
        say(f"{name:11} {medians} {kept['errors'] or ''}")


def _of_first_steps(
    makers: Mapping[str, Callable[[], Callable[[], object]]], device: str, count: int
) -> dict[str, float]:
    """Returns how long each of the first steps takes, on average: the median of some runs, in turns."""
    samples: dict[str, list[float]] = {name: [] for name in makers}
    for _ in range(FIRST_RUNS):
        for name, make in makers.items():
            samples[name].append(seconds_per_step(make(), device, count))
            release_memory()
    return {name: statistics.median(found) for name, found in samples.items()}


def step_of(task: Task, contestant: Contestant, settings: Settings, data: Data, graph: bool) -> Callable[[], object]:
    """Returns a training step on the first batch, at a fraction of the learning rate."""
    run = Run(task, contestant, settings, data, seed=0, steps=task.steps(len(data.train)), graph=graph)
    run.schedule(SLOWED)
    return partial(run.learn, run.batch(0))
