"""Processes that are the ranks of a gloo group. They start once and wait for work, since starting takes seconds.

``crew.run(function, …)`` calls a function of a test module on every rank and returns what each of them returned.
Ranks that fail or do not answer in time fail the test and are replaced: no test can hang.
"""

import os
import tempfile
import traceback
import warnings
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from time import monotonic

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import consequent

START, ANSWER, COLLECTIVE = 120, 60, 30  # seconds; importing torch is slow on a busy machine


class Crew:
    def __init__(self, size):
        self.size, self._processes, self._pipes = size, [], []

    def run(self, function, *args, options=None):
        """The results of ``function(*args, **options)``, by rank; it asks torch.distributed which rank it is."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            with suppress(BrokenPipeError):  # of a rank that has died, which gives no answer either
                pipe.send((function, args, options or {}))
        return self._answers(ANSWER)

    def stop(self):
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []

    def _start(self):
        context = mp.get_context("spawn")
        store = Path(tempfile.mkdtemp(prefix="ranks-")) / "store"
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.size, store, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        self._answers(START)

    def _answers(self, seconds):
        answers, end = {}, monotonic() + seconds
        while len(answers) < self.size and monotonic() < end:
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers}
            for pipe in wait(waiting, timeout=max(0.0, end - monotonic())):
                try:
                    answers[waiting[pipe]] = pipe.recv()
                except (EOFError, ConnectionResetError):
                    answers[waiting[pipe]] = "the process ended", None
        errors = [answers.get(rank, ("no answer in time", None))[0] for rank in range(self.size)]
        if any(errors):
            self.stop()
            raise AssertionError("\n".join(f"rank {rank}:\n{error}" for rank, error in enumerate(errors) if error))
        return [answers[rank][1] for rank in range(self.size)]


def _serve(rank, size, store, pipe):
    torch.set_num_threads(1)
    warnings.simplefilter("error", consequent.ConsequentWarning)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    timeout = timedelta(seconds=COLLECTIVE)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)
    pipe.send((None, None))
    while True:
        try:
            function, args, options = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((None, function(*args, **options)))
        except BaseException:
            pipe.send((traceback.format_exc(), None))
