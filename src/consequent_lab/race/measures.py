"""By what a run is judged, written down before any run: every task has one measure for its search.

A score is a number that is lower the better the run was; it can be told of a
run that is not at its end, so that a search may give up on it.
"""

from dataclasses import dataclass

from consequent_lab.race.curves import Curve

WORST = 1e9  # the score of a run that diverged


@dataclass(frozen=True)
class TimeTo:
    """How soon a metric is at its target; among those that never are, how far from it they end.

    >>> curve = [{"iteration": 0, "loss": 2.0}, {"iteration": 5, "loss": 0.4}, {"iteration": 10, "loss": 0.2}]
    >>> TimeTo("loss", 0.5).score(curve, 10), TimeTo("loss", 0.1).score(curve, 10)
    (0.5, 1.2)
    """

    metric: str
    target: float
    rising: bool = False

    def __str__(self) -> str:
        return f"steps to {named(self.metric)} {shown(self.metric, self.target)}"

    def arrival(self, curve: Curve) -> int | None:
        """Returns the step of the first evaluation at the target."""
        return next((int(line["iteration"]) for line in curve if self._is_there(line[self.metric])), None)

    def score(self, curve: Curve, steps: int) -> float:
        """Returns the fraction of all steps that it takes, or 1 and what is missing."""
        step = self.arrival(curve)
        if step is not None:
            return step / steps
        last = curve[-1][self.metric]
        missing = self.target - last if self.rising else last
        return 1 + min(missing, WORST) if missing == missing else WORST

    def is_settled(self, curve: Curve) -> bool:
        """Says whether further training cannot change the score."""
        return self.arrival(curve) is not None

    def _is_there(self, value: float) -> bool:
        return value >= self.target if self.rising else value <= self.target


@dataclass(frozen=True)
class Final:
    """A metric at the end of the run.

    >>> Final("test_accuracy", rising=True).score([{"iteration": 0, "test_accuracy": 0.1}], 10)
    -0.1
    """

    metric: str
    rising: bool = False

    def __str__(self) -> str:
        return f"{named(self.metric)} at the end"

    def score(self, curve: Curve, steps: int) -> float:
        """Returns the metric, negative if more is better."""
        last = curve[-1][self.metric]
        if last != last:
            return WORST
        return -last if self.rising else min(last, WORST)

    def is_settled(self, curve: Curve) -> bool:
        """Says whether further training cannot change the score."""
        return False


@dataclass(frozen=True)
class Best(Final):
    """A metric where it was best in the run.

    >>> curve = [{"iteration": 0, "test_accuracy": 0.5}, {"iteration": 1, "test_accuracy": 0.4}]
    >>> Best("test_accuracy", rising=True).score(curve, 1)
    -0.5
    """

    def __str__(self) -> str:
        return f"best {named(self.metric)}"

    def score(self, curve: Curve, steps: int) -> float:
        """Returns the best value, negative if more is better."""
        return min(Final(self.metric, self.rising).score([line], steps) for line in curve)


Measure = TimeTo | Final

_NAMES = {
    "train_loss": "training loss",
    "train_accuracy": "training accuracy",
    "test_loss": "test loss",
    "test_accuracy": "test accuracy",
    "psnr": "PSNR",
    "test_psnr": "test PSNR",
}


def named(metric: str) -> str:
    """Returns a metric's name in a sentence."""
    return _NAMES[metric]


def shown(metric: str, value: float) -> str:
    """Returns a value of a metric in its unit.

    >>> shown("test_accuracy", 0.9125), shown("train_loss", 0.01), shown("psnr", 42.17)
    ('91.25 %', '0.01', '42.2 dB')
    """
    if metric.endswith("accuracy"):
        return f"{100 * value:.4g} %"
    if metric.endswith("psnr"):
        return f"{value:.1f} dB"
    return f"{value:.3g}"
