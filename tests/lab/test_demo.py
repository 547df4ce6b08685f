"""The demo end to end, in its quick form, and the command line around it."""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from reference import DEFAULT_DAMPING

from consequent_lab import cli

pytestmark = pytest.mark.slow

NAMES = ["SGD", "C-SGD", "Nesterov", "C-Nesterov", "Adam", "C-Adam"]


def quick_demo(folder, workers):
    """Runs the quick demo as a user without a terminal would; returns what it printed and recorded."""
    picture = folder / "out" / "race.png"
    command = [sys.executable, "-m", "consequent_lab.cli", "demo", "--quick", "--workers", str(workers)]
    run = subprocess.run([*command, "--output", str(picture)], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in picture.parent.iterdir()) == ["race.json", "race.png"]
    return run, json.loads(picture.with_suffix(".json").read_text())


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    return quick_demo(tmp_path_factory.mktemp("demo"), workers=1)


def test_prints_progress_table_and_verdicts(demo):
    run, record = demo
    assert run.stderr == ""
    assert "\x1b" not in run.stdout, "no terminal, no control codes"
    for name in NAMES:
        assert f"{name:10} learning rate" in run.stdout
        assert f"{name:10} seed 0, epoch 2: loss" in run.stdout
        assert f"\n {name} " in run.stdout
    assert "epochs to" in run.stdout
    assert "seconds to" in run.stdout
    text = " ".join(run.stdout.split())
    for verdict in record["verdicts"]:
        assert " ".join(verdict.split()) in text
    assert "race.png" in run.stdout


def test_record_has_its_schema(demo):
    _, record = demo
    assert set(record) == {"command", "versions", "machine", "rules", "contestants", "verdicts"}
    assert "demo --quick" in record["command"]
    assert record["versions"]["torch"] == torch.__version__
    assert set(record["versions"]) == {"python", "consequent", "torch"}
    assert record["machine"]["cores"] >= 1
    assert record["machine"]["workers"] == 1
    assert {"learning_rates", "epochs", "target_loss", "seeds", "search_seeds", "hidden"} <= set(record["rules"])
    assert (record["rules"]["damping"], record["rules"]["relative_damping"]) == (None, DEFAULT_DAMPING[1])
    assert [contestant["name"] for contestant in record["contestants"]] == NAMES
    for contestant in record["contestants"]:
        assert contestant["learning_rate"] in record["rules"]["learning_rates"]
        assert [trial["learning_rate"] for trial in contestant["trials"]] == record["rules"]["learning_rates"]
        for measure in ("epochs", "seconds", "final_loss", "test_accuracy"):
            assert set(contestant[measure]) == {"low", "median", "high"}
        assert [run["seed"] for run in contestant["runs"]] == record["rules"]["seeds"]
        for run in contestant["runs"]:
            curve = run["curve"]
            assert curve["epoch"][0] == 0
            assert curve["epoch"][-1] == record["rules"]["epochs"]
            assert len(curve["epoch"]) == len(curve["seconds"]) == len(curve["loss"])
            assert curve["seconds"] == sorted(curve["seconds"])
            assert curve["loss"][-1] < curve["loss"][0]
            assert 0 < run["test_accuracy"] <= 1


def test_two_processes_find_what_one_finds(demo, tmp_path):
    _, alone = demo
    _, together = quick_demo(tmp_path, workers=2)
    assert together["machine"]["workers"] == 2
    for one, other in zip(alone["contestants"], together["contestants"], strict=True):
        assert one["learning_rate"] == other["learning_rate"]
        for first, second in zip(one["runs"], other["runs"], strict=True):
            assert first["curve"]["loss"] == pytest.approx(second["curve"]["loss"], rel=1e-3)


def test_help_lists_the_commands_without_importing_torch():
    script = (
        "import sys; from consequent_lab.cli import main\ntry: main(['--help'])\nfinally: print('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    for name in cli.commands():
        assert name in run.stdout
    assert run.stdout.rstrip().endswith("False")


def test_missing_lab_packages_are_named_with_the_remedy(monkeypatch, capsys):
    monkeypatch.setattr(cli, "find_spec", lambda name: None if name in ("tyro", "rich") else find_spec(name))
    assert cli.main(["demo"]) == 1
    message = capsys.readouterr().err
    assert "rich, tyro" in message
    assert "pip install '.[lab]'" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds", "0"], "--seeds must be at least 1, got 0"),
        (["--epochs", "-1"], "--epochs must be at least 1, got -1"),
        (["--target-loss", "0"], "--target-loss must be positive and finite, got 0.0"),
        (["--damping", "nan"], "--damping must be positive and finite, got nan"),
        (["--relative-damping", "0"], "--relative-damping must be positive and finite, got 0.0"),
        (["--damping", "0.1", "--relative-damping", "0.1"], "give --damping or --relative-damping, not both"),
        (["--output", "race.pdf"], "--output must end in .png, got race.pdf"),
    ],
)
def test_bad_options_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["demo", *arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_an_output_that_cannot_be_written_is_an_error_not_a_traceback(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert cli.main(["demo", "--quick", "--output", str(tmp_path / "file" / "race.png")]) == 1
    assert "file" in capsys.readouterr().err
