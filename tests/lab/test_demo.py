"""The demo end to end, in its quick form, and the command line around it."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from consequent_lab import cli
from consequent_lab.demo import SETTINGS
from consequent_lab.race.results import Results
from consequent_lab.race.tasks import DEMO, TASKS, task_named

ROOT = Path(__file__).parents[2]


def test_the_settings_are_the_best_of_the_search_that_is_kept():
    searched = Results.of(TASKS[DEMO], ROOT / "results" / "race")
    assert set(SETTINGS) == set(TASKS[DEMO].contestants)
    for name, settings in SETTINGS.items():
        assert len(searched.trials(name)) == 12
        assert settings == pytest.approx(searched.best(name)["settings"], rel=0.005)


def quick_demo(folder, workers):
    """Runs the quick demo as a user without a terminal would; returns what it printed and recorded."""
    picture = folder / "out" / "race.png"
    command = [sys.executable, "-m", "consequent_lab.cli", "demo", "--quick", "--seeds", "1", "--workers", str(workers)]
    run = subprocess.run([*command, "--output", str(picture)], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in picture.parent.iterdir()) == ["race.json", "race.png"]
    return run, json.loads(picture.with_suffix(".json").read_text())


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    return quick_demo(tmp_path_factory.mktemp("demo"), workers=1)


@pytest.mark.slow
def test_prints_runs_and_a_table(demo):
    run, _ = demo
    assert run.stderr == ""
    assert "\x1b" not in run.stdout, "no terminal, no control codes"
    for name in SETTINGS:
        assert f"{name:11} seed 0" in run.stdout
        assert f"\n {name} " in run.stdout
    assert "steps to" in run.stdout
    assert "found in consequent race demo, not searched here" in " ".join(run.stdout.split())
    assert "race.png" in run.stdout


@pytest.mark.slow
def test_record_has_its_schema(demo):
    _, record = demo
    assert set(record) == {"command", "versions", "machine", "title", "lines"}
    assert "demo --quick" in record["command"]
    assert record["versions"]["torch"] == torch.__version__
    assert record["machine"]["workers"] == 1
    assert {line["contestant"] for line in record["lines"]} == set(SETTINGS)
    results = Results(task_named(DEMO, tiny=True), Path(), record["lines"])
    for name in SETTINGS:
        (line,) = results.finals(name)
        assert line["curve"]["step"] == [0, 4, 8]
        assert len(results.of_kind("time", name)) == 1


@pytest.mark.slow
def test_two_processes_find_what_one_finds(demo, tmp_path):
    (_, alone), (_, together) = demo, quick_demo(tmp_path, workers=2)
    curves = [
        {line["contestant"]: line["curve"]["train_loss"] for line in record["lines"] if line["kind"] == "final"}
        for record in (alone, together)
    ]
    assert curves[0].keys() == curves[1].keys()
    for name, losses in curves[0].items():
        assert losses == pytest.approx(curves[1][name], rel=1e-3)


def test_what_only_a_search_needs_is_not_imported():
    script = (
        "import sys, consequent_lab.report.static, consequent_lab.race.running, consequent_lab.race.table\n"
        "import consequent_lab.race.times\n"
        "print(sorted({'optuna', 'pytorch_optimizer', 'skimage'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[]"  # `make demo` does not install them


@pytest.mark.slow
def test_help_lists_the_commands_without_importing_torch():
    script = (
        "import sys; from consequent_lab.cli import main\ntry: main(['--help'])\nfinally: print('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    for name, command in cli.commands().items():
        assert name in run.stdout
        first, _, rest = command.__doc__.partition("\n\n")
        assert first.split()[-1] in run.stdout
        assert not rest.split() or " ".join(rest.split()[:4]) not in run.stdout, "which is for its own --help"
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
        (["--output", "race.pdf"], "--output must end in .png, got race.pdf"),
    ],
)
def test_bad_options_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["demo", *arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_an_output_that_cannot_be_written_is_an_error_not_a_traceback(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert cli.main(["demo", "--quick", "--output", str(tmp_path / "file" / "race.png")]) == 1
    assert "file" in capsys.readouterr().err
