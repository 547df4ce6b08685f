"""`consequent compare`: any runs beside each other."""

import csv
import json
from dataclasses import replace

import pytest
from test_trainer import SMALL, run

from consequent_lab import cli
from consequent_lab.comparison import runs_at, scalars
from consequent_lab.paper.archive import Archive, write_compact
from consequent_lab.runs import RunFolder
from consequent_lab.trainer import train

FAST = replace(SMALL, hidden=(12,), iterations=20)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two seeds, one plain run, one that diverged, one that has only begun."""
    root = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        run(replace(FAST, seed=seed), root / "train" / "mine" / f"seed{seed}")
    run(replace(FAST, consequentialist=False), root / "train" / "plain" / "seed0")
    train(replace(SMALL, consequentialist=False, lr=1e8), RunFolder(root / "train" / "wild" / "seed0"))
    begun = RunFolder(root / "mlp" / "begun" / "seed0")
    with begun.opened(FAST):
        begun.append({"iteration": 0, "epoch": 0.0, "seconds": 0.0, "train_loss": 2.5})
    return root


def race_file(path):
    recipe = {"task": "toy"}
    curve = {"step": [0, 5], "train_loss": [2.0, 0.5], "test_accuracy": [0.1, 0.75]}
    final = {"kind": "final", "recipe": recipe, "contestant": "Adam", "seed": 0, "seconds": 3.0, "curve": curve}
    lost = {**final, "contestant": "K-FAC", "curve": {**curve, "train_loss": [2.0, None]}}
    time = {"kind": "time", "recipe": recipe, "contestant": "Adam", "milliseconds": {"eager": {"median": 200.0}}}
    kept = (final, lost, {"kind": "trial", "recipe": recipe}, time)
    path.write_text("".join(json.dumps(line) + "\n" for line in kept))
    return path


def table(shown):
    """The rows by their first word."""
    return {words[0]: words[1:] for line in shown.splitlines() if len(words := line.split()) > 3}


def test_runs_of_all_kinds_are_rows_of_one_table(runs, tmp_path, capsys):
    archive = Archive(runs)
    kept = [replace(run, recipe="kept") for run in archive.runs("train", "plain")]
    write_compact(kept, tmp_path)
    race = race_file(tmp_path / "race.jsonl")
    command = ["compare", str(runs), str(tmp_path / "kept.jsonl"), str(race), "--figure", "None"]
    assert cli.main(command) == 0
    rows = table(capsys.readouterr().out)
    assert rows["mine"][:2] == ["2", "20"]
    seen = {(one.label, one.seed): one for one in runs_at([runs])}
    accuracies = [seen["mine", seed].last("test_accuracy") for seed in (0, 1)]
    assert f"{50 * sum(accuracies):.2f}" in rows["mine"]
    assert rows["plain"][-1] == rows["kept/plain"][-1] == "finished"
    assert rows["plain"][-5:-1] == rows["kept/plain"][-5:-1]
    assert rows["wild"][-4:] == ["–", "–", "–", "diverged"]
    assert rows["mlp/begun"][-1] == "unfinished"
    assert rows["toy/Adam"] == ["1", "5", "3.0", "s", "0.5", "75.00", "%", "–", "finished"]
    assert rows["toy/K-FAC"][-1] == "diverged"
    adam, lost = runs_at([race])
    assert adam.curve("train_loss", by="seconds") == [(0, 2.0), (1.0, 0.5)]
    assert lost.curve("train_loss") == [(0, 2.0)]
    assert not lost.curve("train_loss", by="seconds")


def test_csv_has_every_reading(runs, tmp_path):
    path = tmp_path / "out" / "readings.csv"
    assert cli.main(["compare", str(runs / "train" / "mine"), "--figure", "None", "--csv", str(path)]) == 0
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    metrics = [(seed, line) for seed in (0, 1) for line in RunFolder(runs / "train" / "mine" / f"seed{seed}").metrics()]
    assert len(rows) == len(metrics)
    for row, (seed, line) in zip(rows, metrics, strict=True):
        assert int(row["seed"]) == seed
        for name, value in scalars(line).items():
            assert float(row[name]) == value
    assert float(rows[-1]["gradient_norms/applied/2"]) > 0


def test_tensorboard_has_every_reading(runs, tmp_path):
    loading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert cli.main(["compare", str(runs / "train"), "--figure", "None", "--tensorboard", str(tmp_path / "tb")]) == 0
    events = loading.EventAccumulator(str(tmp_path / "tb" / "mine" / "seed1"))
    events.Reload()
    *_, last = RunFolder(runs / "train" / "mine" / "seed1").metrics()
    for name in ("train_loss", "gradient_norms/applied/2"):
        event = events.Scalars(name)[-1]
        assert event.step == 20
        assert event.value == pytest.approx(scalars(last)[name], rel=1e-6)


def test_without_tensorboard_the_error_says_what_to_do(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    command = ["compare", str(runs / "train"), "--figure", "None", "--tensorboard", str(tmp_path)]
    assert cli.main(command) == 1
    assert "pip install tensorboard" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["png", "svg"])
def test_the_figure_has_a_line_for_each(runs, tmp_path, form):
    from matplotlib.figure import Figure

    drawn = []
    legend = Figure.legend

    def noted(self, *arguments, **keywords):
        drawn.append([len([line for line in axes.lines if len(line.get_xdata())]) for axes in self.axes])
        drawn.append([handle.get_label() for handle in keywords["handles"]])
        return legend(self, *arguments, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "legend", noted)
        assert cli.main(["compare", str(runs / "train"), "--figure", str(tmp_path / f"runs.{form}")]) == 0
    lines = 2 + 1 + 1 + 1  # two seeds and their median, and one line for each of the others
    assert drawn == [[lines, lines, lines], ["mine", "plain", "wild"]]
    assert (tmp_path / f"runs.{form}").stat().st_size > 10_000


def test_what_is_no_run_is_named(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.txt").write_text("no run")
    for name in ("empty", "missing", "text.txt"):
        assert cli.main(["compare", str(tmp_path / name)]) == 1
        assert f"{name} has no runs: name a run's folder" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["compare", str(tmp_path), "--figure", "runs.gif"])
    assert "must end in .png, .svg or .pdf" in capsys.readouterr().err
