"""Plays the matches of the table of targets, and times first steps: rows, as what JSON can hold."""

import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch

from consequent_lab.targets import FIRST_STEP, PLAIN, WAYS, Match, works
from consequent_lab.timing import Plan, Quartiles, Timings, made, measure, peak_memory, release_memory, synchronize
from consequent_lab.workloads import COMPILED, training_step

Row = dict[str, Any]
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")


def play(match: Match, device: str, plan: Plan) -> list[Row]:
    """Measures a match, and returns a row for each way; a step that fails is left out, with its error."""
    ways = (PLAIN, *match.wanted)
    makers = {way: partial(training_step, match.work_of(way), WAYS[way], device, match.mode) for way in ways}
    what = {"name": match.name, "task": match.work.title, "mode": match.mode, "unit": "ms", **match.point}
    errors: dict[str, str] = {}
    if match.mode == "peak memory":
        peaks = made({way: partial(peak_memory, make, later=2 * match.period) for way, make in makers.items()}, errors)
        rows = []
        for mode, which in (("peak memory", "later"), ("peak memory, first steps", "first_steps")):
            sizes = Timings({way: [getattr(peak, which)] for way, peak in peaks.items()}, errors)
            what |= {"mode": mode, "unit": "MiB"}
            rows += [compared(what, way, most, sizes) for way, most in match.wanted.items()]
        return rows
    steps = made(makers, errors)
    # What looks at inputs is compiled at the first step, what does not at the second, and perhaps both once more.
    warm_up = max(plan.warm_up, match.period + 2) if match.mode in COMPILED else plan.warm_up
    timings = measure(steps, device, replace(plan, warm_up=warm_up, period=match.period))
    timings.errors |= errors
    for way in list(timings.milliseconds):
        if not steps[way]().isfinite():
            timings.errors[way] = "the loss is not finite: what was timed is no training"
            del timings.milliseconds[way]
    steps.clear()
    if match.mode in COMPILED:
        torch.compiler.reset()
    release_memory()
    samples = {"rounds": max(map(len, timings.milliseconds.values()), default=0), "steps": timings.steps_per_sample}
    return [compared(what, way, most, timings) | samples for way, most in match.wanted.items()]


def compared(what: Row, way: str, wanted: float | None, found: Timings) -> Row:
    """Returns what a way costs: a quotient by the plain step, of seconds the difference; or why that is not known."""
    known, costs = found.milliseconds, found.difference if what["unit"] == "s" else found.ratio
    missing = [name for name in (PLAIN, way) if name not in known]
    return {
        **what,
        "way": way,
        "wanted": wanted,
        "cost": None if missing else asdict(costs(way, PLAIN)),
        "plain": asdict(Quartiles.of(known[PLAIN])) if PLAIN in known else None,
        "ours": asdict(Quartiles.of(known[way])) if way in known else None,
        "error": "; ".join(f"{name}: {found.errors.get(name, 'not measured')}" for name in missing) or None,
    }


def first_steps(device: str, *, quick: bool) -> list[Row]:
    """Times the first steps of processes that find the compilers' caches empty, and then of others that find them."""
    found, ways = {cache: Timings() for cache in FIRST_STEP}, ("own inputs", "averages 10")
    for way in (PLAIN, *ways):
        with TemporaryDirectory() as folder:
            for seconds in found.values():
                one = partial(_in_a_process, way, device, quick, folder)
                seconds.milliseconds |= made({way: one}, seconds.errors)
    what = {"name": "first-step", "task": works(quick=quick)["mlp-32"].title, "unit": "s"}
    return [
        compared(what | {"mode": f"first step, {cache} cache"}, way, FIRST_STEP[cache], seconds)
        for cache, seconds in found.items()
        for way in ways
    ]


def _in_a_process(way: str, device: str, quick: bool, folder: str) -> list[float]:
    code = f"from consequent_lab import speed; print(speed.first_step({way!r}, {device!r}, {quick}))"
    environment = os.environ | dict.fromkeys(CACHES, folder)
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    if run.returncode:
        raise RuntimeError((run.stderr.strip().splitlines() or ["no message"])[-1])
    return [float(run.stdout.split()[-1])]


def first_step(way: str, device: str, quick: bool) -> float:
    """Returns the seconds of making a training step and taking it once, on a device that has been started."""
    torch.zeros(1, device=device)
    synchronize(device)
    start = time.perf_counter()
    training_step(works(quick=quick)["mlp-32"], WAYS[way], device)()
    synchronize(device)
    return time.perf_counter() - start
