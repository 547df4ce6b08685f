"""Many samples: which part of them a step should take, and what Adam does in the same seconds."""

import math
import pathlib
from statistics import median

from benchmarks.residuals.contestants import Compiled
from benchmarks.residuals.problems import MANY_SAMPLES
from benchmarks.residuals.runs import TRIAL, add, of, read

SIZES = (64, 256, 1024, 4000)
TRIALS = [{"lr": rate, "batch": size} for rate in (1e-3, 3e-3, 1e-2, 3e-2) for size in (64, 256)]  # of Adam


def run(path: pathlib.Path, seconds: float = 20.0, seeds: int = 5) -> None:
    """WholeNetwork with each size; Adam with the best of its eight settings."""
    for settings in TRIALS:
        add(path, MANY_SAMPLES, "Adam", settings, TRIAL, seconds, Compiled(), "cpu")
    tried = [line for line in of(read(path), MANY_SAMPLES, "Adam") if line["seed"] == TRIAL]
    best = min(tried, key=lambda line: math.inf if line["error"] is None else line["error"])["settings"]
    for seed in range(seeds):
        add(path, MANY_SAMPLES, "Adam", best, seed, seconds, Compiled(), "cpu")
        for size in SIZES:
            add(path, MANY_SAMPLES, "WholeNetwork", {"batch": size}, seed, seconds, Compiled(), "cpu")


def table(path: pathlib.Path) -> str:
    """Medians of the errors at the end, lowest and highest, and of the steps that there was time for."""
    rows, finals = ["| | steps | error |", "|---|---:|---:|"], [line for line in read(path) if line["seed"] != TRIAL]
    for name, sizes in (("WholeNetwork", SIZES), ("Adam", (64, 256))):
        for size in sizes:
            its = [line for line in finals if line["contestant"] == name and line["settings"]["batch"] == size]
            if its:
                errors, steps = [line["error"] for line in its], int(median(line["curve"][-1][1] for line in its))
                who = f"`{name}`" if name == "WholeNetwork" else f"{name}, {its[0]['settings']['lr']:g}"
                spread = f"{median(errors):.1e} ({min(errors):.1e}–{max(errors):.1e})"
                rows.append(f"| {who}, batches of {size:,} | {steps:,} | {spread} |")
    return "\n".join(rows)
