"""What the library's own Python costs on the host, in microseconds a layer: the floor of training in eager mode.

`python benchmarks/host_overhead.py`

Layers so small that their arithmetic is next to nothing, on one thread. The forward pass, the backward pass and the
step are timed each by itself, in turns of plain SGD, `at="step"` and `at="backward"`: the thread's own time, which
others that share the machine disturb less; medians over the repeats.
"solving" is the part of each that computes new gradients, or second moments for them; the rest is bookkeeping.
"""

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import consequent
from consequent.correction import backward_passes
from consequent.engines.step import ENGINES
from consequent.statistics.rows import Rows

PHASES = ("forward", "backward", "step")
ENTRANTS: dict[str, str | None] = {"plain": None, "step": "step", "backward": "backward"}


def dense(layers: int) -> tuple[nn.Module, Tensor]:
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers))), torch.randn(4, 8)


def convolutional(layers: int) -> tuple[nn.Module, Tensor]:
    return nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1) for _ in range(layers))), torch.randn(4, 4, 4, 4)


MODELS: dict[str, tuple[Callable[[int], tuple[nn.Module, Tensor]], int]] = {
    "30 x Linear(8, 8), batch 4": (dense, 30),
    "20 x Conv2d(4, 4, 3) on 4 x 4, batch 4": (convolutional, 20),
}


class Clock:
    """Adds up the time inside of some functions."""

    def __init__(self) -> None:
        self.total = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its time added."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.total += time.thread_time() - start

        return timed

    def read(self) -> float:
        """The seconds since it was last read."""
        total, self.total = self.total, 0.0
        return total


@contextlib.contextmanager
def timed_solves(clock: Clock) -> Iterator[None]:
    """Let the clock run wherever new gradients, or moments for them, are computed."""
    with contextlib.ExitStack() as stack:
        targets: list[tuple[Any, str]] = [(backward_passes, "corrected_in_backward"), (Rows, "moment")]
        targets += [(engine, name) for engine in ENGINES for name in ("solve", "write")]
        for owner, name in targets:
            stack.enter_context(mock.patch.object(owner, name, clock.around(getattr(owner, name))))
        yield


class Entrant:
    """One way to train, and its times: phase → seconds of each repeat, solving apart."""

    def __init__(self, make: Callable[[int], tuple[nn.Module, Tensor]], layers: int, at: str | None) -> None:
        torch.manual_seed(0)
        self.model, self.inputs = make(layers)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        self.correction = None if at is None else consequent.attach(self.optimizer, self.model, at=at)
        self.times: dict[str, list[float]] = {phase: [] for phase in PHASES}
        self.solves: dict[str, list[float]] = {phase: [] for phase in PHASES}

    def step(self, clock: Clock) -> None:
        """One step of training."""
        self.optimizer.zero_grad()
        clock.read()
        start = time.thread_time()
        outputs = self.model(self.inputs)
        self._note("forward", start, clock)
        loss = outputs.square().mean()
        start = time.thread_time()
        loss.backward()
        self._note("backward", start, clock)
        start = time.thread_time()
        self.optimizer.step()
        self._note("step", start, clock)

    def _note(self, phase: str, start: float, clock: Clock) -> None:
        self.times[phase].append(time.thread_time() - start)
        self.solves[phase].append(clock.read())


def measure(make: Callable[[int], tuple[nn.Module, Tensor]], layers: int, repeats: int) -> dict[str, Entrant]:
    entrants = {name: Entrant(make, layers, at) for name, at in ENTRANTS.items()}
    clock = Clock()
    with timed_solves(clock):
        for repeat in range(repeats + 20):
            for entrant in entrants.values():
                if repeat == 20:  # all has been seen for the first time
                    entrant.times = {phase: [] for phase in PHASES}
                    entrant.solves = {phase: [] for phase in PHASES}
                entrant.step(clock)
    return entrants


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=400)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name, (make, layers) in MODELS.items():
        entrants = measure(make, layers, arguments.repeats)
        print(f"\n{name}: microseconds a layer; in brackets on top of plain, solving not counted")
        plain = {phase: statistics.median(entrants["plain"].times[phase]) for phase in PHASES}
        for entrant, result in entrants.items():
            words = []
            for phase in PHASES:
                whole = statistics.median(result.times[phase])
                solving = statistics.median(result.solves[phase])
                extra = f" (+{(whole - solving - plain[phase]) / layers * 1e6:5.1f})" if entrant != "plain" else " " * 9
                solved = f" solving {solving / layers * 1e6:5.1f}" if solving else " " * 14
                words.append(f"{phase} {whole / layers * 1e6:6.1f}{extra}{solved}")
            print(f"  {entrant:9}" + "   ".join(words))


if __name__ == "__main__":
    main()
