"""A fair race: every contestant searches the same learning rates with the same budget, then runs with fresh seeds."""

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from consequent_lab.contestants import CONTESTANTS, Contestant
from consequent_lab.digits import load_digits
from consequent_lab.models import mlp
from consequent_lab.pool import Pool
from consequent_lab.training import Point, accuracy_on_test_set, train

DIVERGED = 1e3  # A loss beyond this does not come back within the budget; the search spends no more time on it.


@dataclass(frozen=True)
class Rules:
    """What is the same for every contestant."""

    learning_rates: tuple[float, ...]
    epochs: int
    target_loss: float
    damping: float | None  # λ in the paper, the same for all C- contestants and not searched; None: it is relative
    search_seeds: tuple[int, ...]
    seeds: tuple[int, ...]  # of the race itself; none is among the search seeds
    halve_after: tuple[int, ...] = (1, 3)  # epochs after which the search goes on with the better half
    hidden: tuple[int, ...] = (128,) * 8
    batch_size: int = 32
    evaluations_per_epoch: int = 3
    relative_damping: float | None = None  # λ as a fraction; None: it is absolute


@dataclass(frozen=True)
class Trial:
    """What became of a learning rate in the search."""

    learning_rate: float
    epochs: float  # trained before the search dropped or chose it
    epochs_to_target: float  # of the slowest search seed; infinite if one has not arrived
    loss: float  # of the worst search seed; infinite if it diverged


@dataclass(frozen=True)
class Run:
    """One full training run of the race."""

    seed: int
    curve: tuple[Point, ...]
    test_accuracy: float
    warnings: tuple[str, ...] = ()

    def to_target(self, target_loss: float) -> Point | None:
        """Returns the first evaluation at or below the target, or None."""
        return next((point for point in self.curve if point.loss <= target_loss), None)


@dataclass(frozen=True)
class Result:
    """All that one contestant did."""

    contestant: Contestant
    learning_rate: float
    trials: tuple[Trial, ...]
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class Progress:
    """Something happened that a display may want to show."""

    contestant: str
    epochs: float  # done since the last report, out of `work(rules)`
    text: str
    milestone: bool = False  # worth a line of its own where there is no live display


Report = Callable[[Progress], None]


def work(rules: Rules) -> int:
    """Returns the epochs of work per contestant; those of the search are counted once for all learning rates."""
    return (1 + len(rules.seeds)) * rules.epochs


def race(rules: Rules, workers: int, report: Report) -> list[Result]:
    """Runs the whole race, the search first, and returns the results in the order of `CONTESTANTS`.

    Args:
        rules: what is the same for everybody.
        workers: runs at a time, each in its own process with one thread; 1 stays in this process.
        report: called with every piece of progress.
    """
    # The costly ones go first, so that the workers finish together.
    order = sorted(CONTESTANTS, key=lambda contestant: not contestant.consequentialist)
    with Pool(workers, report) as pool:
        searches = {contestant: pool.submit(search, contestant, rules) for contestant in order}
        trials = {contestant: searches[contestant].result() for contestant in CONTESTANTS}
        rates = {contestant: best(tried).learning_rate for contestant, tried in trials.items()}
        runs = {
            (contestant, seed): pool.submit(run, contestant, rules, rates[contestant], seed)
            for seed in rules.seeds
            for contestant in order
        }
        return [
            Result(
                contestant,
                rates[contestant],
                trials[contestant],
                tuple(runs[contestant, seed].result() for seed in rules.seeds),
            )
            for contestant in CONTESTANTS
        ]


