"""The table of the paper's statements fits the experiments that measure them."""

import pytest

from consequent_lab.paper import mlp
from consequent_lab.paper.experiments import experiments
from consequent_lab.paper.resnet20 import LABELS
from consequent_lab.paper.resnet20_statements import CONTROL, RULES, Judge, labels_of
from consequent_lab.paper.statements import NOT_MEASURED, NOT_RUN, NOT_TIMED, Outcome, judged, statement_rows

COLUMNS = {"paper", "control", "measure", "remark", "kind", "not_run", "timed", "datasets", "on", "pairs", "holds"}


@pytest.mark.parametrize("name", list(experiments()))
def test_every_experiment_has_statements_and_no_row_has_an_unknown_column(name):
    rows = statement_rows(name)
    assert rows
    for row in rows.values():
        assert {"measure"} <= row.keys() <= COLUMNS
        assert ("paper" in row) != ("control" in row), "quoted or ours"
        labels = labels_of(row)
        assert "control" in row or not any(label.endswith(CONTROL) for label in labels)
        assert {label for pair in row.get("pairs", ()) for label in pair} <= set(labels) <= set(LABELS)
        assert row.get("holds", "above 0") in RULES


def test_every_measurement_has_its_row():
    assert mlp.MEASURED.keys() == statement_rows("mlp").keys()
    for name, row in statement_rows("resnet20").items():
        assert hasattr(Judge, f"_{name}") == (not ("pairs" in row or row.get("not_run")))


def test_what_is_missing_is_said_and_limits_are_filled_in(monkeypatch):
    rows = {
        "known": {"paper": "a 100% b", "measure": "above {LIMIT:.1%} and {LIMIT:g}"},
        "missing": {"paper": "c", "measure": "d", "remark": "e", "kind": "toy"},
        "untimed": {"paper": "f", "measure": "g", "timed": True},
        "nobody": {"paper": "h", "measure": "i", "not_run": True},
        "ours": {"control": "j", "measure": "k"},
    }
    monkeypatch.setattr("consequent_lab.paper.statements.statement_rows", lambda name: rows)
    outcomes = {"known": Outcome("5.", [True, None], "beside"), "missing": Outcome("", [None])}
    outcomes |= {"untimed": Outcome("", []), "ours": Outcome("", [True])}
    known, missing, untimed, nobody, ours = judged("x", "digits", outcomes, {"LIMIT": 0.125})
    assert (known.paper, known.measure, known.kind) == ("a 100% b", "above 12.5 % and 0.125", "digits")
    assert (known.measured, known.verdict, known.circumstances) == ("5.", "holds in part", "beside")
    assert (missing.measured, missing.remark, missing.kind) == (NOT_MEASURED, "e", "toy")
    assert (ours.paper, ours.kind) == ("j", "control")
    assert (untimed.measured, nobody.measured, nobody.verdict) == (NOT_TIMED, NOT_RUN, "not measured")
