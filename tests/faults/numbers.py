"""Numbers that are not finite, factorisations that fail, memory that runs out: in the middle of a training loop."""

import copy
import math
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import consequent
from consequent.reports.errors import LinAlgError
from faults.trial import Trial, require


class Loop:
    """A small network, trained on both sides of the formula: a convolution and dense layers."""

    def __init__(self, seed: int, **options: Any) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = nn.Sequential(
                nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(144, 40), nn.ReLU(), nn.Linear(40, 3)
            )
        self.called: nn.Module = self.model  # or a wrapper of it
        self.optimizer = consequent.CSGD(self.model, lr=0.02, momentum=0.5, **{"damping": 0.1, **options})
        self.inputs = torch.randn(8, 1, 6, 6, generator=generator)
        self.targets = torch.randn(8, 3, generator=generator)

    def backward(self, inputs: Tensor | None = None) -> Tensor:
        """Returns the loss, its gradients in place."""
        self.optimizer.zero_grad()
        loss = mse_loss(self.called(self.inputs if inputs is None else inputs), self.targets)
        loss.backward()
        return loss.detach()

    def step(self, inputs: Tensor | None = None) -> Tensor:
        """Takes a step; returns the loss before it."""
        loss = self.backward(inputs)
        self.optimizer.step()
        return loss

    def state(self) -> list[Tensor]:
        """Returns a copy of all weights and momenta."""
        tensors = [parameter.detach().clone() for parameter in self.model.parameters()]
        for state in self.optimizer.state.values():
            tensors += [value.clone() for value in state.values() if isinstance(value, Tensor)]
        return tensors


def numbers(count: int, seed: int = 0) -> list[Trial]:
    """Tries each of the faults so many times, at a random step.

    Args:
        count: attempts for each.
        seed: of the moments.
    """
    moments = random.Random(seed)
    trials = []
    for name, expected, attempt in FAULTS:
        trial = Trial(name, expected)
        for number in range(count):
            with trial.attempt(f"attempt {number}"), warnings.catch_warnings():
                warnings.simplefilter("ignore", consequent.ConsequentWarning)
                loop = Loop(seed=number)
                first = loop.step()
                for _ in range(moments.randrange(4)):
                    loop.step()
                attempt(loop, moments)
                losses = [float(loop.step()) for _ in range(30)]
                require(losses[-1] < first and all(map(math.isfinite, losses)), "it learns no more")
        trials.append(trial)
    return trials


def _bad_batch(value: float) -> Callable[[Loop, random.Random], None]:
    def attempt(loop: Loop, moments: random.Random) -> None:
        before, counted = loop.state(), loop.optimizer.correction.counters.skipped
        inputs = loop.inputs.clone()
        inputs.view(-1)[moments.randrange(inputs.numel())] = value
        loop.step(inputs)
        require(_same(before, loop.state()), "weights or momenta changed")
        require(loop.optimizer.correction.counters.skipped == counted + 1, "it was not counted")

    return attempt


def _failing_factorisation(loop: Loop, moments: random.Random) -> None:
    """Every Cholesky factorisation of one step fails, in every precision."""
    before, counters = loop.state(), loop.optimizer.correction.counters
    real = torch.linalg.cholesky_ex

    def fail(matrix: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        factor, info = real(matrix, *args, **options)
        return factor, torch.ones_like(info)

    def raise_error(*args: Any, **options: Any) -> None:
        raise LinAlgError("injected")

    with patch.object(torch.linalg, "cholesky_ex", fail), patch.object(torch.linalg, "eigh", raise_error):
        loop.step()
    now = loop.optimizer.correction.counters
    require(now.fallen_back > counters.fallen_back, "it was not counted")
    require(all(tensor.isfinite().all() for tensor in loop.state()), "a weight is not finite")
    require(not _same(before, loop.state()), "no step was taken")


def _out_of_memory(loop: Loop, moments: random.Random) -> None:
    """Memory runs out in the solve of one layer; the user catches the error and goes on."""
    before, place = loop.state(), [moments.randrange(2)]
    real = torch.linalg.cholesky_ex

    def fail(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        place[0] -= 1
        if place[0] < 0:
            raise torch.OutOfMemoryError("injected")
        result: tuple[Tensor, Tensor] = real(*args, **options)
        return result

    raised = False
    with patch.object(torch.linalg, "cholesky_ex", fail):
        try:
            loop.step()
        except torch.OutOfMemoryError:
            raised = True
    require(raised, "the error did not reach the user")
    require(_same(before, loop.state()), "weights or momenta changed")


def _overflowing_scale(loop: Loop, moments: random.Random) -> None:
    """A GradScaler's scale is far too large; it is halved until it no longer is, and then the step is the right one."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=10**6)
    before, skipped = loop.state(), 0
    twin = copy.deepcopy((loop.model, loop.optimizer))
    while True:
        loop.optimizer.zero_grad()
        loss = mse_loss(loop.model(loop.inputs), loop.targets)
        scaler.scale(loss * 16).backward()
        scale = scaler.get_scale()
        scaler.step(loop.optimizer)
        scaler.update()
        if scaler.get_scale() == scale:
            break
        skipped += 1
        require(_same(before, loop.state()), "weights or momenta changed in a skipped step")
    require(skipped > 0, "the scale never overflowed")
    model, optimizer = twin
    optimizer.zero_grad()
    (mse_loss(model(loop.inputs), loop.targets) * 16).backward()
    optimizer.step()
    for parameter, expected in zip(loop.model.parameters(), model.parameters(), strict=True):
        require(torch.allclose(parameter, expected, rtol=1e-3, atol=1e-6), "the scaled step is another one")


def _raising_forward(loop: Loop, moments: random.Random) -> None:
    """The model raises in the middle of a forward pass; the user catches the error and goes on."""
    before = loop.state()
    with _raising(loop.model[moments.choice((1, 2, 4))]):
        try:
            loop.step()
        except InterruptedError:
            pass
        else:
            raise AssertionError("nothing was raised")
    require(_same(before, loop.state()), "weights or momenta changed")


@contextmanager
def _raising(module: nn.Module) -> Iterator[None]:
    def hook(*_: Any) -> None:
        raise InterruptedError("injected")

    handle = module.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


FAULTS: list[tuple[str, str, Callable[[Loop, random.Random], None]]] = [
    ("NaN in a batch", "no weight and no momentum changes, the step is counted as skipped", _bad_batch(float("nan"))),
    ("inf in a batch", "no weight and no momentum changes, the step is counted as skipped", _bad_batch(float("inf"))),
    (
        "every factorisation of a step fails",
        "a plain gradient too short to overshoot is used instead, and counted",
        _failing_factorisation,
    ),
    ("out of memory in the solve", "the error reaches the user, no weight changes", _out_of_memory),
    (
        "a loss scale that overflows",
        "the scaler skips the step, no weight changes",
        _overflowing_scale,
    ),
    ("an exception in the forward pass", "no weight changes, the next step is an ordinary one", _raising_forward),
]


def _same(before: list[Tensor], after: list[Tensor]) -> bool:
    return len(before) == len(after) and all(map(torch.equal, before, after))
