"""Trains many runs side by side, the most urgent first, and goes on when one of them fails.

What can start is asked for again whenever a run ends: a search that is complete opens the full runs. When time is up,
no run starts and the running ones stop; they go on from their last checkpoint the next time.
"""

import contextlib
import gc
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import parent_process
from pathlib import Path
from typing import Any, NamedTuple

from consequent_lab.paper.recipes import Job
from consequent_lab.pool import Pool
from consequent_lab.progress import ProgressBoard, RunLine, Watcher, shown_seconds

SECONDS_BETWEEN_MESSAGES = 0.2
ATTEMPTS = 2  # of a run whose process was killed
SHOWN_METRICS = ("running_loss", "running_accuracy", "train_loss", "train_accuracy", "test_accuracy")


class OutOfTime(Exception):  # noqa: N818  (it is no error)
    """The time that was given is up."""


@dataclass(frozen=True)
class Setup:
    """Where and how runs are trained."""

    runs: Path
    device: str
    data: Path | None
    workers: int
    deadline: float | None  # seconds as of `time.time`


class Message(NamedTuple):
    """What a worker process tells about its run."""

    job: str
    event: str
    arguments: tuple[Any, ...]


class Ended(NamedTuple):
    """How a run left its worker."""

    state: str  # done, stopped or failed
    text: str = ""


@dataclass
class Summary:
    """What became of all runs."""

    done: list[str] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


def run_jobs(ready: Callable[[], list[Job]], setup: Setup, board: ProgressBoard) -> Summary:
    """Trains until nothing is left, or time is up.

    Args:
        ready: returns the runs that are not finished and could start now.
        setup: where and how.
        board: shows how they get on.
    """
    summary = Summary()
    lines = _Lines(board)
    attempts: dict[str, int] = {}
    while True:
        with Pool[Message](setup.workers, lines.show) as pool:
            lost = _drive(pool, ready, setup, summary, lines)
        if not lost:  # A pool that lost a process is of no more use, but runs resume.
            return summary
        for name in lost:
            attempts[name] = attempts.get(name, 0) + 1
            lines.put_away(name, "its worker process was lost")
            if attempts[name] >= ATTEMPTS:
                summary.failed[name] = f"a worker process was killed while it ran, {ATTEMPTS} times; out of memory?"


def _drive(
    pool: Pool[Message], ready: Callable[[], list[Job]], setup: Setup, summary: Summary, lines: "_Lines"
) -> list[str]:
    """Trains in a pool; returns the runs that were on it when it broke, or nothing at the end."""
    running: dict[Future[Ended], Job] = {}
    while True:
        for job in _next_jobs(ready(), setup, summary, list(running.values())):
            running[pool.submit(_train, job, setup)] = job
            if setup.workers == 1:
                break  # it has ended, and others may have become ready
        if not running:
            return []
        finished, _ = wait(running, return_when=FIRST_COMPLETED)
        if any(isinstance(future.exception(), BrokenProcessPool) for future in finished):
            return [job.name for job in running.values()]
        for future in finished:
            job, ended = running.pop(future), future.result()
            if ended.state == "failed":
                summary.failed[job.name] = ended.text
            else:
                (summary.done if ended.state == "done" else summary.stopped).append(job.name)
            lines.put_away(job.name, ended.text)


def _next_jobs(ready: list[Job], setup: Setup, summary: Summary, running: list[Job]) -> list[Job]:
    """Returns those that start now."""
    if setup.deadline is not None and time.time() >= setup.deadline:
        return []
    names = {job.name for job in running}
    waiting = [job for job in ready if job.name not in names and job.name not in summary.failed]
    waiting = list({job.name: job for job in sorted(waiting, key=lambda job: job.urgency)}.values())
    together = [job for job in waiting if not job.alone]
    if together and not any(job.alone for job in running):
        return together[: setup.workers - len(running)]
    return waiting[:1] if waiting and not running else []  # one that must be alone


# ---- in this process ---------------------------------------------------------------------------------------------


class _Lines:
    """The board's lines of the runs that are being trained."""

    def __init__(self, board: ProgressBoard) -> None:
        self._board = board
        self._lines: dict[str, RunLine] = {}

    def show(self, message: Message) -> None:
        line = self._lines.get(message.job)
        if line is None:
            line = self._lines[message.job] = self._board.run(message.job)
        getattr(line, message.event)(*message.arguments)

    def put_away(self, name: str, text: str) -> None:
        line = self._lines.pop(name, None) or self._board.run(name)
        line.put_away(text)


# ---- in a worker process -----------------------------------------------------------------------------------------


def _train(report: Callable[[Message], None], job: Job, setup: Setup) -> Ended:
    from consequent_lab.trainer import train

    watcher = _Reporter(report, job.name, setup.deadline)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            train(job.config, job.folder(setup.runs), setup.device, data=setup.data, watcher=watcher)
    except OutOfTime:
        return Ended("stopped", "stopped: time is up")
    except Exception as error:
        text = f"failed: {_shortened(error)}"
        _leave_if_broken(setup.device, f"{job.name}: {text}")
        return Ended("failed", text)
    finally:
        _tidy(setup.device)
    messages = sorted({str(warning.message).splitlines()[0] for warning in caught})
    return Ended("done", "; ".join([watcher.text, *messages]))


def _tidy(device: str) -> None:
    """Gives back what a run took: a CUDA graph holds its memory until nobody knows it any more."""
    import torch

    gc.collect()
    if device != "cpu":
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()


def _leave_if_broken(device: str, text: str) -> None:
    """Ends a worker process whose GPU context no later run could use."""
    import torch

    if device == "cpu" or parent_process() is None:
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        print(text, file=sys.stderr, flush=True)
        os._exit(1)


def _shortened(error: Exception) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(place.filename).name}, line {place.lineno})"


class _Reporter(Watcher):
    """Watches a run in its worker process and tells the parent now and then."""

    def __init__(self, report: Callable[[Message], None], job: str, deadline: float | None) -> None:
        self._report, self._job, self._deadline = report, job, deadline
        self._told = 0.0
        self._metrics: dict[str, Any] = {}  # the last of each
        self.text = ""

    def started(self, iteration: int, total: int) -> None:
        """The run starts."""
        self._tell("started", iteration, total)

    def advanced(self, iteration: int) -> None:
        """So many iterations are done; called often."""
        now = time.time()
        if self._deadline is not None and now >= self._deadline:
            raise OutOfTime
        if now - self._told >= SECONDS_BETWEEN_MESSAGES:
            self._told = now
            self._tell("advanced", iteration)

    def read(self, line: dict[str, Any]) -> None:
        """A line of metrics was written."""
        metrics = {name: line[name] for name in SHOWN_METRICS if line.get(name) is not None}
        self._metrics |= metrics
        self._tell("read", metrics)

    def ended(self, outcome: dict[str, Any], *, skipped: bool) -> None:
        """The run is done; its last line is shown when it leaves the board."""
        self.text = f"{outcome['outcome']} at iteration {outcome['iteration']:,}"
        self.text += f"; {shown_seconds(outcome['seconds'])} of training"
        if "running_loss" in self._metrics:
            self.text += f"; loss {self._metrics['running_loss']:.3g}"
        if "test_accuracy" in self._metrics:
            self.text += f"; test {100 * self._metrics['test_accuracy']:.2f} %"

    def _tell(self, event: str, *arguments: Any) -> None:
        self._report(Message(self._job, event, arguments))
