"""The study of promises: what docs say of it is in results/promised.jsonl.gz, and its control does what it says."""

import pathlib
import re

import pytest
import torch

from benchmarks.defaults import promised
from benchmarks.defaults.promised import BEST_RATES, RATES, LimitedSGD, Outcome, records_in
from benchmarks.defaults.residual import RESIDUAL
from benchmarks.defaults.study import SEEDS
from benchmarks.defaults.tasks import TASKS

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "defaults.md").read_text().split("## A step that promises")[1].split("\n## ")[0]
PROSE = " ".join(PAGE.split())
ADVICE = " ".join((ROOT / "docs" / "choosing.md").read_text().split())
README = " ".join((ROOT / "README.md").read_text().split())


@pytest.fixture(scope="module")
def outcome():
    return Outcome(records_in(ROOT / "results" / "promised.jsonl.gz"))


def loss(outcome, *key):
    return promised._loss(outcome.records[key])


def ratios(outcome, upper, lower):
    """Of two contestants with a promise and a rate each, on the residual networks."""
    return sorted(
        loss(outcome, task, *upper, seed) / loss(outcome, task, *lower, seed) for task in RESIDUAL for seed in SEEDS
    )


def verdicts(outcome, name, promise):
    return [f"{outcome.verdict(name, promise, rate).mean:.2f}" for rate in RATES[name, promise]]


def test_the_table_and_who_passes(outcome):
    assert outcome.table() in PAGE
    assert outcome.passes("c-sgd")
    assert not outcome.passes("c-nesterov")
    assert f"jsonl.gz), {len(outcome.records)} in all" in PROSE
    assert set(outcome.records) == set(promised.wanted())


def test_what_is_said_of_the_tasks(outcome):
    free, limited = (verdicts(outcome, "c-sgd", promise) for promise in (None, 1.0))
    assert f"at 0.3, 1 and 3 for all tasks C-SGD's losses are {', '.join(limited[1:3])} and {limited[3]} of" in ADVICE
    assert f"without it they are {free[1]} at 0.3 and {free[2]} at 1" in ADVICE
    assert f"At 1 the verdict is {limited[2]}," in PROSE
    assert f"over a decade of rates it is at most {max(limited[1:])}" in PROSE
    assert f"it ended at {limited[2]} of the training loss" in README
    assert f"and at 0.1 for all at {free[0]}." in README
    averages = (ROOT / "docs" / "defaults.md").read_text().split("## Averages over batches")[1]
    (tuned,) = re.findall(r"\| c-sgd \| bound 0.2 \| \*\*([\d.]+)\*\*", averages)
    assert f"without it {tuned};" in PROSE
    assert f"and {tuned} with a rate tuned for each" in ADVICE
    assert f"C-SGD with a rate tuned for each at {tuned}" in README
    with_momentum = {promise: verdicts(outcome, "c-nesterov", promise) for promise in (None, 1.0)}
    assert f"from 0.03 to 0.3 the losses are {min(with_momentum[1.0])} to {max(with_momentum[1.0])}, " in ADVICE
    assert f"without it from {with_momentum[None][1]} to {with_momentum[None][2]}" in ADVICE
    assert f"C-Nesterov at 0.03 for all, without `promise`, was at {with_momentum[None][1]}." in README
    (control,) = verdicts(outcome, "sgd", 1.0)
    assert f"plain SGD with it has {control} at the rate 1" in ADVICE
    assert f"plain SGD with it has {control}," in PROSE


def test_what_is_said_of_pairs(outcome):
    pairs = [((task, "c-sgd", 1.0, 1.0, seed), (task, "c-sgd", None, 0.1, seed)) for task in TASKS for seed in SEEDS]
    lower = sum(loss(outcome, *one) < loss(outcome, *other) for one, other in pairs)
    tests = [[outcome.records[key]["test"] for key in pair] for pair in pairs]
    tests = [pair for pair in tests if None not in pair]
    lower_tests = sum(one < other for one, other in tests)
    said = f"In {lower} of {len(pairs)} pairs the loss at 1 is lower than at 0.1 without it, and the test loss in "
    assert f"{said}{lower_tests} of {len(tests)}." in PROSE
    behind = {
        task
        for task in TASKS
        if sum(
            loss(outcome, task, "c-sgd", 1.0, 1.0, seed) > loss(outcome, task, "c-sgd", None, 0.1, seed)
            for seed in SEEDS
        )
        == len(SEEDS)
    }
    assert behind == {"vae"}
    _, second, worst = sorted(loss(outcome, "pinn", "c-sgd", 1.0, 1.0, seed) for seed in SEEDS)
    assert second > 1000
    assert f"at 1 two of three seeds end above 1,000, at {worst:,.0f} the worst" in PROSE
    assert outcome.share("c-sgd", 1.0, 1.0) > "90%"


def test_what_is_said_of_residual_networks(outcome):
    rates = (*BEST_RATES["c-sgd"], *RATES["c-sgd", None])
    gains = sorted(
        min(loss(outcome, task, "c-sgd", None, rate, seed) for rate in rates)
        / loss(outcome, task, "c-sgd", 1.0, 1.0, seed)
        for task in RESIDUAL
        for seed in SEEDS
    )
    assert gains[0] > 1
    assert f"best of six rates without it, by factors of {gains[0]:.1f} to {gains[-1]:.0f}," in PROSE
    assert f"in {len(gains)} of {len(gains)} runs" in ADVICE
    advised = ratios(outcome, ("c-sgd", None, 0.1), ("c-sgd", 1.0, 0.1))
    assert f"it is {advised[0]:.0f} to {advised[-1]:,.0f} times lower with it than without" in PROSE
    control = ratios(outcome, ("sgd", 1.0, 1.0), ("c-sgd", 1.0, 1.0))
    assert f"losses {control[0]:.1f} to {control[-1]:.0f} times as high" in PROSE
    assert "on {} of {} residual networks".format(*outcome.bad("c-nesterov", 1.0, 0.1)) in PROSE


def test_the_control_promises_no_more_than_the_loss():
    weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    optimizer = LimitedSGD([weight], lr=10.0)
    weight.square().sum().backward()
    optimizer.limited_step(25.0)  # of a promise of 10 · 100
    torch.testing.assert_close(weight.detach(), torch.tensor([3.0, 4.0]) * (1 - 25 / 100 * 2))
