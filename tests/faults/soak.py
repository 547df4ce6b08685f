"""Many steps of a small network with faults at random, beside runs that are left in peace."""

import contextlib
import gc
import random
import warnings
from collections import Counter
from dataclasses import asdict, dataclass
from statistics import fmean

import psutil
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import consequent

FAULT_RATE = 1 / 200
LAST = 0.05  # of the steps, over which the final loss is averaged
FAULTS = ("NaN", "inf", "edited gradient", "exception in the forward pass", "step without zero_grad", "save and load")


@dataclass(frozen=True)
class Soak:
    """What became of a long run."""

    steps: int
    faults: dict[str, int]
    counters: dict[str, int]
    expected_counters: dict[str, int]
    final_loss: float
    losses_in_peace: list[float]
    memory_early: float  # MiB, after a tenth of the steps
    memory_late: float  # at the end

    @property
    def counters_are_right(self) -> bool:
        """Whether every fault was counted as what it is."""
        return self.counters == self.expected_counters

    @property
    def memory_is_flat(self) -> bool:
        """Whether it grew by less than 5 %."""
        return self.memory_late < 1.05 * self.memory_early

    @property
    def loss_is_undisturbed(self) -> bool:
        """Whether the final loss is within the spread of the seeds left in peace, widened by its own width each way."""
        low, high = min(self.losses_in_peace), max(self.losses_in_peace)
        return low - (high - low) <= self.final_loss <= high + (high - low)

    @property
    def is_as_expected(self) -> bool:
        """Whether all of this holds."""
        return self.counters_are_right and self.memory_is_flat and self.loss_is_undisturbed


def soak(steps: int, seeds: int = 3) -> Soak:
    """Trains with faults, and as many runs without as there are seeds.

    Args:
        steps: of each run.
        seeds: of the runs left in peace.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", consequent.ConsequentWarning)
        peace = [_Run(seed, steps).train(disturbed=False).loss for seed in range(1, seeds + 1)]
        run = _Run(0, steps).train(disturbed=True)
    counted = asdict(run.correction.counters)
    return Soak(
        steps,
        dict(run.faults),
        counted,
        run.expected(counted),
        run.loss,
        peace,
        run.memory[0],
        run.memory[1],
    )


class _Run:
    """Classes that are clusters with noise in their labels: the loss settles at a level of its own."""

    def __init__(self, seed: int, steps: int) -> None:
        torch.manual_seed(seed)
        self.steps = steps
        self.model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.5)
        self.correction = consequent.attach(self.optimizer, self.model, damping=0.1)
        self.centres = torch.randn(4, 12, generator=torch.Generator().manual_seed(0))
        self.generator = torch.Generator().manual_seed(1000 + seed)
        self.moments = random.Random(seed)
        self.faults: Counter[str] = Counter()
        self.losses: list[float] = []
        self.memory = [0.0, 0.0]

    @property
    def loss(self) -> float:
        """The mean loss over the last steps."""
        return fmean(self.losses[-max(1, int(LAST * self.steps)) :])

    def train(self, *, disturbed: bool) -> "_Run":
        for step in range(self.steps):
            fault = self.moments.choice(FAULTS) if disturbed and self.moments.random() < FAULT_RATE else ""
            self._step(fault)
            if step == self.steps // 10:
                self.memory[0] = _memory()
        self.memory[1] = _memory()
        return self

    def _step(self, fault: str) -> None:
        if fault:
            self.faults[fault] += 1
        labels = torch.randint(0, 4, (8,), generator=self.generator)
        inputs = self.centres[labels] + torch.randn(8, 12, generator=self.generator)
        noisy = torch.where(torch.rand(8, generator=self.generator) < 0.2, labels.roll(1), labels)
        if fault in ("NaN", "inf"):
            inputs[0, 0] = float(fault)
        if fault == "save and load":
            self.correction.load_state_dict(self.correction.state_dict())
            self.optimizer.load_state_dict(self.optimizer.state_dict())
        if fault != "step without zero_grad":
            self.optimizer.zero_grad()
        if fault == "exception in the forward pass":
            try:
                self.model[:3](inputs).backward()  # a gradient needs a scalar
            except RuntimeError:
                return
        loss = cross_entropy(self.model(inputs), noisy)
        loss.backward()
        if fault == "edited gradient":
            weight = self.model[2].weight
            assert isinstance(weight.grad, Tensor)
            weight.grad[:4] = 0
        if fault == "step without zero_grad":
            with contextlib.suppress(RuntimeError):  # it is refused
                self.optimizer.step()
            return
        self.optimizer.step()
        if not fault:
            self.losses.append(loss.item())

    def expected(self, counted: dict[str, int]) -> dict[str, int]:
        """Returns what the counters should say."""
        steps = self.steps - self.faults["exception in the forward pass"] - self.faults["step without zero_grad"]
        return dict.fromkeys(counted, 0) | {
            "steps": steps,
            "skipped": self.faults["NaN"] + self.faults["inf"],
            "edited": self.faults["edited gradient"],
        }


def _memory() -> float:
    gc.collect()
    return psutil.Process().memory_info().rss / 2**20
