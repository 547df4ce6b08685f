"""A race as jobs: the search of a contestant, then a final for each seed; side by side, until the time is over."""

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from consequent_lab.pool import Pool
from consequent_lab.race.contestants import Contestant, Settings, contestant_named
from consequent_lab.race.curves import Curve, packed
from consequent_lab.race.results import Line, Results, line_of
from consequent_lab.race.task import SEARCH_SEED, Task
from consequent_lab.race.tasks import task_named
from consequent_lab.race.training import curve_of
from consequent_lab.samples import Data
from consequent_lab.timing import describe_error

Report = Callable[[Line], None]


class OutOfTimeError(Exception):
    """The time of this race is over; what was being run is run again the next time."""


@dataclass(frozen=True)
class Conditions:
    """What the processes need to know of the race."""

    task: str
    tiny: bool = False
    epochs: int | None = None  # others than the task's own
    place: Path | None = None  # of the data
    device: str = "cpu"
    graph: bool = True  # steps may be CUDA graphs
    trials: int = 12
    deadline: float | None = None  # by `time.time()`

    def the_task(self) -> Task:
        """Returns the task."""
        task = task_named(self.task, tiny=self.tiny)
        return task if self.epochs is None else task.with_epochs(self.epochs)

    def check_time(self) -> None:
        """Raises if the time is over."""
        if self.deadline is not None and time.time() > self.deadline:
            raise OutOfTimeError


@dataclass(frozen=True)
class Outcome:
    """What a job came to: the settings that were found, or what went wrong."""

    settings: Settings | None = None
    is_out_of_time: bool = False
    error: str = ""


@lru_cache(maxsize=2)
def data_of(conditions: Conditions, seed: int, *, search: bool) -> Data:
    """Returns the data on the device; a search that is judged by test data has a part of the training data for it."""
    task = conditions.the_task()
    data = task.load(conditions.place, seed)
    if search and task.search_samples is not None:
        data = data.first(task.search_samples)
    if search and task.holds_out:
        data = data.with_validation()
    return data.to(conditions.device)


# ---- jobs, in any process ----------------------------------------------------------------------------------------


def attempted(report: Report, job: Callable[..., Settings | None], conditions: Conditions, *arguments: Any) -> Outcome:
    """Does a job, unless the time is over."""
    try:
        conditions.check_time()
        return Outcome(job(report, conditions, *arguments))
    except OutOfTimeError:
        return Outcome(is_out_of_time=True)
    except Exception as error:  # of a package, on data it was not made for: the others go on
        return Outcome(error=describe_error(error))


def search(report: Report, conditions: Conditions, name: str, lines: list[Line]) -> Settings | None:
    """Runs the trials that a contestant still has, reports each as a line, and returns the best settings."""
    from consequent_lab.race.search import Search

    task, contestant = conditions.the_task(), contestant_named(name)
    data = data_of(conditions, SEARCH_SEED, search=True)
    steps = task.steps(len(data.train), search=True)
    study = Search(task, contestant, steps, lines)
    results = Results(task, Path(), list(lines))
    while study.number < conditions.trials:
        conditions.check_time()
        trial = study.ask()
        curve, kept = _trained(conditions, contestant, trial.settings, data, SEARCH_SEED, steps, trial.is_over)
        line = line_of(task, "trial", name, **trial.end(curve), **kept)
        report(line)
        results.lines.append(line)
    best = results.best(name)
    return None if best is None else best["settings"]


def final(report: Report, conditions: Conditions, name: str, settings: Settings, seed: int) -> Settings:
    """Runs a final, reports it as a line, and returns its settings."""
    task, start = conditions.the_task(), time.perf_counter()
    # Tasks that split at random have another set for every seed; the others keep one in memory.
    data = data_of(conditions, seed if task.name.startswith("table") else 0, search=False)
    steps = task.steps(len(data.train))
    _, kept = _trained(conditions, contestant_named(name), settings, data, seed, steps, lambda curve: False)
    seconds = time.perf_counter() - start
    report(line_of(task, "final", name, settings=settings, seed=seed, seconds=seconds, **kept))
    return settings


def _trained(
    conditions: Conditions,
    contestant: Contestant,
    settings: Settings,
    data: Data,
    seed: int,
    steps: int,
    is_over: Callable[[Curve], bool],
) -> tuple[Curve, Line]:
    """Returns a run's curve, and what its line has of it."""

    def watch(curve: Curve) -> bool:
        conditions.check_time()
        return is_over(curve)

    task = conditions.the_task()
    curve, is_graphed = curve_of(task, contestant, settings, data, seed, steps, conditions.graph, watch)
    return curve, {"steps": steps, "graph": is_graphed, "device": conditions.device, "curve": packed(curve)}


# ---- the race, in one process ------------------------------------------------------------------------------------


def race(
    conditions: Conditions,
    names: list[str],
    seeds: int,
    workers: int,
    results: Results,
    searched: Results,
    say: Callable[[str], None],
) -> bool:
    """Runs what is missing of some contestants, in the order of work, and returns whether nothing is.

    Lines are kept in `results`; the settings of finals come from those that were `searched`: the same, or those of the
    task whose search is taken over. So many workers are so many processes, but one stays in this process.
    """

    def report(line: Line) -> None:
        results.add(line)
        say(sentence(results.task, line))

    def finals(name: str, settings: Settings) -> list[tuple[Any, ...]]:
        there = {line["seed"] for line in results.finals(name)}
        return [(final, name, settings, seed) for seed in range(seeds) if seed not in there]

    waiting: deque[tuple[Any, ...]] = deque()  # a job, a name, and what else the job needs
    for name in names:
        if results is searched and len(results.trials(name)) < conditions.trials:
            waiting.append((search, name, results.trials(name)))
        elif (best := searched.best(name)) is not None:
            waiting.extend(finals(name, best["settings"]))
        else:
            say(f"{name}: there is no search of {searched.task.name} to take the settings from")
    is_whole = True
    running: dict[Future[Outcome], tuple[Any, ...]] = {}
    with Pool[Line](workers, report) as pool:
        while waiting or running:
            while waiting and len(running) < workers:
                job, name, *needed = waiting.popleft()
                running[pool.submit(attempted, job, conditions, name, *needed)] = job, name
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                job, name = running.pop(future)
                outcome = future.result()
                if outcome.error:
                    say(f"{name}: {outcome.error}")
                if outcome.error or outcome.is_out_of_time:
                    is_whole = False
                elif job is search and outcome.settings is not None:
                    # Before other searches: a table of some contestants is worth more than many searches.
                    waiting.extendleft(reversed(finals(name, outcome.settings)))
    return is_whole


def sentence(task: Task, line: Line) -> str:
    """Returns what a line says, in short."""
    settings = ", ".join(f"{name} {value:.3g}" for name, value in line["settings"].items())
    last = {name: values[-1] for name, values in line["curve"].items() if name != "step"}
    metrics = ", ".join(f"{name} {'nan' if value is None else f'{value:.4g}'}" for name, value in last.items())
    which = f"trial {line['number']}" if line["kind"] == "trial" else f"seed {line['seed']}"
    ending = " (given up)" if line.get("state") == "pruned" else ""
    how = "graph" if line["graph"] else "eager"
    return (
        f"{line['contestant']:11} {which:8} {settings}: {metrics} after {line['curve']['step'][-1]} steps, "
        f"{line['seconds']:.1f} s {how}{ending}"
    )
