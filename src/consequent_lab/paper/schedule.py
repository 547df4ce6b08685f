"""Trains the paper's runs side by side; those that time cuts off go on from their last checkpoint the next time."""

import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from consequent_lab import jobs
from consequent_lab.paper.recipes import Job
from consequent_lab.progress import ProgressBoard, RunLine, Watcher

SECONDS_BETWEEN_MESSAGES = 0.2


class Setup(NamedTuple):
    """Where and how runs are trained."""

    runs: Path
    device: str
    data: Path | None
    workers: int
    deadline: float | None  # seconds as of `time.time`


class Message(NamedTuple):
    """What a worker process tells a run's line on the board: the name of one of its methods, and the arguments."""

    job: str
    event: str
    arguments: tuple[Any, ...]


def train_runs(ready: Callable[[], list[Job]], setup: Setup, board: ProgressBoard) -> jobs.Summary:
    """Trains the runs that are not finished and could start now, until nothing is left, or time is up."""
    lines: dict[str, RunLine] = {}

    def line_of(name: str) -> RunLine:
        if name not in lines:
            lines[name] = board.run(name)
        return lines[name]

    def show(message: Message) -> None:
        getattr(line_of(message.job), message.event)(*message.arguments)

    def put_away(name: str, text: str) -> None:
        line_of(name).put_away(text)
        del lines[name]

    def work() -> list[jobs.Job]:
        runs = ready()
        return [jobs.Job(run.name, partial(train_job, job=run, setup=setup), run.urgency, run.alone) for run in runs]

    return jobs.run_jobs(work, setup.workers, setup.deadline, show, put_away)


def train_job(report: Callable[[Message], None], job: Job, setup: Setup) -> str:
    """Trains a run, in any process, and returns the warnings that it gave."""
    from consequent_lab.trainer import train

    watcher = _Reporter(report, job.name, setup.deadline)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        train(job.config, job.folder(setup.runs), setup.device, data=setup.data, watcher=watcher)
    return "; ".join(sorted({str(warning.message).splitlines()[0] for warning in caught}))


class _Reporter(Watcher):
    """Watches a run in its worker process, tells the parent now and then, and ends the run when time is up."""

    def __init__(self, report: Callable[[Message], None], job: str, deadline: float | None) -> None:
        self._report, self._job, self._deadline = report, job, deadline
        self._told = 0.0

    def started(self, iteration: int, total: int) -> None:
        """The run starts."""
        self._tell("started", iteration, total)

    def advanced(self, iteration: int) -> None:
        """So many iterations are done; called often."""
        jobs.check_time(self._deadline)
        now = time.monotonic()
        if now - self._told >= SECONDS_BETWEEN_MESSAGES:
            self._told = now
            self._tell("advanced", iteration)

    def read(self, line: dict[str, Any]) -> None:
        """A line of metrics was written."""
        self._tell("read", {name: value for name, value in line.items() if isinstance(value, float)})

    def ended(self, outcome: dict[str, Any], skipped: bool) -> None:
        """The run is done."""
        self._tell("ended", outcome, skipped)

    def _tell(self, event: str, *arguments: Any) -> None:
        self._report(Message(self._job, event, arguments))
