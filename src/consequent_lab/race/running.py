"""A race as jobs: the search of a contestant, then a final for each seed; side by side, until the time is over."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

from consequent_lab.jobs import Job, check_time, run_jobs
from consequent_lab.pool import Report
from consequent_lab.race.contestants import Contestant, Settings, contestant_named
from consequent_lab.race.curves import Curve, packed
from consequent_lab.race.measures import named, shown
from consequent_lab.race.results import Line, Results, line_of
from consequent_lab.race.task import Task
from consequent_lab.race.tasks import task_named
from consequent_lab.race.training import curve_of
from consequent_lab.samples import Data


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


@lru_cache(maxsize=4)
def data_of(conditions: Conditions, seed: int, *, search: bool) -> Data:
    """Returns the data on the device; a search that is judged by test data has a part of the training data for it."""
    task = conditions.the_task()
    data = task.load(conditions.place, seed)
    if search and task.holds_out:
        data = data.with_validation()
    return data.to(conditions.device)


# ---- jobs, in any process ----------------------------------------------------------------------------------------


def search(report: Report, conditions: Conditions, name: str, trials: Sequence[Line]) -> str:
    """Runs the trials that a contestant still has, after those that it has had, and reports each as a line."""
    from consequent_lab.race.search import Search

    task, contestant = conditions.the_task(), contestant_named(name)
    data = {seed: data_of(conditions, task.data_seed(seed), search=True) for seed in task.seeds_of_search}
    steps = task.steps(min(len(one.train) for one in data.values()), search=True)
    study = Search(task, contestant, steps, trials)
    while study.number < conditions.trials:
        check_time(conditions.deadline)
        curve, kept = _trained(conditions, contestant, study.ask(), data, steps, study.is_over)
        report(line_of(task, "trial", name, **study.end(curve), **kept))
    return ""


def chosen_trial(report: Report, conditions: Conditions, name: str, settings: Settings, number: int) -> str:
    """Runs a trial with settings that the task gives, to its end, and reports it as a line."""
    task, start = conditions.the_task(), time.perf_counter()
    data = {seed: data_of(conditions, task.data_seed(seed), search=True) for seed in task.seeds_of_search}
    steps = task.steps(min(len(one.train) for one in data.values()))
    curve, kept = _trained(conditions, contestant_named(name), settings, data, steps, lambda curve: False)
    ended = {"number": number, "state": "complete", "score": task.measure.score(curve, steps)}
    seconds = time.perf_counter() - start
    report(line_of(task, "trial", name, settings=settings, **ended, seconds=seconds, **kept))
    return ""


def final(report: Report, conditions: Conditions, name: str, settings: Settings, seed: int) -> str:
    """Runs a final and reports it as a line."""
    task, start = conditions.the_task(), time.perf_counter()
    data = data_of(conditions, task.data_seed(seed), search=False)
    steps = task.steps(len(data.train))
    _, kept = _trained(conditions, contestant_named(name), settings, {seed: data}, steps, lambda curve: False)
    seconds = time.perf_counter() - start
    report(line_of(task, "final", name, settings=settings, seed=seed, seconds=seconds, **kept))
    return ""


def _trained(
    conditions: Conditions,
    contestant: Contestant,
    settings: Settings,
    data: dict[int, Data],
    steps: int,
    is_over: Callable[[Curve], bool],
) -> tuple[Curve, Line]:
    """Returns the curve of runs with these seeds and their data, and what its line has of it."""

    def watch(curve: Curve) -> bool:
        check_time(conditions.deadline)
        return is_over(curve)

    task = conditions.the_task()
    curve, is_graphed = curve_of(task, contestant, settings, data, steps, conditions.graph, watch)
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
    task whose search is taken over, then with the best of the choices that the task gives, if it does. So many workers
    are so many processes, but one stays in this process.

    Raises:
        ValueError: if something failed, at the end of everything else.
    """

    def report(line: Line) -> None:
        results.add(line)
        say(sentence(line))

    def ready() -> list[Job]:
        """Finals come before searches: a table of some contestants is worth more than many searches."""
        jobs = []
        for place, name in enumerate(names):
            trials, best = results.trials(name), searched.best(name)
            if results is searched and len(trials) < conditions.trials:
                work = partial(search, conditions=conditions, name=name, trials=trials)
                jobs.append(Job(f"{name}, search", work, (1, place)))
            elif best is not None and (untried := results.untried_choices(name)):
                for number, choice in untried.items():
                    settings = {**best["settings"], **choice}
                    work = partial(chosen_trial, conditions=conditions, name=name, settings=settings, number=number)
                    jobs.append(Job(f"{name}, choice {number}", work, (1, place, number)))
            elif best is not None:
                settings = (results.best(name) or best)["settings"]
                there = {line["seed"] for line in results.finals(name)}
                for seed in set(range(seeds)) - there:
                    work = partial(final, conditions=conditions, name=name, settings=settings, seed=seed)
                    jobs.append(Job(f"{name}, seed {seed}", work, (0, place, seed)))
        return jobs

    def ended(name: str, text: str) -> None:
        if text:
            say(f"{name}: {text}")

    for name in names:
        if results is not searched and searched.best(name) is None:
            say(f"{name}: there is no search of {searched.task.name} to take the settings from")
    summary = run_jobs(ready, workers, conditions.deadline, report, ended)
    if summary.failed:
        raise ValueError(
            f"{len(summary.failed)} of the jobs failed: {', '.join(summary.failed)}; what is done is kept, and the "
            "same command goes on with the rest"
        )
    return not ready()


def sentence(line: Line) -> str:
    """Returns what a line says, in short."""
    settings = ", ".join(f"{name} {value:.3g}" for name, value in line["settings"].items())
    last = {name: values[-1] for name, values in line["curve"].items() if name != "step"}
    ends = [f"{named(name)} {'nan' if value is None else shown(name, value)}" for name, value in last.items()]
    which = f"trial {line['number']}" if line["kind"] == "trial" else f"seed {line['seed']}"
    ending = " (given up)" if line.get("state") == "pruned" else ""
    way = " in a CUDA graph" if line["graph"] else ""
    return (
        f"{line['contestant']:11} {which:8} {settings}: {', '.join(ends)} after {line['curve']['step'][-1]} steps, "
        f"{line['seconds']:.1f} s{way}{ending}"
    )
