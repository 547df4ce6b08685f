"""The faults, a few of each; and that the study notices where something goes wrong."""

import json

import pytest
import torch

from consequent_lab.cli import main
from consequent_lab.faults import damage, numbers, soak
from consequent_lab.faults.trial import Trial, require
from consequent_lab.runs import RunFolder


def test_everything_goes_as_it_should(tmp_path, capsys):
    assert main(["faults", "--quick", "--output", str(tmp_path / "faults.json")]) == 0
    record = json.loads((tmp_path / "faults.json").read_text())
    tried = [trial for trial in record["trials"] if not trial["not_tried"]]
    assert all(trial["tried"] == trial["as_expected"] > 0 for trial in tried)
    assert len(tried) >= 20
    assert sum(trial["tried"] for trial in tried if trial["fault"].startswith("kill")) >= 4
    assert record["soak"]["as_expected"]
    assert "| kill −9 while training |" in capsys.readouterr().out


def test_an_attempt_that_goes_wrong_is_a_surprise():
    trial = Trial("fault", "nothing")
    with trial.attempt("first"):
        require(False, "lost")
    with trial.attempt("second"):
        pass
    assert (trial.tried, trial.as_expected) == (2, 1)
    assert trial.surprises == ["first: AssertionError: lost"]


def test_damage_that_nobody_notices_is_a_surprise(tmp_path, monkeypatch):
    """Without digests, a flipped bit in a checkpoint may become a wrong number."""
    monkeypatch.setattr(RunFolder, "checkpoint", lambda self: {"weights": torch.zeros(1)})
    monkeypatch.setattr(RunFolder, "resume", lambda self: None)
    monkeypatch.setattr(damage, "FILES", ("checkpoint.pt",))
    trials = damage.damaged_runs(tmp_path, 2)
    assert all(trial.surprises for trial in trials)


def test_a_step_that_is_not_skipped_is_a_surprise(monkeypatch):
    monkeypatch.setattr(numbers, "_same", lambda before, after: False)
    assert any(trial.surprises for trial in numbers.numbers(1))


@pytest.mark.parametrize("loss", [0.1, 9.0])
def test_a_long_run_with_another_loss_is_noticed(loss):
    found = soak.Soak(10, {}, {"steps": 10}, {"steps": 10}, loss, [0.5, 0.6, 0.7], 100.0, 100.0)
    assert not found.is_as_expected
