"""How long the first step of a new process takes on a GPU, in which kernels are compiled, or found in Triton's cache.

PYTHONPATH=src python -m benchmarks.first_step    # first-steps.json
PYTHONPATH=src python -m benchmarks.first_step --table results/bench-h200.json    # the table of docs/speed.md

A process of its own for every step: python -m benchmarks.first_step --step mlp cuda full.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from consequent_lab.bench import new_record
from consequent_lab.bench_tables import machine
from consequent_lab.numbers import three_digits
from consequent_lab.records import write_json
from consequent_lab.rounding import tf32
from consequent_lab.targets import matches
from consequent_lab.timing import synchronize
from consequent_lab.workloads import Entrant, Task, TrainingStep

TARGETS = {"cold": 10.0, "warm": 2.0}  # seconds, with nothing in Triton's cache and with all of it
MATCHES = ("mlp", "resnet20")
LONGEST = 300  # seconds that a process may take
ROOT = Path(__file__).parents[1]


def work_of(match: str, sizes: str) -> tuple[Task, Entrant]:
    """Returns whose first step is taken: the entrant of a match that is corrected at the step."""
    (found,) = (one for one in matches("cuda", quick=sizes == "quick") if one.name == match)
    return found.task, next(entrant for entrant in found.entrants if entrant.way == "step")


def first_steps(match: str, device: str, sizes: str) -> list[dict[str, Any]]:
    """Takes the first step in two new processes, the first with an empty cache, the second with what that one left."""
    task, entrant = work_of(match, sizes)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for cache, target in TARGETS.items():
            seconds, error = _in_new_process((match, device, sizes), folder)
            found.append(
                {"name": f"first-step-{match}", "task": task.title, "ours": entrant.name, "cache": cache}
                | {"seconds": seconds, "target": target, "met": None if seconds is None else seconds <= target}
                | {"error": error}
            )
    return found


def _in_new_process(arguments: tuple[str, ...], cache: str) -> tuple[float | None, str | None]:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    environment = os.environ | {"TRITON_CACHE_DIR": cache, "PYTHONPATH": paths}
    command = [sys.executable, "-m", "benchmarks.first_step", "--step", *arguments]
    try:
        run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LONGEST, check=False)
    except subprocess.TimeoutExpired:
        return None, f"took longer than {LONGEST} s"
    if run.returncode != 0:
        return None, (run.stderr.strip().splitlines() or [f"ended with {run.returncode}"])[-1]
    return float(run.stdout.split()[-1]), None


def take_step(match: str, device: str, sizes: str) -> float:
    """Takes one step, when model and data are on the device, and returns how long that took."""
    with tf32(allowed=True):
        step = TrainingStep(*work_of(match, sizes), device)
        synchronize(device)
        start = time.perf_counter()
        step()
        synchronize(device)
        return time.perf_counter() - start


def table(record: dict[str, Any]) -> list[str]:
    """Returns the lines of the table of first steps."""
    head = ["| first step of a new process | Triton's cache | seconds | wanted |", "|---|---|---|---|"]
    return head + [
        f"| {step['task']}, {machine(record)} | {step['cache']} | "
        f"{'failed' if step['seconds'] is None else three_digits(step['seconds'])} | {step['target']:g} |"
        for step in record["first_steps"]
    ]


def main() -> None:
    """Measures, or shows what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("first-steps.json"))
    parser.add_argument("--table", type=Path, help="print the table of this file and measure nothing")
    parser.add_argument("--step", nargs=3, metavar=("MATCH", "DEVICE", "SIZES"), help="take one step in this process")
    arguments = parser.parse_args()
    if arguments.step:
        print(take_step(*arguments.step))
        return
    if arguments.table:
        record = json.loads(arguments.table.read_text(encoding="utf-8"))
    else:
        record = new_record("first-step", "cuda", quick=False)
        record["first_steps"] = [step for match in MATCHES for step in first_steps(match, "cuda", "full")]
        write_json(arguments.output, record)
    print("\n".join(table(record)))


if __name__ == "__main__":
    main()
