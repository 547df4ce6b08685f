"""Many runs side by side: one that fails stops no other, time ends all, a lost process costs no run."""

import itertools
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from consequent_lab import jobs
from consequent_lab.jobs import Summary, next_jobs
from consequent_lab.paper import schedule
from consequent_lab.paper.archive import Archive
from consequent_lab.paper.recipes import Job
from consequent_lab.paper.schedule import Setup, train_job, train_runs
from consequent_lab.progress import ProgressBoard
from consequent_lab.train_config import TrainConfig

pytestmark = pytest.mark.slow

CONFIG = TrainConfig(hidden=(8,), iterations=30, log_every=10, checkpoint_every=10)


def job(variant, **changes):
    alone = changes.pop("alone", False)
    return Job("recipe", variant, replace(CONFIG, **changes), alone=alone)


def scheduled(runs, tmp_path, workers=1, deadline=None, terminal=False):
    """Runs the jobs; returns the summary and what was shown."""
    archive = Archive(tmp_path)
    shown = StringIO()
    setup = Setup(tmp_path, "cpu", None, workers, deadline)
    with ProgressBoard(Console(file=shown, width=200, force_terminal=terminal, highlight=False)) as board:
        left = lambda: [one for one in runs if archive.run(one.recipe, one.variant, one.config.seed) is None]  # noqa: E731
        return train_runs(left, setup, board), shown.getvalue()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_that_fails_is_named_and_stops_no_other(tmp_path, workers):
    runs = [job("first"), job("bad", batch_size=5000), job("last"), job("timing", alone=True)]
    summary, shown = scheduled(runs, tmp_path, workers)
    assert sorted(summary.done) == ["recipe/first/seed0", "recipe/last/seed0", "recipe/timing/seed0"]
    assert list(summary.failed) == ["recipe/bad/seed0"]
    assert "batch_size 5000" in summary.failed["recipe/bad/seed0"]
    assert "recipe/first/seed0: finished at iteration 30" in shown
    again, _ = scheduled(runs, tmp_path)
    assert again.done == []


def test_lines_leave_a_terminal_when_their_runs_end(tmp_path):
    _, shown = scheduled([job("first"), job("second")], tmp_path, terminal=True)
    assert "recipe/second/seed0: finished at iteration 30" in shown
    after = shown.rpartition("recipe/second/seed0: finished")[2]
    assert "recipe/second" not in after
    assert "recipe/first" not in after


def test_time_that_is_up_stops_a_run_which_goes_on_later(tmp_path, monkeypatch):
    slow = job("slow", iterations=100, checkpoint_every=50)
    clock = itertools.count()  # a second passes whenever somebody looks, which is at least once in an iteration
    with monkeypatch.context() as patch:
        patch.setattr(jobs, "time", SimpleNamespace(time=lambda: next(clock)))
        summary, _ = scheduled([slow, job("next")], tmp_path, deadline=80)
    assert (summary.done, summary.failed) == ([], {})
    assert slow.folder(tmp_path).outcome() is None
    summary, shown = scheduled([slow], tmp_path)
    assert summary.done == ["recipe/slow/seed0"]
    assert "resumed at iteration 50" in shown
    summary, _ = scheduled([job("next")], tmp_path, deadline=time.time() - 1)
    assert summary.done == []


def test_a_timed_run_has_nothing_beside_it(tmp_path):
    waiting = [job("timing", alone=True), job("one"), job("two")]
    summary = Summary()
    chosen = [one.variant for one in next_jobs(waiting, 2, None, summary, [])]
    assert chosen == ["one", "two"]
    assert next_jobs(waiting[:1], 2, None, summary, [waiting[1]]) == []
    assert next_jobs(waiting[1:], 2, None, summary, [waiting[0]]) == []
    assert [one.variant for one in next_jobs(waiting[:1], 2, None, summary, [])] == ["timing"]


def _killed_once(report, job, setup):
    """Stands for a worker process that the system kills at the first run."""
    mark = setup.runs / "killed"
    if job.variant == "victim" and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return train_job(report, job, setup)


def _always_killed(report, job, setup):
    if job.variant == "victim":
        os.kill(os.getpid(), signal.SIGKILL)
    return train_job(report, job, setup)


@pytest.mark.parametrize(("function", "fails"), [(_killed_once, False), (_always_killed, True)])
def test_a_worker_that_is_killed_costs_no_run(tmp_path, monkeypatch, function, fails):
    monkeypatch.setattr(schedule, "train_job", function)
    summary, _ = scheduled([job("victim")], tmp_path, workers=2)
    assert summary.done == ([] if fails else ["recipe/victim/seed0"])
    assert list(summary.failed) == (["recipe/victim/seed0"] if fails else [])


def _alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"  # nobody may reap an orphan


SCRIPT = """
import os, time
from consequent_lab.pool import Pool

def pid(report):
    report(os.getpid())
    time.sleep(60)

if __name__ == "__main__":
    with Pool(2, lambda number: print(number, flush=True)) as pool:
        pool.submit(pid)
        time.sleep(60)
"""


def test_workers_do_not_outlive_a_parent_that_is_killed(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(SCRIPT)
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    worker = int(parent.stdout.readline())
    assert _alive(worker)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.time() + 20
    while _alive(worker) and time.time() < deadline:
        time.sleep(0.1)
    assert not _alive(worker)