def search(report: Report, contestant: Contestant, rules: Rules) -> tuple[Trial, ...]:
    """Finds the learning rate that is first at the target loss, by successive halving.

    All rates of the grid start together. After the epochs in `rules.halve_after` the better half goes on, until one
    has reached the target on every search seed or the budget is spent.
    """
    candidates = [_Candidate(contestant, rules, rate) for rate in rules.learning_rates]
    live = candidates
    epoch = 0.0
    while live and epoch < rules.epochs and not any(candidate.arrived for candidate in live):
        for candidate in live:
            candidate.advance()
        before, epoch = epoch, live[0].epochs
        live = [candidate for candidate in live if candidate.loss < math.inf]
        if epoch in rules.halve_after:
            live = sorted(live, key=lambda candidate: candidate.loss)[: math.ceil(len(live) / 2)]
        rates = ", ".join(f"{candidate.rate:g}" for candidate in live)
        report(Progress(contestant.name, epoch - before, f"searching learning rates: {rates}"))
    trials = tuple(candidate.trial() for candidate in candidates)
    text = f"learning rate {best(trials).learning_rate:g} found among {len(trials)}"
    report(Progress(contestant.name, rules.epochs - epoch, text, milestone=True))
    return trials


def best(trials: tuple[Trial, ...]) -> Trial:
    """Returns the trial that reached the target first; if none did, the one that lasted longest, at the lowest loss."""
    return min(
        trials,
        key=lambda trial: (trial.epochs_to_target, not math.isfinite(trial.loss), -trial.epochs, trial.loss),
    )


class _Candidate:
    """A learning rate in the search, trained on all search seeds in step."""

    def __init__(self, contestant: Contestant, rules: Rules, rate: float) -> None:
        self.rate = rate
        self.epochs = 0.0
        self.loss = math.nan
        self._target_loss = rules.target_loss
        self._trainings = [_training(contestant, rules, rate, seed)[1] for seed in rules.search_seeds]
        self._arrivals = [math.inf for _ in rules.search_seeds]
        self.advance()  # to the evaluation before the first step

    @property
    def arrived(self) -> bool:
        """Whether all search seeds have reached the target."""
        return max(self._arrivals) < math.inf

    def advance(self) -> None:
        """Trains to the next evaluation."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Rates far too large are part of a search, and so is what they cause.
            points = [next(training) for training in self._trainings]
        self.epochs = points[0].epoch
        self._arrivals = [
            min(arrival, point.epoch) if point.loss <= self._target_loss else arrival
            for arrival, point in zip(self._arrivals, points, strict=True)
        ]
        self.loss = max(point.loss if point.loss < DIVERGED else math.inf for point in points)

    def trial(self) -> Trial:
        """Returns what became of it."""
        return Trial(self.rate, self.epochs, max(self._arrivals), self.loss)


def run(report: Report, contestant: Contestant, rules: Rules, rate: float, seed: int) -> Run:
    """Trains for the whole budget and returns the curve."""
    model, points = _training(contestant, rules, rate, seed)
    curve = []
    with warnings.catch_warnings(record=True) as caught:
        for point in points:
            curve.append(point)
            if point.epoch > 0 and point.epoch == round(point.epoch):
                text = f"seed {seed}, epoch {point.epoch:g}: loss {point.loss:.2g}"
                report(Progress(contestant.name, 1, text, milestone=point.epoch == rules.epochs))
    messages = sorted({str(warning.message) for warning in caught})
    return Run(seed, tuple(curve), accuracy_on_test_set(model, load_digits()), tuple(messages))


def _training(
    contestant: Contestant, rules: Rules, rate: float, seed: int
) -> tuple[torch.nn.Sequential, Iterator[Point]]:
    """Returns a fresh model, the same for every contestant with this seed, and its training as an iterator."""
    digits = load_digits()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = mlp(digits.train_inputs.shape[1], rules.hidden, 10)
    optimizer = contestant.optimizer(model, rate, damping=rules.damping, relative_damping=rules.relative_damping)
    points = train(
        model,
        optimizer,
        digits,
        seed=seed,
        epochs=rules.epochs,
        batch_size=rules.batch_size,
        evaluations_per_epoch=rules.evaluations_per_epoch,
    )
    return model, points
