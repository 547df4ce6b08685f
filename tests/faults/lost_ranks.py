"""SIGKILL for one of the two ranks of `consequent train`, at random moments and while a checkpoint is being written."""

import random
import signal
import time
from pathlib import Path

from consequent_lab.cli import main
from consequent_lab.runs import DamagedFileError, RunFolder
from faults.comparison import differences
from faults.trial import Trial, require
from faults.two_ranks import SIZE, TwoRanks

LIMIT = 120  # seconds that a run may take
PATIENCE = 20  # seconds in which the other rank must end, long before the ranks' timeout
AIMS = ((1, False), (0, True), (0, False), (1, True))  # in turn: a rank, and whether a checkpoint is being written
# With 64 samples in a mini-batch, ranks send each other rows for one of the layers, and moments for the others.
OPTIONS = """
    train --hidden 96 48 --optimiser nesterov --lr 0.02 --batch-size 64 --iterations 150
    --log-every 5 --evaluate-every 50 --checkpoint-every 10 --device cpu --name run
"""


def lost_ranks(folder: Path, count: int, seed: int = 0) -> list[Trial]:
    """Trains runs that lose a rank again and again until they are done; each is compared with one left in peace.

    Args:
        folder: for the runs.
        count: how many ranks are lost; every other one while a checkpoint is being written, half of these its writer.
        seed: of the moments.
    """
    expected = (
        f"the other rank ends with an error within {PATIENCE} s; the run goes on from its last checkpoint, with two "
        "ranks again, and ends as if nothing had happened, bit for bit"
    )
    training = Trial("one of two ranks lost while training", expected)
    writing = Trial("one of two ranks lost while a checkpoint is being written", expected)
    moments = random.Random(seed)
    number = 0
    while training.tried + writing.tried < count:
        left_in_peace, run = _Run(folder / f"peace{number}", number), _Run(folder / f"lost{number}", number)
        left_in_peace.finish()
        losses: list[tuple[Trial, str]] = []
        while run.files.outcome() is None and training.tried + writing.tried + len(losses) < count:
            lost, aimed = AIMS[(training.tried + writing.tried + len(losses)) % len(AIMS)]
            problem = run.lose(lost, moments.uniform(0, 0.2), aimed=aimed)
            if problem is not None:
                losses.append((writing if aimed else training, problem))
        run.finish()
        found = differences(left_in_peace.files, run.files)
        for trial, problem in losses:
            with trial.attempt(f"run {number}"):
                require(not problem, problem)
                require(not found, f"the run differs: {found}")  # each of them could have spoilt it
        number += 1
    return [training, writing]


class _Run:
    """A run that two ranks train."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = folder
        self._command = [*OPTIONS.split(), "--seed", str(seed), "--runs", str(folder)]
        self.files = RunFolder.of(folder, "train", "run", seed)

    def finish(self) -> None:
        """Trains what is left."""
        with TwoRanks(self._folder, main, self._command) as ranks:
            statuses = ranks.ended(LIMIT)
            words = [ranks.last_words(rank) for rank in range(SIZE)]
        require(statuses == [0] * SIZE, f"the run in {self._folder} ended with {statuses}: {words}")

    def lose(self, lost: int, delay: float, *, aimed: bool) -> str | None:
        """Goes on with the run and kills a rank.

        Args:
            lost: the rank.
            delay: seconds after a checkpoint at which it is killed; or
            aimed: when the next checkpoint is being written.

        Returns:
            what was not as it should be, if anything; None if the run was done before.
        """
        with TwoRanks(self._folder, main, self._command) as ranks:
            before = self._written()
            until = time.monotonic() + LIMIT
            while ranks.are_alive and time.monotonic() < until:
                is_past = self._written() > before  # it has got on since the last time
                if aimed and is_past and any(self.files.path.glob(".checkpoint.pt.*")):
                    break
                if not aimed and is_past:
                    time.sleep(delay)
                    break
            ranks.processes[lost].kill()
            ranks.processes[lost].join()
            statuses = ranks.ended(PATIENCE)
            words = ranks.last_words(1 - lost)
        if statuses[1 - lost] is None:
            return f"rank {1 - lost} still waited for rank {lost} after {PATIENCE} s"
        if self.files.outcome() is not None:
            return None
        if statuses[lost] != -signal.SIGKILL:
            return f"the run did not go on: rank {lost} ended with {statuses[lost]}"
        if statuses[1 - lost] != 1 or not any(clear in words for clear in ("Connection", "Broken pipe")):
            return f"rank {1 - lost} ended with {statuses[1 - lost]} and said {words!r}"
        return self._damage()

    def _written(self) -> int:
        """Returns when the last checkpoint was written."""
        checkpoint = self.files.path / "checkpoint.pt"
        return checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0

    def _damage(self) -> str:
        try:
            state = self.files.checkpoint()
        except DamagedFileError as error:
            return str(error)
        return "" if state is not None else "there is no checkpoint"
