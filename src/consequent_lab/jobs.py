"""Jobs side by side, the most urgent first, until none is left or time is up; one that fails stops no other.

What can start is asked for again whenever a job ends: a search that is complete opens the runs that follow from it.
When time is up, no job starts and the running ones stop; what they were at is taken up again the next time.
"""

import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import parent_process
from pathlib import Path

from consequent_lab.pool import Pool, Report, one_thread

ATTEMPTS = 2  # of a job whose process was killed


class OutOfTimeError(Exception):
    """The time that was given is up."""


@dataclass(frozen=True)
class Job:
    """Something to be done in any process."""

    name: str  # tells it from any other
    work: Callable[[Report], str]  # to be pickled; returns what there is to say
    urgency: tuple[int, ...] = ()  # the lowest starts first
    alone: bool = False  # nothing else may run beside it


@dataclass
class Summary:
    """What became of all jobs."""

    done: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


def check_time(deadline: float | None) -> None:
    """Raises if time, as of `time.time`, is up."""
    if deadline is not None and time.time() >= deadline:
        raise OutOfTimeError


def run_jobs(
    ready: Callable[[], list[Job]],
    workers: int,
    deadline: float | None,
    report: Report,
    ended: Callable[[str, str], None],
) -> Summary:
    """Does the jobs that are not done and could start now, until nothing is left, or time, as of `time.time`, is up.

    Workers are processes of one thread each; a single one is this process. In it `report` takes what a job reports, and
    `ended`, after all of that, its name and what there is to say.
    """
    summary = Summary()

    def settle(job: Job, ending: tuple[str, str]) -> None:
        state, text = ending
        if state == "done":
            summary.done.append(job.name)
        elif state == "failed":
            summary.failed[job.name] = text
        ended(job.name, text)

    def drive(pool: Pool) -> list[Job]:
        """Returns the jobs that were in the pool when it broke, or nothing at the end."""
        running: dict[Future[tuple[str, str]], Job] = {}
        while True:
            for job in next_jobs(ready(), workers, deadline, summary, list(running.values())):
                running[pool.submit(_attempt, job, deadline)] = job
            if not running:
                return []
            finished, _ = wait(running, return_when=FIRST_COMPLETED)
            if any(isinstance(future.exception(), BrokenProcessPool) for future in finished):
                return list(running.values())
            pool.flush()
            for future in finished:
                settle(running.pop(future), future.result())

    if workers == 1:
        with one_thread():
            while found := next_jobs(ready(), 1, deadline, summary, []):
                settle(found[0], _attempt(report, found[0], deadline))
        return summary
    attempts: Counter[str] = Counter()
    while True:
        with Pool(workers, report) as pool:
            lost = drive(pool)
        if not lost:  # A pool that lost a process is of no more use, but its jobs can be taken up again.
            return summary
        for job in lost:
            attempts[job.name] += 1
            ended(job.name, "its worker process was lost")
            if attempts[job.name] >= ATTEMPTS:
                text = f"a worker process was killed while it ran, {ATTEMPTS} times; out of memory?"
                summary.failed[job.name] = text


def next_jobs(
    ready: Sequence[Job], workers: int, deadline: float | None, summary: Summary, running: Sequence[Job]
) -> list[Job]:
    """Returns those that start now."""
    if deadline is not None and time.time() >= deadline:
        return []
    names = {job.name for job in running}
    waiting = [job for job in ready if job.name not in names and job.name not in summary.failed]
    waiting = list({job.name: job for job in sorted(waiting, key=lambda job: job.urgency)}.values())
    together = [job for job in waiting if not job.alone]
    if together and not any(job.alone for job in running):
        return together[: workers - len(running)]
    return waiting[:1] if waiting and not running else []  # one that must be alone


def _attempt(report: Report, job: Job, deadline: float | None) -> tuple[str, str]:
    """Does a job, in its process, and returns whether it is done, stopped or failed, and what there is to say."""
    from consequent_lab.timing import release_memory

    try:
        check_time(deadline)
        ending = "done", job.work(report)
    except OutOfTimeError:
        ending = "stopped", "stopped: time is up"
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = f"failed: {type(error).__name__}: {error} ({Path(place.filename).name}, line {place.lineno})"
        ending = "failed", text
    try:
        release_memory()  # a CUDA graph holds its own until nobody knows it any more
    except RuntimeError:
        if parent_process() is not None:  # no later job could use what this process has of the GPU
            print(f"{job.name}: {ending[1]}", file=sys.stderr, flush=True)
            os._exit(1)
    return ending
