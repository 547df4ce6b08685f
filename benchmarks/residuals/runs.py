"""Runs on the processor's clock, kept as lines of JSON; a command that was stopped goes on from them."""

import json
import math
import pathlib
import time
import warnings
from typing import Any

import torch

from benchmarks.residuals.contestants import CONTESTANTS, Compiled, Settings
from benchmarks.residuals.problems import problem_of

TRIAL = 1000  # the seed of trials
MARKS = 8  # errors are measured when the time is over, and after half, a quarter, … of it

Line = dict[str, Any]


def one_run(
    name: str, contestant: str, settings: Settings, seed: int, seconds: float, compiled: Compiled, device: str
) -> Line:
    """Train until the time is over; measuring the error is not on the clock."""
    torch.set_num_threads(1)
    problem = problem_of(name, seed, device)
    advance = CONTESTANTS[contestant][0](problem, settings, compiled)
    marks, curve = [seconds / 2**mark for mark in reversed(range(MARKS))], []
    clock, steps = 0.0, 0
    while marks:
        start = now(device)
        try:
            advance(clock / seconds)
        except (torch.linalg.LinAlgError, ValueError) as error:
            warnings.warn(f"{contestant} on {name}: {error}", stacklevel=1)
            break
        clock, steps = clock + now(device) - start, steps + 1
        if clock >= marks[0]:
            error = problem.error()
            curve.append([round(clock, 3), steps, float(f"{error:.4g}") if math.isfinite(error) else None])
            marks = [mark for mark in marks if mark > clock]
    return {
        "problem": name,
        "contestant": contestant,
        "settings": settings,
        "seed": seed,
        "seconds": seconds,
        "curve": curve,
        "error": curve[-1][2] if curve and not marks else None,
    }


def now(device: str) -> float:
    """The processor's clock; the wall clock with a GPU, when it is done."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def run(name: str, contestants: list[str], seconds: float, seeds: int, path: pathlib.Path, device: str = "cpu") -> None:
    """All that is missing of a problem: trials, then finals with the best settings, in turns."""
    compiled, terms, chosen = Compiled(), problem_of(name, 0).terms, {}
    for contestant in contestants:
        if contestant == "C-Adam" and "" not in terms:
            continue
        choices = CONTESTANTS[contestant][1]
        if len(choices) > 1:
            for settings in choices:
                add(path, name, contestant, settings, TRIAL, seconds, compiled, device)
            tried = [line for line in of(read(path), name, contestant) if line["seed"] == TRIAL]
            choices = [min(tried, key=lambda line: math.inf if line["error"] is None else line["error"])["settings"]]
        chosen[contestant] = choices[0]
    for seed in range(seeds):
        for contestant, settings in chosen.items():  # so that a machine that is slow for a while is slow for all
            add(path, name, contestant, settings, seed, seconds, compiled, device)


def add(
    path: pathlib.Path,
    name: str,
    contestant: str,
    settings: Settings,
    seed: int,
    seconds: float,
    compiled: Compiled,
    device: str,
) -> None:
    known = [(line["settings"], line["seed"]) for line in of(read(path), name, contestant)]
    if (settings, seed) in known:
        return
    line = one_run(name, contestant, settings, seed, seconds, compiled, device)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(f"{name:12} {contestant:26} {settings} seed {seed}: {line['error']} after {line['curve'][-1:]}", flush=True)


def read(path: pathlib.Path) -> list[Line]:
    return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []


def of(lines: list[Line], name: str, contestant: str) -> list[Line]:
    return [line for line in lines if line["problem"] == name and line["contestant"] == contestant]
