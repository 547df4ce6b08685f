"""Every example runs, and says what its first line promises."""

import pathlib
import re
import runpy

import pytest
import torch

from benchmarks.residuals.problems import burgers_exact

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


def losses_of(name, capsys):
    return [float(x) for x in re.findall(r"training loss ([\d.]+)", run(name, capsys))]


def test_without_batchnorm(capsys):
    out = run("without_batchnorm", capsys)
    last = re.findall(r"test accuracy ([\d.]+)%, of the averaged weights ([\d.]+)%", out)[-1]
    assert min(map(float, last)) > 92


def test_with_muon(capsys):
    losses = losses_of("with_muon", capsys)
    assert losses[-1] < 0.1 < losses[0]


def test_with_soap(capsys):
    pytest.importorskip("pytorch_optimizer")
    losses = losses_of("with_soap", capsys)
    assert losses[-1] < 0.1 < losses[0]


def test_with_lion(capsys):
    pytest.importorskip("pytorch_optimizer")
    losses = losses_of("with_lion", capsys)
    assert losses[-1] < 0.1 < losses[0]


def test_foresight(capsys):
    rows = re.findall(r"^(\d)\s+([\d.]+)\s+([\d.-]+)\s+([\d.-]+)$", run("foresight", capsys), re.M)
    assert len(rows) == 3
    for _, ratio, cosine, of_backpropagation in rows:
        assert float(ratio) == pytest.approx(1, abs=0.1)
        assert float(cosine) > 0.97 > float(of_backpropagation)


def test_mixed_precision(capsys):
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", run("mixed_precision", capsys))]
    whole, resumed = losses[:4], losses[4:]
    assert whole == resumed
    assert whole[-1] < whole[0] / 2


def test_adaptive_filters(capsys):
    lms, nlms, apa = (float(x) for x in re.findall(r"samples: ([\d.e+-]+)", run("adaptive_filters", capsys)))
    assert apa < nlms < lms < 1


def test_functional(capsys):
    out = run("functional", capsys)
    losses = [float(x) for x in re.search(r"networks: (.+)", out)[1].split(", ")]
    assert len(losses) == 4
    assert max(losses) < 0.2
    assert float(re.search(r"CSGD: ([\d.e-]+)", out)[1]) < 1e-6


@pytest.mark.filterwarnings("ignore")  # of the packages'
def test_with_lightning(capsys):
    pytest.importorskip("lightning")
    steps, loss = re.search(r"(\d+) steps: training loss ([\d.]+)", run("with_lightning", capsys)).groups()
    assert int(steps) == 171
    assert float(loss) < 0.1


def test_with_transformers(capsys):
    pytest.importorskip("transformers")
    steps, loss = re.search(r"(\d+) steps: loss ([\d.]+)", run("with_transformers", capsys)).groups()
    assert int(steps) == 60
    assert float(loss) < 0.4


def test_with_accelerate(capsys):
    state = pytest.importorskip("accelerate.state")
    state.AcceleratorState._reset_state(reset_partial_state=True)  # other tests have chosen other settings
    losses = losses_of("with_accelerate", capsys)
    state.AcceleratorState._reset_state(reset_partial_state=True)
    assert losses[-1] < 0.1 < losses[0]


@pytest.fixture
def default_dtype():
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.slow
def test_burgers(tmp_path, monkeypatch, default_dtype):
    monkeypatch.chdir(tmp_path)
    found = runpy.run_path(str(EXAMPLES / "burgers.py"), run_name="__main__")
    exact = burgers_exact(found["grid"], 0.01 / torch.pi).view(200, 200).T
    assert float((found["picture"] - exact).norm() / exact.norm()) < 5e-3
    assert (tmp_path / "burgers.png").stat().st_size > 10_000


def test_regression(capsys, default_dtype):
    ours, theirs = (float(x) for x in re.findall(r"error ([\d.e-]+)", run("regression", capsys)))
    assert ours < 1e-3
    assert ours < theirs / 5


def test_poisson_with_autograd(capsys, default_dtype):
    assert float(re.search(r"error ([\d.e-]+)", run("poisson_with_autograd", capsys))[1]) < 1e-3


def test_all_examples_are_tested():
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert {path.stem for path in EXAMPLES.glob("*.py")} <= tested
