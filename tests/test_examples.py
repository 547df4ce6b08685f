"""Every example runs, and says what its first line promises."""

import pathlib
import re
import runpy

import pytest

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


def run(name, capsys):
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return capsys.readouterr().out


def test_one_line(capsys):
    out = run("one_line", capsys)
    losses = [float(x) for x in re.findall(r"training loss ([\d.]+)", out)]
    assert losses[-1] < losses[0] / 2
    assert losses[-1] < 0.1
    assert "corrected (3)" in out


def test_convolutions(capsys):
    accuracies = [float(x) for x in re.findall(r"accuracy ([\d.]+)%", run("convolutions", capsys))]
    assert accuracies[-1] > 95


def test_foresight(capsys):
    rows = re.findall(r"^(\d)\s+([\d.]+)\s+([\d.-]+)\s+[\d.-]+\s+([\d.-]+)$", run("foresight", capsys), re.M)
    assert len(rows) == 3
    for _, ratio, cosine, of_backpropagation in rows:
        assert float(ratio) == pytest.approx(1, abs=0.1)
        assert float(cosine) > 0.97 > float(of_backpropagation)


def test_mixed_precision(capsys):
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", run("mixed_precision", capsys))]
    assert losses[-1] < losses[0] / 2


def test_adaptive_filters(capsys):
    lms, nlms, apa = (float(x) for x in re.findall(r"samples: ([\d.e+-]+)", run("adaptive_filters", capsys)))
    assert apa < nlms < lms < 1


def test_functional(capsys):
    assert float(re.search(r": ([\d.e-]+)$", run("functional", capsys).strip())[1]) < 1e-3


def test_all_examples_are_tested():
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert {path.stem for path in EXAMPLES.glob("*.py")} <= tested
