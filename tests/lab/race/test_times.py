"""How long steps take, and what seconds are made of."""

import time

import pytest

from consequent_lab.race import kronecker
from consequent_lab.race.contestants import CONTESTANTS
from consequent_lab.race.results import Results, line_of, seconds_until
from consequent_lab.race.running import Conditions
from consequent_lab.race.table import headings, markdown_table, rows
from consequent_lab.race.times import PLAN, TINY_PLAN, times
from consequent_lab.timing import FEWEST_ROUNDS, UNCOUNTED_ROUNDS

CONDITIONS = Conditions("mlp-cifar10-b32", tiny=True)
TASK = CONDITIONS.the_task()


def test_first_steps_are_timed_by_themselves(tmp_path, monkeypatch):
    """FOOF, whose first ones are slow here, is charged for them, and later steps are not."""
    monkeypatch.setattr(kronecker, "FRESH", 4)
    whole = kronecker.FOOF._inverted

    def slowly(self, moments):
        if self._steps < kronecker.FRESH:
            time.sleep(0.005)
        return whole(self, moments)

    monkeypatch.setattr(kronecker.FOOF, "_inverted", slowly)
    results = Results.of(TASK, tmp_path)
    times(CONDITIONS, ["FOOF", "SGD"], results, lambda text: None, first=4)
    foof, sgd = (results.of_kind("time", name)[0] for name in ("FOOF", "SGD"))
    layers = 4
    assert foof["first"]["steps"] == sgd["first"]["steps"] == 4
    assert foof["first"]["milliseconds"] > 5 * layers
    assert foof["milliseconds"]["eager"]["median"] < 5 * layers
    assert sgd["first"]["milliseconds"] < 5 * layers


def test_later_steps_begin_after_the_first_ones():
    assert PLAN.warm_up + UNCOUNTED_ROUNDS * PLAN.period >= kronecker.FRESH
    assert PLAN.rounds >= FEWEST_ROUNDS
    assert TINY_PLAN.period == 1


@pytest.mark.parametrize(
    ("steps", "seconds"), [(0, 0.0), (150, 150 * 0.02), (200, 200 * 0.02), (375, 200 * 0.02 + 175 * 0.005)]
)
def test_seconds_are_those_of_first_and_later_steps(steps, seconds):
    line = {
        "milliseconds": {"eager": {"median": 5.0}, "graph": {"median": 1.0}},
        "first": {"steps": 200, "milliseconds": 20.0},
    }
    assert seconds_until(steps, line, "eager") == pytest.approx(seconds)
    assert seconds_until(steps, line, "graph") == pytest.approx(steps * 0.001)
    del line["first"], line["milliseconds"]["graph"]
    assert seconds_until(steps, line, "eager") == pytest.approx(steps * 0.005)
    assert seconds_until(steps, line, "graph") is None


def test_the_table_has_first_steps(tmp_path):
    results = Results.of(TASK, tmp_path)
    settings = {knob.name: knob.start for knob in CONTESTANTS["FOOF"].space(TASK)}
    curve = {"step": [0, 300], "train_loss": [2.0, 0.001], "test_loss": [2.0, 2.0], "test_accuracy": [0.1, 0.2]}
    results.add(line_of(TASK, "final", "FOOF", settings=settings, seed=0, steps=400, curve=curve))
    eager = {"milliseconds": {"eager": {"median": 5.0}, "graph": {"median": 1.0}}}
    results.add(line_of(TASK, "time", "FOOF", settings=settings, **eager, first={"steps": 200, "milliseconds": 20.0}))
    (row,) = rows(results)
    cells = dict(zip(headings(results), row.cells, strict=True))
    assert cells["seconds to training loss 0.01, eager"] == "4.5"
    assert cells["seconds to training loss 0.01, CUDA graph"] == "0.3"
    assert cells["ms a step, eager (first 200) / CUDA graph"] == "5 (20) / 1"
    assert "Seconds are steps × the time of a step measured alone, eagerly the first 200 by themselves." in (
        markdown_table(results)
    )
