"""One run, many runs, and which runs a stage needs."""

import dataclasses
import gzip
import json
import math
import multiprocessing
import os
import pathlib
import platform
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

import consequent
from benchmarks.defaults.contestants import CONTESTANTS, DAMPINGS, KNOWN, options_of, unbounded
from benchmarks.defaults.task import Task
from benchmarks.defaults.tasks import QUICK, TASKS

TUNING_SEED = 100
SEEDS = (0, 1, 2)
LATER_SEEDS = (3, 4, 5)  # for what was thought of when the others had been seen,
NEXT_SEEDS = (6, 7, 8)  # for the same once more,
LAST_SEEDS = tuple(range(9, 15))  # and in pairs
POINTS = 10  # of a trajectory
GIVE_UP = 20  # losses in a row that are NaN or infinite

Record = dict[str, Any]


class Run(NamedTuple):
    """What identifies a run."""

    task: str
    contestant: str
    damping: str  # "" for a plain optimiser
    rate: float
    seed: int
    steps: int  # at most; 0: as many as the task has


@dataclass(frozen=True)
class Scope:
    """How much of the study is meant."""

    tasks: tuple[str, ...] = tuple(TASKS)
    dampings: tuple[str, ...] = DAMPINGS
    contestants: tuple[str, ...] = tuple(CONTESTANTS)
    seeds: tuple[int, ...] = SEEDS
    steps: int = 0
    most_rates: int | None = None

    def rates(self, contestant: str) -> tuple[float, ...]:
        """The rates that are tried."""
        rates = KNOWN[contestant].rates
        return rates if self.most_rates is None else rates[2 : 2 + self.most_rates]

    def cases(self) -> list[tuple[str, str, str]]:
        """Every task, contestant and damping."""
        return [
            (task, name, damping)
            for task in self.tasks
            for name in self.contestants
            for damping in (self.dampings if KNOWN[name].is_corrected else ("",))
        ]


FULL = Scope()
SMALL = Scope(QUICK, ("relative 0.1", "absolute 1"), seeds=(0,), steps=12, most_rates=2)


def lines_of(path: pathlib.Path) -> list[str]:
    """What a file holds, compressed or not; nothing if there is none."""
    if not path.exists():
        return []
    if path.suffix == ".gz":
        return gzip.decompress(path.read_bytes()).decode().splitlines()
    return path.read_text().splitlines()


