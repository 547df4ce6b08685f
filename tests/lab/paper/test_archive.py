"""Run folders and compact files read as the same objects; what is damaged is named."""

from dataclasses import replace

import pytest

from consequent_lab import cli
from consequent_lab.paper.archive import Archive, read_compact, thinned, write_compact
from consequent_lab.runs import DamagedFileError, RunFolder
from consequent_lab.train_config import TrainConfig
from consequent_lab.trainer import train

CONFIG = TrainConfig(
    hidden=(8,), iterations=90, log_every=5, evaluate_every=45, gradient_norms="both", checkpoint_every=40
)
KEY = "mlp-quick", "digits-unit-c-sgd-lr0.1", 0


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    train(CONFIG, RunFolder.of(root, *KEY))
    return root


def test_a_folder_and_its_compact_file_are_the_same_run(runs, tmp_path):
    run = Archive(runs).run(*KEY)
    path = write_compact([run], tmp_path)
    assert path == tmp_path / f"{KEY[0]}.jsonl"
    assert Archive(tmp_path).run(*KEY) == run
    assert run.config == CONFIG
    assert len(run.lines) == 19
    folder = RunFolder.of(runs, *KEY)
    assert run.curve("batch_loss")[-1][1] == pytest.approx(folder.metrics()[-1]["batch_loss"], rel=1e-5)
    assert run.starts[0]["command"]
    assert [place for place, _ in run.curve("epoch_loss")] == [45, 90]


def test_thinning_keeps_a_mean_once_and_norms_on_some_lines():
    lines = [
        {"iteration": n, "epoch": n / 4, "epoch_loss": float(n // 4), "gradient_norms": {}, "failed": 0, "lr": 1.0}
        for n in range(101)
    ]
    found = list(thinned(lines))
    assert [line["iteration"] for line in found if "epoch_loss" in line] == list(range(4, 101, 4))
    with_norms = [line["iteration"] for line in found if "gradient_norms" in line]
    assert len(with_norms) <= 21
    assert with_norms[0] == 0
    assert with_norms[-1] == 100
    assert [line["iteration"] for line in found if "failed" in line] == [100]
    assert not any("lr" in line for line in found)


def test_runs_of_a_recipe_are_in_one_file_and_the_others_stay_as_they_are(runs, tmp_path):
    run = Archive(runs).run(*KEY)
    path = write_compact([run, replace(run, seed=2)], tmp_path)
    before = path.read_bytes()
    write_compact([replace(run, seed=1), replace(run, variant="another")], tmp_path)
    assert set(before.splitlines()) <= set(path.read_bytes().splitlines())
    archive = Archive(tmp_path)
    assert archive.variants(KEY[0]) == ["another", KEY[1]]
    assert [one.seed for one in archive.runs(*KEY[:2])] == [0, 1, 2]
    assert archive.run(*KEY[:2], 1).lines == run.lines


def test_a_damaged_compact_file_is_named(runs, tmp_path):
    run = Archive(runs).run(*KEY)
    path = write_compact([run, replace(run, seed=1)], tmp_path)
    text = path.read_text()
    lines = text.splitlines()
    half = len(lines) // 2
    torn = ["", "{}\n", "[]", text[:-20], "\n".join(lines[:-1]), "\n".join(lines[: half - 1] + lines[half:])]
    for damaged in torn:
        path.write_text(damaged)
        with pytest.raises(DamagedFileError, match=r"mlp-quick\.jsonl, line"):
            Archive(tmp_path).run(*KEY)
    other = tmp_path / "other.jsonl"
    other.write_text(text)
    with pytest.raises(DamagedFileError, match="not where it belongs"):
        read_compact(other)


def interrupt(*event):
    if event == ("advanced", 60):
        raise KeyboardInterrupt


def test_an_unfinished_run_counts_only_if_asked_for(runs, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        train(CONFIG, RunFolder.of(tmp_path, *KEY), watcher=interrupt)
    assert Archive(tmp_path).run(*KEY) is None
    run = Archive(tmp_path, unfinished=True).run(*KEY)
    assert (run.is_finished, run.diverged, run.outcome["iteration"]) == (False, False, 55)
    results = tmp_path / "results"
    assert cli.main(["collect", "--quick", "--runs", str(tmp_path), "--output", str(results)]) == 0
    assert Archive(results).run(*KEY) is None
    assert Archive(results, unfinished=True).run(*KEY) == run
    finished = Archive(results, runs, unfinished=True).run(*KEY)
    assert finished.is_finished, "a finished run is better than an unfinished one, wherever it is"
