"""How long steps take: contestants take turns, so that whatever else the machine does meets them all.

A sample is a few steps that are timed together, long enough for the clock and, on a GPU, without waiting for the device
in between, as in training. Ratios are taken round by round, then summed up: they are steadier than times.
"""

import gc
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch

Made = TypeVar("Made")

FEWEST_ROUNDS = 5
UNCOUNTED_ROUNDS = 2  # for clocks and caches to settle


@dataclass(frozen=True)
class Quartiles:
    """Five numbers that sum up a measurement.

    >>> Quartiles.of([5.0, 1.0, 2.0, 4.0, 3.0])
    Quartiles(low=1.0, lower_quartile=2.0, median=3.0, upper_quartile=4.0, high=5.0)
    """

    low: float
    lower_quartile: float
    median: float
    upper_quartile: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Quartiles":
        """Returns the summary of at least one value."""
        return cls(*np.percentile(list(values), (0, 25, 50, 75, 100)).tolist())


@dataclass(frozen=True)
class Plan:
    """How thoroughly to measure."""

    rounds: int  # samples of every contestant
    seconds: float  # no new round begins after that, once there are FEWEST_ROUNDS
    sample_seconds: float = 0.02  # the least that a sample takes
    warm_up: int = 4  # steps before anything is timed
    period: int = 1  # samples are of whole multiples of so many steps


@dataclass
class Timings:
    """Milliseconds per step: a list per contestant, all of the same length, and why others are missing."""

    milliseconds: dict[str, list[float]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    steps_per_sample: int = 0

    def ratio(self, ours: str, baseline: str) -> Quartiles:
        """Returns the quotient of the two in the same round, over all rounds."""
        return Quartiles.of(np.divide(self.milliseconds[ours], self.milliseconds[baseline]))

    def difference(self, ours: str, baseline: str) -> Quartiles:
        """Returns the difference of the two in the same round, over all rounds."""
        return Quartiles.of(np.subtract(self.milliseconds[ours], self.milliseconds[baseline]))


def measure(steps: Mapping[str, Callable[[], object]], device: str, plan: Plan) -> Timings:
    """Times the steps of all contestants in turns; one that raises drops out with its error, the others go on."""
    timings = Timings()
    live = dict(steps)

    def sample(name: str, count: int) -> float | None:
        try:
            return seconds_per_step(live[name], device, count)
        except Exception as error:
            timings.errors[name] = describe_error(error)
            del live[name]
            return None

    fastest = math.inf
    for name in steps:
        if plan.warm_up > 1 and sample(name, plan.warm_up - 1) is None:
            continue
        last = sample(name, 1)
        fastest = fastest if last is None else min(fastest, last)
    periods = max(1, math.ceil(plan.sample_seconds / fastest / plan.period)) if live else 0
    timings.steps_per_sample = count = periods * plan.period
    samples: dict[str, list[float]] = {name: [] for name in live}
    end = math.inf
    for turn in range(UNCOUNTED_ROUNDS + plan.rounds):
        if turn == UNCOUNTED_ROUNDS:
            end = time.perf_counter() + plan.seconds
        if turn >= UNCOUNTED_ROUNDS + FEWEST_ROUNDS and time.perf_counter() > end:
            break
        order = list(live)
        for name in order if turn % 2 else reversed(order):  # nobody always follows the same neighbour
            seconds = sample(name, count)
            if seconds is not None and turn >= UNCOUNTED_ROUNDS:
                samples[name].append(1e3 * seconds)
    timings.milliseconds = {name: samples[name] for name in live}
    return timings


def seconds_per_step(step: Callable[[], object], device: str, count: int) -> float:
    """Returns how long each of so many steps takes."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(count):
        step()
    synchronize(device)
    return (time.perf_counter() - start) / count


def synchronize(device: str) -> None:
    """Waits until the device has done all that it was given."""
    if device == "cuda":
        torch.cuda.synchronize()


@dataclass(frozen=True)
class PeakMemory:
    """Most mebibytes that PyTorch held at once: model, optimiser, batch, activations and workspaces."""

    first_steps: float  # when everything is made and looked at for the first time
    later: float


def peak_memory(make_step: Callable[[], Callable[[], object]], first: int = 2, later: int = 6) -> PeakMemory:
    """Returns what a contestant needs on the CUDA device, in so many steps, when it is there alone."""
    release_memory()
    already_there = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step = make_step()
    peaks = []
    for steps in (first, later):
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        peaks.append((torch.cuda.max_memory_allocated() - already_there) / 2**20)
        torch.cuda.reset_peak_memory_stats()
    del step
    release_memory()
    return PeakMemory(*peaks)


def release_memory() -> None:
    """Gives back what nobody holds any more, cuBLAS's workspaces among it: each contestant is to pay for its own."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        clear_workspaces = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
        if clear_workspaces is not None:
            clear_workspaces()
        torch.cuda.empty_cache()


def made(makers: Mapping[str, Callable[[], Made]], errors: dict[str, str]) -> dict[str, Made]:
    """Returns what is made under each name; one that raises is left out, and its error noted."""
    found = {}
    for name, make in makers.items():
        try:
            found[name] = make()
        except Exception as error:
            errors[name] = describe_error(error)
    return found


def describe_error(error: BaseException) -> str:
    r"""Returns the kind and the first line of an error.

    >>> describe_error(RuntimeError("out of memory\nsee the manual"))
    'RuntimeError: out of memory'
    """
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