class Results:
    """Records in a file, one line of JSON each. A line that was cut off by a kill is passed over.

    A compressed file (``.gz``) is only read.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.records: dict[Run, Record] = {}
        for line in lines_of(path):
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            if "task" in record:
                self.records[Run(*(record[name] for name in Run._fields))] = record

    def append(self, records: Iterable[Record]) -> None:
        """Write records as they come, each at once."""
        if self.path.suffix == ".gz":
            raise ValueError(f"{self.path} is compressed and is only read: unpack it (gunzip -k), and add to that file")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")
            for record in records:
                file.write(json.dumps(record).encode() + b"\n")
                file.flush()
                if "task" in record:
                    self.records[Run(*(record[name] for name in Run._fields))] = record

    def best_rate(self, scope: Scope, task: str, contestant: str, damping: str) -> float | None:
        """The rate with the lowest final loss at the tuning seed. None if none was run, or all diverged."""
        found = [
            self.records.get(Run(task, contestant, damping, rate, TUNING_SEED, scope.steps))
            for rate in scope.rates(contestant)
        ]
        finished = [record for record in found if record and not record["diverged"]]
        return min(finished, key=lambda record: record["final"])["rate"] if finished else None


def rounded(value: float | torch.Tensor) -> float | None:
    """Five digits of a number; None stands for NaN and infinity, which JSON does not know."""
    value = float(value)
    return float(f"{value:.5g}") if math.isfinite(value) else None


def measured(task: Task, measure: Callable[[], torch.Tensor]) -> float | None:
    """A measure of the model as it would be used."""
    task.model.eval()
    value = rounded(measure())
    task.model.train()
    return value


def train(run: Run) -> Record:
    """The record of a run: what it was, its final loss, ten points on the way, and how long it took.

    Seconds are the processor's, so that other processes do not count.
    """
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", consequent.ConsequentWarning)
        return _trained(run, TASKS[run.task](run.seed))


def _trained(run: Run, task: Task) -> Record:
    contestant = KNOWN[run.contestant]
    optimizer = contestant.optimiser(task.model, run.rate)
    correction = None
    if contestant.is_corrected:
        options = options_of(run.damping)
        correction = consequent.attach(optimizer, task.model, loss_reduction=task.loss_reduction, **options)
    steps = min(run.steps or task.steps, task.steps)
    points = {round(steps * (point + 1) / POINTS) for point in range(POINTS)}
    started = time.process_time()
    initial = measured(task, task.measure)
    trajectory: list[float | None] = [initial]
    lost = 0
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        loss = task.loss(*next(task.batches))
        loss.backward()
        optimizer.step()
        if task.after_step is not None:
            task.after_step(step)
        lost = 0 if loss.isfinite() else lost + 1
        if step in points or lost == GIVE_UP:
            trajectory.append(measured(task, task.measure))
        if lost == GIVE_UP:
            break
    final = trajectory[-1] if lost < GIVE_UP else None
    assert initial is not None
    return {
        **run._asdict(),
        "initial": initial,
        "final": final,
        "floor": task.floor,
        "test": None if task.test is None else measured(task, task.test),
        "diverged": final is None or final > 10 * initial,
        "trajectory": trajectory,
        "failed": 0 if correction is None else correction.failed,
        "seconds": round(time.process_time() - started, 2),
    }


def search(scope: Scope, results: Results) -> list[Run]:
    """Every rate at the tuning seed."""
    return [
        Run(task, contestant, damping, rate, TUNING_SEED, scope.steps)
        for task, contestant, damping in scope.cases()
        for rate in scope.rates(contestant)
    ]


def confirm(scope: Scope, results: Results) -> list[Run]:
    """The best rate of the search, with the other seeds. A case that always diverged is given its lowest rate."""
    return [
        Run(
            task,
            contestant,
            damping,
            results.best_rate(scope, task, contestant, damping) or scope.rates(contestant)[0],
            seed,
            scope.steps,
        )
        for task, contestant, damping in scope.cases()
        for seed in scope.seeds
    ]


def fixed(scope: Scope, rates: dict[str, float]) -> list[Run]:
    """One rate for all tasks, with the other seeds."""
    return [
        Run(task, contestant, damping, rates[contestant], seed, scope.steps)
        for task, contestant, damping in scope.cases()
        for seed in scope.seeds
    ]


def stress(scope: Scope, results: Results, damping: str) -> list[Run]:
    """Ten times the best rate of the search, for the C- versions at one damping; a bound has the rates of none."""
    found = []
    for task, contestant, _ in dataclasses.replace(scope, dampings=(damping,)).cases():
        if KNOWN[contestant].is_corrected:
            best = results.best_rate(scope, task, contestant, unbounded(damping))
            if best is not None:
                found += [Run(task, contestant, damping, 10 * best, seed, scope.steps) for seed in scope.seeds]
    return found


def provenance() -> Record:
    """What the numbers depend on beside the code."""
    return {
        "command": " ".join(["python -m benchmarks.defaults", *sys.argv[1:]]),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
    }


def run_all(runs: list[Run], results: Results, workers: int) -> None:
    """Make the runs that are not there yet, and say how it goes."""
    missing = [run for run in dict.fromkeys(runs) if run not in results.records]
    random.Random(0).shuffle(missing)  # so that the time that is left can be told from the time that has passed
    print(f"{len(runs)} runs, {len(missing)} of them still to be made", flush=True)
    if not missing:
        return
    results.append([provenance()])
    started = time.perf_counter()

    def told(records: Iterable[Record]) -> Iterable[Record]:
        for done, record in enumerate(records, 1):
            if done % max(len(missing) // 20, 1) == 0 or done == len(missing):
                passed = time.perf_counter() - started
                left = passed / done * (len(missing) - done)
                print(f"{done} of {len(missing)} after {passed:.0f} s, about {left:.0f} s left", flush=True)
            yield record

    if workers == 1:
        results.append(told(map(train, missing)))
        return
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        results.append(told(pool.imap_unordered(train, missing)))


def time_tasks(scope: Scope) -> None:
    """Run every task once with Adam and once with C-Adam, and say how long it took and how far the loss fell."""
    print("| task | Adam: loss | s | C-Adam: loss | s |\n|---|---|---:|---|---:|")
    for task in scope.tasks:
        cells = []
        for contestant, damping in (("adam", ""), ("c-adam", "relative 0.1")):
            record = train(Run(task, contestant, damping, 3e-3, TUNING_SEED, scope.steps))
            cells += [f"{record['initial']} → {record['final']}", f"{record['seconds']:.2f}"]
        print(f"| {task} | {' | '.join(cells)} |", flush=True)
