"""Two ranks on this machine, started as `torchrun` starts them; but nobody ends one of them because the other was lost.

They must get out of it by themselves: on machines without a common supervisor there is nobody else to do it.
"""

import os
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not said to be

SIZE = 2


class TwoRanks:
    """Calls a function on two ranks, each a process that ends with what it returns, as an exit status.

    Whoever leaves the context leaves no process behind, whatever they were doing.

    Args:
        folder: for what they print.
        function: is called on each of them.
        arguments: of the function.
    """

    def __init__(self, folder: Path, function: Callable[..., int], *arguments: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._logs = [folder / f"rank{rank}.txt" for rank in range(SIZE)]
        # Where they meet. As under torchrun it is not in a rank, so that any of them can be lost.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = get_context("forkserver")  # starts quickly
        context.set_forkserver_preload(["consequent_lab.trainer", "sklearn.datasets"])
        self.processes = [
            context.Process(target=_serve, args=(rank, self._store.port, log, function, arguments))
            for rank, log in enumerate(self._logs)
        ]

    def __enter__(self) -> "TwoRanks":
        for process in self.processes:
            process.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    @property
    def are_alive(self) -> bool:
        """Whether both are."""
        return all(process.is_alive() for process in self.processes)

    def ended(self, seconds: float) -> list[int | None]:
        """Waits for them; returns their exit statuses, None for one that goes on after so many seconds."""
        until = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, until - time.monotonic()))
        return [process.exitcode for process in self.processes]

    def last_words(self, rank: int) -> str:
        """Returns the last line that a rank has printed: the error, if it ended with one."""
        log = self._logs[rank]
        lines = log.read_text(errors="replace").split("\n") if log.exists() else []
        return next((line for line in reversed(lines) if line.strip()), "")


def _serve(rank: int, port: int, log: Path, function: Callable[..., int], arguments: tuple[Any, ...]) -> None:
    with log.open("w") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(SIZE)}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ.update(place | meeting)
    torch.set_num_threads(1)
    sys.exit(function(*arguments))
