"""How long the first step of a new process takes, in which kernels are compiled, or found in Triton's cache.

A process of its own for every step: `python -m consequent_lab.first_step first-step-mlp cuda full`.
"""

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

from consequent_lab.targets import FIRST_STEP, FULL, QUICK, first_steps
from consequent_lab.timing import synchronize
from consequent_lab.workloads import TrainingStep

SIZES = {"full": FULL, "quick": QUICK}
LONGEST = 300  # seconds that a process may take


@dataclass(frozen=True)
class FirstStep:
    """Seconds, or why there are none."""

    name: str
    task: str
    ours: str
    cache: str  # Triton's: "cold", with nothing in it, or "warm"
    seconds: float | None
    error: str | None = None

    @property
    def target(self) -> float:
        """What is wanted."""
        return FIRST_STEP[self.cache]

    @property
    def met(self) -> bool | None:
        """Whether it is so; None without a measurement."""
        return None if self.seconds is None else self.seconds <= self.target

    def record(self, *, judge: bool) -> dict[str, Any]:
        """Returns the measurement for a JSON file; `met` is null unless it is to be judged."""
        return {
            "name": self.name,
            "task": self.task,
            "ours": self.ours,
            "cache": self.cache,
            "seconds": self.seconds,
            "target": self.target,
            "met": self.met if judge else None,
            "error": self.error,
        }


def time_first_steps(name: str, device: str, *, quick: bool) -> list[FirstStep]:
    """Takes the first step in two new processes, the first with an empty cache, the second with what that one left."""
    sizes = "quick" if quick else "full"
    task, entrant = first_steps(SIZES[sizes])[name]
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for cache in FIRST_STEP:
            seconds, error = _in_new_process((name, device, sizes), folder)
            found.append(FirstStep(name, task.title, entrant.name, cache, seconds, error))
    return found


def _in_new_process(arguments: tuple[str, ...], cache: str) -> tuple[float | None, str | None]:
    environment = os.environ | {"TRITON_CACHE_DIR": cache}
    command = [sys.executable, "-m", "consequent_lab.first_step", *arguments]
    try:
        run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LONGEST, check=False)
    except subprocess.TimeoutExpired:
        return None, f"took longer than {LONGEST} s"
    if run.returncode != 0:
        return None, (run.stderr.strip().splitlines() or [f"ended with {run.returncode}"])[-1]
    return float(run.stdout.split()[-1]), None


def main(name: str, device: str, sizes: str) -> None:
    """Takes one step, when model and data are on the device, and prints how long that took."""
    from consequent_lab.rounding import tf32

    with tf32(allowed=True):
        step = TrainingStep(*first_steps(SIZES[sizes])[name], device)
        synchronize(device)
        start = time.perf_counter()
        step()
        synchronize(device)
    print(time.perf_counter() - start)


if __name__ == "__main__":
    main(*sys.argv[1:])
