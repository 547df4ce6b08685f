"""`consequent reproduce all --quick` and `consequent collect`, end to end."""

import subprocess
import sys
from pathlib import Path

import pytest

from consequent_lab import cli
from consequent_lab.paper.archive import Archive
from consequent_lab.paper.experiments import experiments, find, recipe_names
from consequent_lab.reproduce_command import Reproduce

pytestmark = pytest.mark.slow

NAMES = ["loss-surface", "output-paths", "mlp", "resnet20", "learning-rates", "inside", "digits", "filters"]
COMMAND = [sys.executable, "-m", "consequent_lab.cli"]


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """The quick version of all experiments; what it printed, and its runs."""
    runs = tmp_path_factory.mktemp("reproduce") / "runs"
    command = [*COMMAND, "reproduce", "all", "--quick", "--runs", str(runs), "--workers", "2"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert run.returncode == 0, run.stderr
    return run, runs


@pytest.mark.slow
def test_everything_in_its_quick_form(everything):
    run, runs = everything
    assert run.stderr == ""
    assert "\x1b" not in run.stdout, "no terminal, no control codes"
    archive = Archive(runs)
    assert all(archive.variants(name) for name in recipe_names(quick=True))
    assert all(not kept.diverged for recipe in ("mlp-quick", "resnet20-quick") for kept in _runs(archive, recipe))
    for finding in find(NAMES, runs):
        assert f"\n{finding.title}\n" in run.stdout
        assert finding.summary in run.stdout, "what was run is described"
        assert not any(statement.measured in run.stdout for statement in finding.statements), "no verdicts"
    assert "the machinery on the digits" in run.stdout
    assert "HOLD" not in run.stdout


def _runs(archive, recipe):
    return [run for variant in archive.variants(recipe) for run in archive.runs(recipe, variant)]


@pytest.mark.slow
def test_findings_are_the_same_from_compact_files(everything, tmp_path, capsys):
    _, runs = everything
    results = tmp_path / "paper"
    assert cli.main(["collect", "--quick", "--runs", str(runs), "--output", str(results)]) == 0
    assert find(NAMES, results) == find(NAMES, runs)
    size = sum(path.stat().st_size for path in results.rglob("*.jsonl"))
    assert size < sum(path.stat().st_size for path in runs.rglob("*") if path.is_file()) / 3
    capsys.readouterr()
    empty = tmp_path / "empty"
    command = ["reproduce", "all", "--quick", "--runs", str(empty), "--known", str(results)]
    assert cli.main(command) == 0
    assert not empty.exists(), "what is known is not run again"
    assert "runs done" not in capsys.readouterr().out


@pytest.mark.slow
def test_every_figure_can_be_drawn(everything):
    _, runs = everything
    for finding in find(NAMES, runs):
        assert finding.figures
        for figure in finding.figures:
            for panel in figure.panels:
                for series in panel.series:
                    assert len({len(values) for values in series.columns.values()}) == 1, (figure.name, series.label)
                    assert {axis.column for axis in (*panel.x, *panel.y)} <= series.columns.keys()
        shown = [panel for figure in finding.figures for panel in figure.panels if panel.series]
        assert shown, finding.name


WITHOUT = """
import sys
for name in ("sklearn", "matplotlib", "scipy", "pandas"):
    sys.modules[name] = None  # an import of it fails
import consequent_lab.trainer
from consequent_lab.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_machine_that_only_trains_needs_torch_numpy_rich_and_tyro(tmp_path):
    runs = tmp_path / "runs"
    runs.mkdir()
    output = tmp_path / "results"
    for command in (["reproduce", "filters", "--runs", runs], ["collect", "--runs", runs, "--output", output]):
        run = subprocess.run([sys.executable, "-c", WITHOUT, *map(str, command)], capture_output=True, text=True)
        assert run.returncode == 0, run.stderr


def test_experiments_without_runs_say_so(tmp_path):
    for finding in find(["mlp", "resnet20", "learning-rates"], tmp_path / "nothing"):
        assert {one.verdict for one in finding.statements if one.kind == "empirical"} == {"not measured"}
    assert list(experiments()) == NAMES


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mlp", "--variants", "c-lion"], "c-lion matches none of"),
        (["mlp"], "consequent data"),
    ],
)
def test_what_is_not_there_is_named(tmp_path, capsys, arguments, message):
    runs, data = str(tmp_path / "runs"), str(tmp_path / "data")
    assert cli.main(["reproduce", *arguments, "--runs", runs, "--data", data, "--device", "cpu"]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"minutes": 0.0}, "--minutes must be positive"),
        ({"workers": 0}, "--workers must be at least 1"),
        ({"seeds": (-1,)}, "must not be negative"),
        ({"known": Path("not/there")}, "not/there is no folder"),
        ({"steps": ()}, "name at least one"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Reproduce(("mlp",), **options)


def test_a_failed_run_is_named_at_the_end(tmp_path, capsys):
    folder = tmp_path / "mlp-quick-search" / "digits-unit-sgd-lr0.01" / "seed100"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")  # not the config of this run
    command = ["reproduce", "mlp", "--quick", "--steps", "search", "--variants", "digits-unit-sgd"]
    assert cli.main([*command, "--runs", str(tmp_path), "--workers", "1", "--device", "cpu"]) == 1
    captured = capsys.readouterr()
    assert "1 run(s) failed:\n  mlp-quick-search/digits-unit-sgd-lr0.01/seed100: " in captured.err
    assert "config.json is damaged" in captured.err
    assert "2 runs done, 1 failed" in captured.out
