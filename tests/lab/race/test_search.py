import json
import time

import pytest
import torch

from consequent_lab import cli
from consequent_lab.race import running
from consequent_lab.race.contestants import CONTESTANTS
from consequent_lab.race.files import read_arrays, write_arrays
from consequent_lab.race.measures import Best, Final, TimeTo
from consequent_lab.race.results import Results, line_of
from consequent_lab.race.running import Conditions, race, search
from consequent_lab.race.table import markdown_table, rows
from consequent_lab.race.tasks import TASKS, task_named

CONDITIONS = Conditions("mlp-cifar10-b32", tiny=True, trials=8)
TASK = CONDITIONS.the_task()


def forgetting_time(lines):
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def run_race(folder, names=("SGD", "C-SGD"), conditions=CONDITIONS, seeds=2, workers=1):
    results = Results.of(TASK, folder)
    said = []
    is_whole = race(conditions, list(names), seeds, workers, results, results, said.append)
    return results, is_whole, said


def test_a_search_goes_on_as_if_it_had_not_been_stopped():
    whole, parts = [], []
    search(whole.append, CONDITIONS, "C-SGD", [])
    assert len(whole) == 8
    parts += whole[:3]
    search(parts.append, CONDITIONS, "C-SGD", [json.loads(json.dumps(line)) for line in parts])
    assert forgetting_time(parts) == forgetting_time(whole)


def test_a_search_begins_where_one_would_and_gives_up_on_some():
    lines = []
    search(lines.append, CONDITIONS, "C-SGD", [])
    assert lines[0]["settings"] == {"lr": 0.1, "relative_damping": 0.1}
    assert {line["state"] for line in lines} == {"complete", "pruned"}
    for knob in CONTESTANTS["C-SGD"].knobs:
        assert all(knob.low <= line["settings"][knob.name] <= knob.high for line in lines)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_race_that_is_whole_is_not_run_again(tmp_path, workers):
    results, is_whole, said = run_race(tmp_path, workers=workers)
    assert is_whole
    assert len(said) == 2 * (8 + 2)
    for name in ("SGD", "C-SGD"):
        complete = [line for line in results.trials(name) if line["state"] == "complete"]
        best = min(complete, key=lambda line: line["score"])["settings"]
        assert [line["settings"] for line in results.finals(name)] == [best, best]
    again, is_whole, said = run_race(tmp_path)
    assert is_whole
    assert not said
    assert again.lines == results.lines


def test_a_line_that_was_cut_off_is_run_again(tmp_path):
    results, _, _ = run_race(tmp_path)
    text = results.path.read_text()
    results.path.write_text(text[:-40])
    again, _, said = run_race(tmp_path)
    assert len(said) == 1
    assert forgetting_time(again.lines) == forgetting_time(results.lines)
    assert forgetting_time(Results.of(TASK, tmp_path).lines) == forgetting_time(results.lines)


def test_a_race_ends_when_the_time_is_over(tmp_path):
    over = Conditions("mlp-cifar10-b32", tiny=True, trials=8, deadline=time.time() - 1)
    results, is_whole, _ = run_race(tmp_path, conditions=over)
    assert not is_whole
    assert not results.lines


def test_results_of_another_recipe_are_refused(tmp_path):
    results, _, _ = run_race(tmp_path, names=("SGD",))
    line = {**results.lines[0], "recipe": {**TASK.recipe(), "epochs": 99}}
    results.path.write_text(json.dumps(line) + "\n")
    with pytest.raises(ValueError, match="another recipe"):
        Results.of(TASK, tmp_path)


def test_the_table_is_made_from_the_lines(tmp_path):
    results, _, _ = run_race(tmp_path)
    table = markdown_table(results)
    assert "| SGD |" in table
    assert "| C-SGD |" in table
    scores = {
        name: sorted(line["curve"]["train_loss"][-1] for line in results.finals(name))[1] for name in ("SGD", "C-SGD")
    }
    assert [row.contestant for row in rows(results)] == sorted(scores, key=scores.get)


