"""What a race comes to: medians and ranges over the seeds, and who wins by how much."""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from consequent_lab.demo_race import Result


@dataclass(frozen=True)
class Spread:
    """Median and range over the seeds; infinite stands for "not within the budget".

    >>> str(Spread.of([3.0, 1.0, 2.0])), str(Spread.of([1.0, math.inf, math.inf])), str(Spread.of([2.0]))
    ('2.00 (1.00–3.00)', '– (1.00–…)', '2.00')
    """

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        """Returns the spread of the values; NaN counts as infinite."""
        known = sorted(math.inf if math.isnan(value) else value for value in values)
        return cls(known[0], statistics.median_high(known), known[-1])

    def overlaps(self, other: "Spread") -> bool:
        """Says whether the two ranges have a value in common."""
        return self.low <= other.high and other.low <= self.high

    def show(self, form: str) -> str:
        """Returns the median and the range, every number in the given form (as in `format`)."""
        if not math.isfinite(self.low):
            return "–"
        median = format(self.median, form) if math.isfinite(self.median) else "–"
        if self.low == self.high:
            return median
        high = format(self.high, form) if math.isfinite(self.high) else "…"
        return f"{median} ({format(self.low, form)}–{high})"

    def __str__(self) -> str:
        return self.show(".2f")


@dataclass(frozen=True)
class Summary:
    """One line of the table."""

    name: str
    family: str
    learning_rate: float
    at_edge: bool  # the best rate is the smallest or largest of the grid: a better one may lie beyond
    epochs: Spread  # to the target loss
    seconds: Spread  # to the target loss
    milliseconds_per_epoch: float
    final_loss: Spread
    test_accuracy: Spread


def summarise(result: Result, target_loss: float) -> Summary:
    """Returns a contestant's line of the table."""
    hits = [run.to_target(target_loss) for run in result.runs]
    rates = sorted(trial.learning_rate for trial in result.trials)
    return Summary(
        name=result.contestant.name,
        family=result.contestant.family,
        learning_rate=result.learning_rate,
        at_edge=result.learning_rate in (rates[0], rates[-1]),
        epochs=Spread.of(hit.epoch if hit else math.inf for hit in hits),
        seconds=Spread.of(hit.seconds if hit else math.inf for hit in hits),
        milliseconds_per_epoch=statistics.median(
            1e3 * run.curve[-1].seconds / run.curve[-1].epoch for run in result.runs
        ),
        final_loss=Spread.of(run.curve[-1].loss for run in result.runs),
        test_accuracy=Spread.of(run.test_accuracy for run in result.runs),
    )


def verdicts(summaries: list[Summary], target_loss: float) -> list[str]:
    """Returns a sentence for each plain optimiser and its C- version, then one on the whole field."""
    pairs = zip(summaries[::2], summaries[1::2], strict=True)
    sentences = [_duel(plain, corrected, target_loss) for plain, corrected in pairs]
    finishers = [summary for summary in summaries if math.isfinite(summary.epochs.median)]
    if finishers:
        first = min(finishers, key=lambda summary: summary.epochs.median)
        fastest = min(finishers, key=lambda summary: summary.seconds.median)
        sentences.append(
            f"Of all six, {first.name} needs the fewest epochs ({first.epochs.median:.1f}) "
            f"and {fastest.name} the least time ({fastest.seconds.median:.2f} s)."
        )
    return sentences


def _duel(plain: Summary, corrected: Summary, target_loss: float) -> str:
    names = f"{corrected.name} against {plain.name}"
    reached = [summary.name for summary in (plain, corrected) if math.isfinite(summary.epochs.median)]
    if not reached:
        return f"{names}: neither reaches a training loss of {target_loss:g} in this budget."
    if len(reached) == 1:
        other = corrected.name if reached[0] == plain.name else plain.name
        return f"{names}: {reached[0]} wins; {other} does not reach {target_loss:g} in this budget."
    epochs = _compare(corrected.epochs, plain.epochs, "epochs", ".1f", "fewer", "more")
    seconds = _compare(corrected.seconds, plain.seconds, "s", ".2f", "less time", "more time")
    return f"{names}: {epochs}; {seconds}."


def _compare(ours: Spread, theirs: Spread, unit: str, form: str, less: str, more: str) -> str:
    """Says that "4.7 against 9.3 epochs, 2.0 times fewer", and whether the seeds leave a doubt."""
    ratio = ours.median / theirs.median
    factor = f"{max(ratio, 1 / ratio):.1f} times {less if ratio < 1 else more}"
    if factor.startswith("1.0 "):
        factor = "a draw"
    doubt = ", though the seeds overlap" if factor != "a draw" and ours.overlaps(theirs) else ""
    return f"{format(ours.median, form)} against {format(theirs.median, form)} {unit}, {factor}{doubt}"
