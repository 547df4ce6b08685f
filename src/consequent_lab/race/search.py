"""The search of a contestant: Optuna proposes settings, and successive halving gives up on the worse half.

Half of the trials, judged by the ones before, end after a quarter of the run, and half of those that are left after
half of it. A proposal depends on the finished trials and on its own number alone, so that a search which was stopped
goes on as if it had not been.
"""

import time
import warnings
from collections.abc import Sequence
from typing import Any

import optuna

from consequent_lab.race.contestants import Contestant, Knob, Settings
from consequent_lab.race.curves import Curve
from consequent_lab.race.results import DIGITS, Line
from consequent_lab.race.task import Task

SPREAD_TRIALS = 5  # after the first one: spread evenly, before proposals follow from results
LONGEST_RUNG = 4  # the first cut is after so small a part of the run


class Search:
    """A study that is made anew from the lines of its finished trials; a run to its end has so many steps."""

    def __init__(self, task: Task, contestant: Contestant, steps: int, lines: Sequence[Line]) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._task = task
        self._steps = steps
        self._knobs = contestant.space(task)
        self._study = optuna.create_study(
            pruner=optuna.pruners.SuccessiveHalvingPruner(
                min_resource=max(1, task.evaluations // LONGEST_RUNG), reduction_factor=2
            )
        )
        for line in lines:
            self._study.add_trial(_remembered(line, self._distributions))

    @property
    def number(self) -> int:
        """Of the next trial."""
        return len(self._study.trials)

    def ask(self) -> Settings:
        """Begins a trial and returns its settings; the first has those that one would start with."""
        number = self.number
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # several knobs at once
            self._study.sampler = optuna.samplers.TPESampler(n_startup_trials=1, multivariate=True, seed=number)
        if number == 0:
            self._study.enqueue_trial({knob.name: knob.start for knob in self._knobs})
        elif number <= SPREAD_TRIALS:
            self._study.enqueue_trial(spread(self._knobs, number))
        self._trial = self._study.ask(self._distributions)
        self._is_pruned, self._start = False, time.perf_counter()
        return dict(self._trial.params)

    @property
    def _distributions(self) -> dict[str, Any]:
        return {
            knob.name: optuna.distributions.FloatDistribution(knob.low, knob.high, log=True) for knob in self._knobs
        }

    def is_over(self, curve: Curve) -> bool:
        """Says whether to end the trial here: it is among the worse half, or its score is known."""
        evaluation = len(curve) - 1
        if evaluation == 0:
            return False
        self._trial.report(self._score(curve), evaluation)
        if evaluation >= self._task.evaluations or self._task.measure.is_settled(curve):
            return True
        self._is_pruned = self._trial.should_prune()
        return self._is_pruned

    def end(self, curve: Curve) -> dict[str, Any]:
        """Ends the trial and returns what is to be kept of it."""
        state = optuna.trial.TrialState.PRUNED if self._is_pruned else optuna.trial.TrialState.COMPLETE
        score = self._score(curve)
        self._study.tell(self._trial, None if self._is_pruned else score, state=state)
        frozen = self._study.trials[self._trial.number]
        return {
            "settings": dict(self._trial.params),
            "number": self._trial.number,
            "state": "pruned" if self._is_pruned else "complete",
            "score": score,
            "reports": {str(step): value for step, value in frozen.intermediate_values.items()},
            "rungs": {key: value for key, value in frozen.system_attrs.items() if key.startswith("completed_rung")},
            "seconds": time.perf_counter() - self._start,
        }

    def _score(self, curve: Curve) -> float:
        """With the digits that lines have: a search from lines is to see the same numbers."""
        return float(f"{self._task.measure.score(curve, self._steps):.{DIGITS}g}")


def spread(knobs: Sequence[Knob], number: int) -> Settings:
    """Returns the settings of a trial of those that are spread evenly over the logarithms of all knobs.

    The sequence is Roberts's: the fractions of multiples of 1/g, 1/g², …, where g is the golden ratio for one knob and
    solves gᵈ⁺¹ = g + 1 for d of them.

    >>> [round(spread([Knob("lr", 0.01, 1.0, 0.1)], number)["lr"], 3) for number in (1, 2, 3)]
    [0.017, 0.297, 0.051]
    """
    ratio = 2.0
    for _ in range(50):
        ratio = (1 + ratio) ** (1 / (len(knobs) + 1))
    places = [(0.5 + number / ratio**power) % 1 for power in range(1, len(knobs) + 1)]
    return {knob.name: knob.low * (knob.high / knob.low) ** place for knob, place in zip(knobs, places, strict=True)}


def _remembered(line: Line, distributions: dict[str, Any]) -> optuna.trial.FrozenTrial:
    is_pruned = line["state"] == "pruned"
    return optuna.trial.create_trial(
        state=optuna.trial.TrialState.PRUNED if is_pruned else optuna.trial.TrialState.COMPLETE,
        params=line["settings"],
        distributions=distributions,
        value=None if is_pruned else line["score"],
        intermediate_values={int(step): value for step, value in line["reports"].items()},
        system_attrs=line["rungs"],
    )