def test_what_fails_is_an_error_after_all_the_rest(tmp_path, monkeypatch):
    def curve_of(task, contestant, *rest):
        if contestant.name == "C-SGD":
            raise FileNotFoundError("its data are not there")
        return known(task, contestant, *rest)

    known = running.curve_of
    monkeypatch.setattr(running, "curve_of", curve_of)
    with pytest.raises(ValueError, match="1 of the jobs failed: C-SGD, search"):
        run_race(tmp_path, names=("C-SGD", "SGD"))
    assert len(Results.of(TASK, tmp_path).finals("SGD")) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["table"], "there are no results in"),
        (["table-wine", "demo", "--contestants", "foof"], "FOOF: no part in demo, which has Muon, C-Adam, "),
        pytest.param(
            ["demo", "--device", "cuda"],
            "no CUDA device here",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one here"),
        ),
    ],
)
def test_what_is_not_there_is_said_at_once(words, message, tmp_path, capsys):
    assert cli.main(["race", *words, "--output", str(tmp_path)]) == 1
    assert message in capsys.readouterr().err


def test_finals_alone_take_the_settings_of_another_search(tmp_path):
    run_race(tmp_path, names=("SGD",))
    conditions = Conditions("mlp-fashion-mnist-b32", tiny=True)
    results, searched = Results.of(conditions.the_task(), tmp_path), Results.of(TASK, tmp_path)
    assert race(conditions, ["SGD"], 2, 1, results, searched, lambda text: None)
    assert [line["kind"] for line in results.lines] == ["final", "final"]
    assert results.lines[0]["settings"] == searched.best("SGD")["settings"]


def test_of_the_choices_that_a_task_gives_the_best_on_samples_held_out_is_taken(tmp_path):
    base = Conditions("resnet20-cifar10", tiny=True, trials=1)
    searched = Results.of(base.the_task(), tmp_path)
    race(base, ["Nesterov-BN"], 1, 1, searched, searched, lambda text: None)
    found = searched.best("Nesterov-BN")["settings"]
    conditions = Conditions("resnet20-cifar10-20ep", tiny=True)
    task = conditions.the_task()
    results = Results.of(task, tmp_path)
    results.add(line_of(task, "final", "Nesterov-BN", settings={**found, "decay": 0.5}, seed=0))  # chosen before
    assert race(conditions, ["Nesterov-BN"], 2, 1, results, searched, lambda text: None)
    trials = results.trials("Nesterov-BN")
    assert [line["settings"] for line in trials] == [{**found, **choice} for choice in task.choices["Nesterov-BN"]]
    assert {line["state"] for line in trials} == {"complete"}
    held_out = [line["curve"]["test_accuracy"][-1] for line in trials]
    best = trials[held_out.index(max(held_out))]["settings"]
    assert [(line["seed"], line["settings"]) for line in results.finals("Nesterov-BN")] == [(0, best), (1, best)]
    assert "then, for some, the best of a few others on samples held out" in markdown_table(results)


def test_images_come_back_as_they_were(tmp_path):
    import numpy as np

    generator = np.random.default_rng(0)
    arrays = {
        "colour": generator.integers(0, 256, (1001, 3, 8, 8), dtype=np.uint8),
        "grey": generator.integers(0, 256, (1001, 1, 8, 8), dtype=np.uint8),
        "labels": generator.integers(0, 10, 1001),
    }
    write_arrays(tmp_path / "set.npz", arrays)
    read = read_arrays([tmp_path / "set.npz"])
    assert read.keys() == arrays.keys()
    assert all(np.array_equal(read[name], arrays[name]) for name in arrays)


def test_scores_are_lower_the_better():
    curve = [{"iteration": 0, "x": 1.0}, {"iteration": 5, "x": 3.0}, {"iteration": 10, "x": 2.0}]
    assert Final("x", rising=True).score(curve, 10) == -2
    assert Best("x", rising=True).score(curve, 10) == -3
    assert TimeTo("x", 3.0, rising=True).score(curve, 10) == 0.5
    assert TimeTo("x", 4.0, rising=True).score(curve, 10) == 1 + 2
    assert TimeTo("x", 4.0).score([{"iteration": 0, "x": float("nan")}], 10) == 1e9


def test_every_task_has_a_tiny_form_and_known_contestants():
    samples = {"siren": 2048, "fourier": 2048}
    for name, task in TASKS.items():
        assert set(task.contestants) <= set(CONTESTANTS)
        assert task.settings_from is None or task.settings_from in TASKS
        assert task_named(name, tiny=True).steps(samples.get(name.split("-")[0], 64)) == 8
    with pytest.raises(ValueError, match=r"'mlp-cifar10', perhaps mlp-cifar10-b32 or .*; `consequent race`"):
        task_named("mlp-cifar10")
