"""What goes wrong on one of two ranks alone: a number that is not finite, another idea of what is attached."""

import json
import math
import random
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import consequent
from faults.numbers import Loop
from faults.trial import Trial, require
from faults.two_ranks import SIZE, TwoRanks

LIMIT = 120  # seconds that all attempts together may take
PATIENCE = 20  # seconds that a rank waits for the other
# What one rank is attached with, and what the error says of it.
DISAGREEMENTS = (
    ({"damping": 0.2}, "damping=0.2"),
    ({"exclude": "3"}, "not corrected"),
    ({"loss_reduction": "sum"}, "'sum'"),
)


class SharedLoop(Loop):
    """A rank's part of the loop: half of the samples, gradients averaged."""

    def __init__(self, seed: int, **options: object) -> None:
        super().__init__(seed, **options)
        self.called = DistributedDataParallel(self.model)
        self.inputs, self.targets = (whole.chunk(SIZE)[dist.get_rank()] for whole in (self.inputs, self.targets))


def one_rank(folder: Path, count: int, seed: int = 0) -> list[Trial]:
    """Tries each of the faults so many times, on a rank at random.

    Args:
        folder: for what the ranks find.
        count: attempts for each.
        seed: of the ranks and moments.
    """
    with TwoRanks(folder, _attempts, folder, count, seed) as ranks:
        statuses = ranks.ended(LIMIT)
        words = [ranks.last_words(rank) for rank in range(SIZE)]
    trials = []
    for name, expected, _ in FAULTS:
        trial = Trial(name, expected)
        for number in range(count):
            with trial.attempt(f"attempt {number}"):
                require(statuses == [0] * SIZE, f"the ranks ended with {statuses}: {words}")
                for rank in range(SIZE):
                    problem = json.loads((folder / f"rank{rank}.json").read_text())[name][number]
                    require(not problem, f"rank {rank}: {problem}")
        trials.append(trial)
    return trials


def _attempts(folder: Path, count: int, seed: int) -> int:
    """Makes all attempts on this rank, and writes down what was not as it should be."""
    warnings.simplefilter("ignore", consequent.ConsequentWarning)
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE))
    moments = random.Random(seed)  # the same on all ranks
    problems: dict[str, list[str]] = {}
    for name, _, attempt in FAULTS:
        problems[name] = []
        for number in range(count):
            try:
                attempt(number, moments.randrange(SIZE), moments)
            except AssertionError as error:
                problems[name].append(str(error))
            else:
                problems[name].append("")
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(problems))
    dist.destroy_process_group()
    return 0


def _not_finite(number: int, odd: int, moments: random.Random) -> None:
    """A NaN in one rank's batch, or in its gradient after ranks have averaged it: then nobody else can know."""
    loop = SharedLoop(seed=number)
    first = loop.step()
    before = loop.state()
    inputs, is_in_batch = loop.inputs.clone(), number % 2 == 0
    place = moments.randrange(inputs.numel())
    if dist.get_rank() == odd and is_in_batch:
        inputs.view(-1)[place] = math.nan
    loop.backward(inputs)
    if dist.get_rank() == odd and not is_in_batch:
        gradient = next(loop.model.parameters()).grad
        assert gradient is not None
        gradient.view(-1)[place % gradient.numel()] = math.nan
    loop.optimizer.step()
    require(all(map(torch.equal, before, loop.state())), "weights or momenta changed")
    require(loop.optimizer.correction.counters.skipped == 1, "it was not counted")
    losses = [float(loop.step()) for _ in range(30)]
    require(losses[-1] < first and all(map(math.isfinite, losses)), "it learns no more")


def _disagreement(number: int, odd: int, moments: random.Random) -> None:
    """A rank is attached with other settings, or to other layers."""
    options, words = DISAGREEMENTS[number % len(DISAGREEMENTS)]
    loop = SharedLoop(seed=number, **(options if dist.get_rank() == odd else {}))
    before = loop.state()
    message = ""
    try:
        loop.step()
    except RuntimeError as error:
        message = str(error)
    require("the ranks disagree" in message, f"no error that says so: {message!r}")
    require(f"{words} on rank {odd}" in message, f"the difference is not named: {message}")
    require(all(map(torch.equal, before, loop.state())), "weights changed")


FAULTS: list[tuple[str, str, Callable[[int, int, random.Random], None]]] = [
    (
        "NaN on one of two ranks",
        "no weight and no momentum changes on either of them, the step is counted as skipped",
        _not_finite,
    ),
    (
        "two ranks that disagree on what is attached",
        "an error on both of them that names the difference, no weight changes",
        _disagreement,
    ),
]
