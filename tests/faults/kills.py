"""SIGKILL at random moments of training, and while a checkpoint is being written."""

import random
import time
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

from consequent_lab.runs import RunFolder
from consequent_lab.train_config import TrainConfig
from faults.comparison import differences
from faults.trial import Trial, require

LIMIT = 120  # seconds that a run may take
CONFIG = TrainConfig(
    hidden=(48,) * 3, optimiser="nesterov", lr=0.02, iterations=400, log_every=5, evaluate_every=50, checkpoint_every=10
)


def kills(folder: Path, count: int, seed: int = 0) -> list[Trial]:
    """Trains runs that are killed again and again until they are done; each is compared with one left in peace.

    Args:
        folder: for the runs.
        count: how many kills, at least; every other one is aimed at a checkpoint.
        seed: of the moments.
    """
    expected = "the run goes on from its last checkpoint and ends as if nothing had happened, bit for bit"
    training = Trial("kill −9 while training", expected)
    writing = Trial("kill −9 while a checkpoint is being written", expected)
    moments = random.Random(seed)
    number = 0
    while training.tried + writing.tried < count:
        config = replace(CONFIG, seed=number)
        left_in_peace = RunFolder(folder / f"peace{number}")
        _finish(config, left_in_peace)
        killed = RunFolder(folder / f"killed{number}")
        aims = [0, 0]
        while killed.outcome() is None and sum(aims) + training.tried + writing.tried < count:
            aimed = sum(aims) % 2 == 1
            aims[aimed] += _killed_once(config, killed, moments, aimed=aimed)
        _finish(config, killed)
        found = differences(left_in_peace, killed)
        for trial, hits in ((training, aims[0]), (writing, aims[1])):
            for _ in range(hits):  # each of them could have spoilt the run
                with trial.attempt(f"run {number}"):
                    require(not found, f"the run differs: {found}")
        number += 1
    return [training, writing]


def _start(config: TrainConfig, folder: RunFolder) -> BaseProcess:
    from consequent_lab.trainer import train

    context = get_context("forkserver")  # starts quickly
    context.set_forkserver_preload(["consequent_lab.trainer", "sklearn.datasets"])
    process = context.Process(target=train, args=(config, folder))
    process.start()
    return process


def _finish(config: TrainConfig, folder: RunFolder) -> None:
    process = _start(config, folder)
    process.join(LIMIT)
    require(process.exitcode == 0, f"the run in {folder.path} ended with {process.exitcode}")


def _killed_once(config: TrainConfig, folder: RunFolder, moments: random.Random, *, aimed: bool) -> bool:
    """Starts the run and kills it; returns whether it was alive until then."""
    process = _start(config, folder)
    checkpoint = folder.path / "checkpoint.pt"
    before = checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0
    delay, until = moments.uniform(0, 0.2), time.monotonic() + LIMIT
    while process.is_alive() and time.monotonic() < until:
        is_past = checkpoint.exists() and checkpoint.stat().st_mtime_ns > before  # it has got on since the last kill
        if aimed and is_past and any(folder.path.glob(".checkpoint.pt.*")):
            break
        if not aimed and is_past:
            time.sleep(delay)
            break
    process.kill()
    process.join()
    return process.exitcode != 0
