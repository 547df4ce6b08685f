"""Processes that are the ranks of a gloo group, kept waiting so that a test need not start them: that takes seconds.

``crew.run(function, *args)`` calls a function of a test module on every rank and returns what each of them returned.
A rank that does not answer in time fails the test, and all ranks are replaced: no test can hang.
"""

import os
import tempfile
import time
import traceback
import warnings
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

import exact  # noqa: F401
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import consequent

START = 90  # seconds; importing torch is slow on a busy machine


class RankError(RuntimeError):
    """What went wrong on the ranks: their tracebacks, or their silence."""


class Crew:
    def __init__(self, size, patience=20):
        self.size, self.patience = size, patience
        self._processes, self._pipes = [], []

    def start(self):
        """Start the ranks, unless they are there."""
        if self._processes and all(process.is_alive() for process in self._processes):
            return
        self.stop()
        context = mp.get_context("spawn")
        self._store = Path(tempfile.mkdtemp(prefix="ranks-")) / "store"
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.size, str(self._store), self.patience, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        self._answers(START)

    def stop(self):
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []

    def run(self, function, *args, timeout=30):
        """The results of ``function(*args)``, by rank; it asks torch.distributed which rank it is."""
        self.start()
        answers = self._ask(function, args, timeout)
        errors = [f"rank {rank}:\n{result}" for rank, (failed, result) in enumerate(answers) if failed]
        if errors:
            self.stop()  # some may be waiting for others
            raise RankError("\n".join(errors))
        return [result for _, result in answers]

    def errors(self, function, *args, timeout=30):
        """The last line of each rank's traceback; None from a rank that had no error."""
        self.start()
        answers = self._ask(function, args, timeout)
        try:  # an error that all ranks had together leaves them able to work together
            self.run(dist.barrier, timeout=5)
        except RankError:
            self.stop()
        return [result.strip().splitlines()[-1] if failed else None for failed, result in answers]

    def _ask(self, function, args, timeout):
        for pipe in self._pipes:
            with suppress(BrokenPipeError):  # a rank that has died: there is no answer either, and that is what is told
                pipe.send((function, args))
        return self._answers(timeout)

    def _answers(self, timeout):
        answers, end = {}, time.monotonic() + timeout
        while len(answers) < self.size:
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers}
            for pipe in wait(waiting, timeout=max(0.0, end - time.monotonic())):
                try:
                    answers[waiting[pipe]] = pipe.recv()
                except (EOFError, ConnectionResetError):
                    answers[waiting[pipe]] = True, "the process ended"
            if time.monotonic() >= end and len(answers) < self.size:
                self.stop()
                said = "\n".join(f"rank {rank}:\n{result}" for rank, (failed, result) in answers.items() if failed)
                raise RankError(f"rank {sorted(set(range(self.size)) - set(answers))} did not answer in time\n{said}")
        return [answers[rank] for rank in range(self.size)]


def _serve(rank, size, store, patience, pipe):
    torch.set_num_threads(1)
    warnings.simplefilter("error", consequent.ConsequentWarning)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=patience)
    )
    pipe.send((False, None))
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            answer = (False, function(*args))
        except BaseException:
            answer = (True, traceback.format_exc())
        pipe.send(answer)
