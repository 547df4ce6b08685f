"""The faults, a few of each; and that the study notices where something goes wrong."""

import json

import pytest
import torch

from consequent_lab.runs import RunFolder
from faults import damage, lost_ranks, numbers, one_rank, soak
from faults.__main__ import main
from faults.record import new_record, recorded, updated
from faults.trial import Trial, require

pytestmark = pytest.mark.slow


def test_everything_goes_as_it_should(tmp_path, capsys):
    assert main(["--quick", "--output", str(tmp_path / "faults.json")]) == 0
    record = json.loads((tmp_path / "faults.json").read_text())
    tried = [trial for trial in record["trials"] if not trial["not_tried"]]
    assert all(trial["tried"] == trial["as_expected"] > 0 for trial in tried)
    assert len(tried) >= 20
    assert sum(trial["tried"] for trial in tried if trial["fault"].startswith("kill")) >= 4
    assert sum(trial["tried"] for trial in tried if trial["fault"].startswith("one of two ranks lost")) >= 4
    assert sum(trial["tried"] for trial in tried if "two ranks" in trial["fault"]) >= 8
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


# ---- ranks ----------------------------------------------------------------------------------------------------------


def test_a_rank_that_goes_on_waiting_is_a_surprise(tmp_path, monkeypatch):
    monkeypatch.setattr(lost_ranks, "PATIENCE", 0)  # it ends at once, but not that fast
    training, _ = lost_ranks.lost_ranks(tmp_path, 1)
    assert training.tried == 1
    assert "rank 0 still waited for rank 1" in training.surprises[0]


def test_what_one_of_the_ranks_finds_is_a_surprise(tmp_path, monkeypatch):
    class Ranks:
        def __init__(self, folder, *_):
            for rank, problem in enumerate(("", "weights or momenta changed")):
                problems = {name: [problem] for name, _, _ in one_rank.FAULTS}
                (folder / f"rank{rank}.json").write_text(json.dumps(problems))

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def ended(self, seconds):
            return [0, 0]

        def last_words(self, rank):
            return ""

    monkeypatch.setattr(one_rank, "TwoRanks", Ranks)
    for trial in one_rank.one_rank(tmp_path, 1):
        assert trial.surprises == ["attempt 0: AssertionError: rank 1: weights or momenta changed"]


# ---- the file -------------------------------------------------------------------------------------------------------


def test_rows_that_are_tried_anew_say_what_made_them_and_the_others_stay():
    long_run = soak.Soak(10, {}, {"steps": 10}, {"steps": 10}, 0.6, [0.5, 0.6, 0.7], 100.0, 100.0)
    first, second, third = (Trial(name, "nothing", tried=1, as_expected=1) for name in ("first", "second", "third"))
    old = new_record([first, second], long_run, quick=False)
    again = Trial("first", "nothing", tried=2, as_expected=2)
    new = updated(old, [again, third], None)
    assert recorded(new) == ([again, second, third], long_run)
    assert [row["fault"] for row in new["trials"] if "made_by" in row] == ["first", "third"]
    assert new["trials"][1] == old["trials"][1]
    assert new["soak"] == old["soak"]
    assert {"command", "versions", "machine"} == new["trials"][0]["made_by"].keys()


def test_some_kinds_only(tmp_path, capsys):
    path = tmp_path / "faults.json"
    command = ["--only", "untrusted", "--output", str(path)]
    assert main([*command, "--quick"]) == 0
    record = json.loads(path.read_text())
    assert [trial["tried"] for trial in record["trials"]] == [2, 5, 3]
    assert record["soak"] is None
    assert main([*command, "--quick"]) == 0
    assert all("made_by" in trial for trial in json.loads(path.read_text())["trials"])
    assert main(command) == 1
    assert "was made with --quick" in capsys.readouterr().err
    path.write_text("{}")
    assert main(command) == 1
    assert "not a file of this study" in capsys.readouterr().err
