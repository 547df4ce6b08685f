"""The study that chooses the defaults: it runs, goes on where it was, repeats itself, and judges as it says."""

import gzip
import json
import sys

import pytest

from benchmarks.defaults import study, summary
from benchmarks.defaults.__main__ import main
from benchmarks.defaults.tasks import TASKS


def run(monkeypatch, capsys, path, *arguments):
    command = ["defaults", *arguments, "--quick", "--workers", "1", "--results", str(path)]
    monkeypatch.setattr(sys, "argv", command)
    main()
    return capsys.readouterr().out


def test_all_stages_and_the_tables(monkeypatch, capsys, tmp_path):
    path = tmp_path / "runs.jsonl"
    out = run(monkeypatch, capsys, path, "search", "confirm", "fixed", "stress", "summary")
    tables = out[out.index("## Each task") :]
    assert tables.count("\n## ") == 14
    assert "**" in tables
    assert "missing" not in tables
    lines = path.read_text().splitlines()
    records = [record for record in map(json.loads, lines) if "task" in record]
    assert {record["contestant"] for record in records} == set(study.CONTESTANTS)
    assert all(len(record["trajectory"]) >= 10 for record in records if not record["diverged"])

    path.write_text("\n".join(lines)[:-20])  # killed while the last line was being written
    stages = "search", "confirm", "fixed", "stress"
    assert ", 1 of them still to be made" in run(monkeypatch, capsys, path, *stages)
    assert ", 1 of them" not in run(monkeypatch, capsys, path, *stages)
    assert len(study.Results(path).records) == len(records)

    compressed = tmp_path / "runs.jsonl.gz"
    compressed.write_bytes(gzip.compress(path.read_bytes()))
    assert study.Results(compressed).records == study.Results(path).records
    with pytest.raises(ValueError, match=r"runs\.jsonl\.gz is compressed and is only read"):
        study.Results(compressed).append([])


@pytest.mark.parametrize("name", TASKS)
def test_a_task_trains_and_repeats_itself(name):
    chosen = study.Run(name, "c-adam", "relative 0.1", 1e-3, 3, 2)
    first, second = study.train(chosen), study.train(chosen)
    assert not first["diverged"]
    assert first["final"] != first["initial"]
    assert first["failed"] == 0
    assert {**first, "seconds": 0} == {**second, "seconds": 0}
    assert study.train(chosen._replace(seed=4))["final"] != first["final"]


def record(final, diverged=False, initial=2.0, floor=0.0, task="any"):
    return {"task": task, "final": final, "diverged": diverged, "initial": initial, "floor": floor}


@pytest.mark.parametrize(
    ("own", "plain", "ratio"),
    [
        (record(1.0), record(4.0), 0.25),
        (record(None, diverged=True), record(4.0), 100),
        (record(1e-9), record(4.0), 0.01),
        (record(1.0), record(None, diverged=True), 0.5),
        (record(0.0001, floor=0.002), record(0.004, floor=0.002), 0.5),
    ],
)
def test_ratio(own, plain, ratio):
    verdict = summary.Verdict()
    verdict.add(own, plain)
    assert verdict.mean == pytest.approx(ratio)
    assert verdict.diverged == own["diverged"]


def test_tasks_count_alike_however_many_seeds_they_have():
    verdict = summary.Verdict()
    for _ in range(3):
        verdict.add(record(4.0, task="often"), record(1.0))
    verdict.add(record(1.0, task="once"), record(1.0))
    assert verdict.mean == pytest.approx(2)
    assert verdict.worst == (pytest.approx(4), "often")
    assert verdict.noise is None  # one seed says nothing of it


def test_noise_of_seeds():
    verdict = summary.Verdict()
    for final in (0.5, 2.0):
        verdict.add(record(final), record(1.0))
    assert verdict.mean == pytest.approx(1)
    assert verdict.noise == pytest.approx(2)


def test_missing_runs_are_told(tmp_path):
    judge = summary.Judge(study.SMALL, study.Results(tmp_path / "none.jsonl"))
    assert judge.verdict("c-sgd", "relative 0.1", None, [0]).missing == len(study.SMALL.tasks)
