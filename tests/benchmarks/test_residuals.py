"""The study of residual problems: its equations, its runs, and what docs/whole-network.md says of it."""

import json
import math
import pathlib
import re

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.residuals import batches, contestants, problems, runs, summary

ROOT = pathlib.Path(__file__).parents[2]
README = " ".join((ROOT / "README.md").read_text().split())
PAGE = (ROOT / "docs" / "whole-network.md").read_text()
LINES, GPU_LINES = (runs.read(ROOT / "results" / f"residuals{one}.jsonl") for one in ("", "-gpu"))


@pytest.fixture(autouse=True)
def default_dtype():
    yield
    torch.set_default_dtype(torch.float32)


class Known(nn.Module):
    """A solution in place of a network."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x[None] if x.ndim == 1 else x).reshape(*x.shape[:-1], 1)


PI = torch.pi
SOLUTIONS = {
    "poisson-2d": lambda x: (PI * x).sin().prod(1),
    "poisson-5d": lambda x: (PI * x).cos().sum(1),
    "heat": lambda x: (-(PI**2) / 4 * x[:, 0]).exp() * (PI * x[:, 1]).sin(),
    "helmholtz": lambda x: (PI * x[:, 0]).sin() * (4 * PI * x[:, 1]).sin(),
}


@pytest.mark.parametrize("name", SOLUTIONS)
def test_solutions_leave_nothing_over(name):
    problem = problems.problem_of(name, 0)
    model = Known(SOLUTIONS[name])
    for term, residual in problem.terms.items():
        values = torch.vmap(lambda *sample, residual=residual: residual(model, *sample))(*problem.batches[term])
        assert float(values.abs().max()) < 1e-9
    problem.model = model
    assert problem.error() < 1e-12


def test_the_solution_of_burgers_solves_it():
    problem = problems.problem_of("burgers", 0)
    x = torch.stack([torch.full((41,), 0.4), torch.linspace(-0.9, 0.9, 41)], 1)
    h = 1e-4

    def u(dt=0.0, dx=0.0):
        return problems.burgers_exact(x + torch.tensor([dt, dx])).numpy()

    slope = (u(h) - u(-h)) / (2 * h), (u(0, h) - u(0, -h)) / (2 * h)
    left = slope[0] + u() * slope[1] - 0.1 / np.pi * (u(0, h) - 2 * u() + u(0, -h)) / h**2
    assert np.abs(left).max() < 1e-4
    for term in ("initial", "ends"):
        place, value = problem.batches[term]
        near = place + torch.tensor([1e-9, 0.0])
        torch.testing.assert_close(problems.burgers_exact(near)[:, None], value, atol=1e-6, rtol=0)


def test_one_residual_is_the_loss_of_all_terms():
    for name in ("heat", "poisson-2d"):
        problem = problems.problem_of(name, 0)
        one = contestants.OneResidual(problem)
        loss = contestants.Loss(problem)(problem.batches)
        torch.testing.assert_close(one(one.samples()).square().mean(), loss)


def test_verdicts():
    ours = [1.0, 2.0]
    assert summary.verdict({"WholeNetwork": ours, "a": [3.0, 4.0], "b": [2.5, math.inf]}) == "ahead"
    assert summary.verdict({"WholeNetwork": ours, "a": [0.5, 0.9], "b": [5.0, 6.0]}) == "behind"
    assert summary.verdict({"WholeNetwork": ours, "a": [0.5, 1.5], "b": [5.0, 6.0]}) == "level"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", contestants.CONTESTANTS)
def test_everybody_runs(name, tmp_path):
    if name == "torch-levenberg-marquardt":
        pytest.importorskip("torch_levenberg_marquardt")
    if name == "SOAP":
        pytest.importorskip("pytorch_optimizer")
    problem, path = "robot-arm" if name == "C-Adam" else "heat", tmp_path / "lines.jsonl"
    for _ in range(2):  # the second time nothing is left to do
        runs.run(problem, [name], 0.3, 1, path)
    lines = runs.read(path)
    trials = [] if name == "WholeNetwork" else contestants.CONTESTANTS[name][1]
    assert [line["settings"] for line in lines if line["seed"] == runs.TRIAL] == trials
    assert [line["seed"] for line in lines][len(trials) :] == [0]
    assert lines[-1]["curve"][-1][0] >= 0.3


# ---- the page ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "tasks", "names", "seconds"),
    [
        (LINES, tuple(problems.PROBLEMS), tuple(contestants.CONTESTANTS), 10.0),
        (GPU_LINES, tuple(problems.PROBLEMS)[:5], ("WholeNetwork", "L-BFGS", "Adam", "SOAP"), 4.0),
    ],
)
def test_everybody_has_had_the_same(lines, tasks, names, seconds):
    for problem in tasks:
        for name in names:
            its = runs.of(lines, problem, name)
            if name == "C-Adam" and "" not in problems.problem_of(problem, 0).terms:
                assert not its
                continue
            trials = 0 if name == "WholeNetwork" else len(contestants.CONTESTANTS[name][1])
            assert sum(line["seed"] == runs.TRIAL for line in its) == trials
            assert sorted(line["seed"] for line in its if line["seed"] != runs.TRIAL) == [0, 1, 2, 3, 4]
            assert {line["seconds"] for line in its} == {seconds}


def test_the_tables_of_the_page():
    assert summary.table(LINES) in PAGE
    assert summary.table(GPU_LINES) in PAGE


def test_what_the_page_says_of_the_table():
    found = {problem: summary.errors(LINES, problem) for problem in problems.PROBLEMS}
    said = re.search(r"ahead in (\w+) of eight", " ".join(PAGE.split()))[1]
    assert sum(summary.verdict(one) == "ahead" for one in found.values()) == ["six", "seven", "eight"].index(said) + 6
    said = re.search(
        r"best rival's error is (\d+) to (\d+) times as high \(on the GPU ([\d,]+) to ([\d,]+) times\)",
        " ".join(PAGE.split()),
    ).groups()
    for lines, numbers in ((LINES, said[:2]), (GPU_LINES, said[2:])):
        gains = []
        for problem in ("poisson-2d", "heat", "burgers", "helmholtz"):
            one = summary.errors(lines, problem)
            gains.append(summary.median(one[summary.best_rival(one)]) / summary.median(one["WholeNetwork"]))
        assert [int(number.replace(",", "")) for number in numbers] == [math.floor(min(gains)), math.floor(max(gains))]


def test_many_samples_in_batches():
    path = ROOT / "results" / "residuals-batches.jsonl"
    lines = runs.read(path)
    assert batches.table(path) in PAGE
    assert [line["settings"] for line in lines if line["seed"] == runs.TRIAL] == batches.TRIALS
    finals = [line for line in lines if line["seed"] != runs.TRIAL]
    sizes = [("WholeNetwork", size) for size in batches.SIZES] + [("Adam", finals[0]["settings"]["batch"])]
    for one in sizes:
        its = [line for line in finals if (line["contestant"], line["settings"]["batch"]) == one]
        assert sorted(line["seed"] for line in its) == [0, 1, 2, 3, 4]
        assert {line["seconds"] for line in its} == {20.0}


def test_new_samples_at_each_step():
    names = ("WholeNetwork", "Adam", "SOAP", "Muon", "torch-levenberg-marquardt")
    lines = runs.read(ROOT / "results" / "residuals-new-samples.jsonl")
    for name in names:
        its = runs.of(lines, problems.NEW_SAMPLES, name)
        assert sorted(line["seed"] for line in its if line["seed"] != runs.TRIAL) == [0, 1, 2, 3, 4]
        trials = [] if name == "WholeNetwork" else contestants.CONTESTANTS[name][1]
        assert [line["settings"] for line in its if line["seed"] == runs.TRIAL] == trials
        assert {line["seconds"] for line in its} == {10.0}
    found = summary.errors(lines, problems.NEW_SAMPLES)
    ours, theirs = (
        f"{summary.median(found[name]):.1e} ({min(found[name]):.1e}–{max(found[name]):.1e})"
        for name in ("WholeNetwork", summary.best_rival(found))
    )
    said = f"to {ours}, and with {summary.best_rival(found)}, the best of four rivals, to {theirs}."
    assert said in " ".join(PAGE.split())


def test_samples_are_drawn_anew():
    problem = problems.problem_of(problems.NEW_SAMPLES, 0)
    draw, seen = contestants.drawing(problem, {}), []
    for _ in range(2):
        draw()
        seen.append(problem.batches)
    for (name, one), other in zip(seen[0].items(), seen[1].values(), strict=True):
        assert [its.shape for its in one] == [its.shape for its in other]
        assert not torch.equal(one[0], other[0])
        if name == "boundary":
            torch.testing.assert_close(SOLUTIONS["poisson-5d"](other[0])[:, None], other[1])
    fixed = problems.problem_of("poisson-5d", 0)
    batches_before = fixed.batches
    contestants.drawing(fixed, {})()
    assert fixed.batches is batches_before


def test_a_batch_is_drawn_from_all_samples():
    problem = problems.problem_of("robot-arm", 0)
    (everything, _), draw, seen = problem.batches[""], contestants.drawing(problem, {"batch": 100}), []
    for _ in range(6):
        draw()
        seen.append(problem.batches[""][0])
    assert torch.equal(torch.cat(seen).sort(0)[0], everything.sort(0)[0])


def test_what_readme_says():
    said = re.search(
        r"error on Helmholtz's equation was (\S+); that of the best of six tuned rivals was (\S+)\. "
        r"After four seconds on an H200 it was (\S+); that of the best of three was (\S+)\. ",
        README,
    )
    numbers = []
    for lines, rivals in ((LINES, 6), (GPU_LINES, 3)):
        found = summary.errors(lines, "helmholtz")
        assert len(found) == 1 + rivals
        numbers += [f"{summary.median(found[name]):.1e}" for name in ("WholeNetwork", summary.best_rival(found))]
    assert list(said.groups()) == numbers
    verdicts = [summary.verdict(summary.errors(LINES, problem)) for problem in problems.PROBLEMS]
    assert "Of [eight problems](docs/whole-network.md) it was ahead in six, and lost one." in README
    assert (verdicts.count("ahead"), verdicts.count("behind")) == (6, 1)


def test_what_a_step_costs():
    cpu, gpu = (json.loads((ROOT / "results" / f"residuals-times{one}.json").read_text()) for one in ("", "-gpu"))
    rows = {}
    for column, (found, ending) in enumerate(((cpu, ""), (gpu, ""), (gpu, ", CUDA graph"))):
        for name, its in found.items():
            kind = {"equation": "Poisson", "regression": "regression"}.get(name.removesuffix(ending).split()[-1])
            if isinstance(its, dict) and kind and name.endswith(ending):
                row = rows.setdefault(f"{kind}, {its['samples']:,} × {its['parameters']:,}", ["–"] * 3)
                row[column] = f"{its['seconds']:.3g}"
    assert len(rows) == 4
    for name, row in rows.items():
        assert f"| {name} | {' | '.join(row)} |" in PAGE


def test_the_page_is_short():
    assert len(re.sub(r"```.*?```|^\|.*?$", "", PAGE, flags=re.S | re.M).split()) <= 900
