"""Trains the paper's runs side by side; those that time cuts off go on from their last checkpoint the next time."""

import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from consequent_lab import jobs
from consequent_lab.paper.recipes import Job
from consequent_lab.pool import Report
from consequent_lab.progress import ProgressBoard, RunLine

SECONDS_BETWEEN_MESSAGES = 0.2


class Setup(NamedTuple):
    """Where and how runs are trained."""

    runs: Path
    device: str
    data: Path | None
    workers: int
    deadline: float | None  # seconds as of `time.time`


def train_runs(ready: Callable[[], list[Job]], setup: Setup, board: ProgressBoard) -> jobs.Summary:
    """Trains the runs that are not finished and could start now, until nothing is left, or time is up."""
    lines: dict[str, RunLine] = {}

    def line_of(name: str) -> RunLine:
        if name not in lines:
            lines[name] = RunLine(name, board)
        return lines[name]

    def show(message: tuple[Any, ...]) -> None:
        name, *event = message
        line_of(name)(*event)

    def put_away(name: str, text: str) -> None:
        line_of(name).put_away(text)
        del lines[name]

    def work() -> list[jobs.Job]:
        runs = ready()
        return [jobs.Job(run.name, partial(train_job, job=run, setup=setup), run.urgency, run.alone) for run in runs]

    return jobs.run_jobs(work, setup.workers, setup.deadline, show, put_away)


def train_job(report: Report, job: Job, setup: Setup) -> str:
    """Trains a run, in any process, until time is up, and returns the warnings that it gave."""
    from consequent_lab.trainer import train

    told_at = 0.0

    def tell(event: str, *arguments: Any) -> None:
        nonlocal told_at
        if event == "advanced":
            jobs.check_time(setup.deadline)
            if time.monotonic() - told_at < SECONDS_BETWEEN_MESSAGES:
                return
            told_at = time.monotonic()
        report((job.name, event, *arguments))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        train(job.config, job.folder(setup.runs), setup.device, data=setup.data, watcher=tell)
    return "; ".join(sorted({str(warning.message).splitlines()[0] for warning in caught}))
