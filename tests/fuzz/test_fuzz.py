"""The library agrees with the reference on every one of these seeds: about half a minute for each of the two modes.

More of them: ``python -m fuzz --minutes 60 --mode step`` (with ``tests`` and ``src`` on PYTHONPATH), and for one that
fails ``python -m fuzz --seed 123 --shrink``.
"""

from dataclasses import replace

import pytest
import torch

import consequent
from consequent.options.parameter_groups import Groups
from consequent.statistics.averages import Averages
from consequent.statistics.joint import JointInputs
from fuzz.gradient_penalty import check_gradient_penalty
from fuzz.run import Case, run

CHUNK = 50  # seeds in a test
MODES = pytest.mark.parametrize("mode", ["step", "backward"])


@pytest.fixture(autouse=True)
def one_thread():
    """The matrices are tiny: a second thread would only wait."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@MODES
@pytest.mark.parametrize(
    "chunk", [*range(14), *(pytest.param(chunk, marks=pytest.mark.slow) for chunk in range(14, 24))]
)
def test_seeds(chunk, mode):
    failed = []
    for seed in range(chunk * CHUNK, (chunk + 1) * CHUNK):
        try:
            run(seed, mode)
        except AssertionError as error:
            failed.append(f"seed {seed}: {error}")
    if failed:
        first_lines = "\n".join(message.splitlines()[0] for message in failed)
        pytest.fail(
            f"{len(failed)} of {CHUNK} seeds; the first of them:\n{failed[0]}\n\nall:\n{first_lines}", pytrace=False
        )


@pytest.mark.parametrize("seed", [1215, 4834, 5041])
def test_seeds_that_have_failed(seed):
    run(seed, "step")


@MODES
@pytest.mark.parametrize("seed", range(10))
def test_penalties_on_gradients(seed, mode):
    check_gradient_penalty(seed, mode)


FAULTS = {
    "more damping": lambda options: {n: 1.01 * v if "damping" in n else v for n, v in options.items()},
    "another divisor": lambda options: options | {"loss_reduction": 3.21},
    "not attached": None,
}


@MODES
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(monkeypatch, fault, mode):
    """A library that is slightly wrong fails on most seeds."""
    attach, spoil = consequent.attach, FAULTS[fault]

    def spoiled(optimizer, model, **options):
        return None if spoil is None else attach(optimizer, model, **spoil(options))

    monkeypatch.setattr(consequent, "attach", spoiled)
    assert failures(range(20), mode) >= 12  # in some of them all gradients are zero


FAULTS_OF_AVERAGES = {
    "none": {"averaging": 0.0, "refresh": 1},
    "a slower one": {"averaging": 0.91},
    "a rarer one": {"refresh": 4},
}


@pytest.mark.parametrize("fault", FAULTS_OF_AVERAGES)
def test_a_fault_of_averages_is_found(monkeypatch, fault):
    """Where layers have more rows than columns, at more than one step."""
    seeds = [seed for seed in range(60) if Case(seed, "step").averaging == (0.9, 1)]
    assert len(seeds) > 2
    attach = consequent.attach
    monkeypatch.setattr(
        consequent, "attach", lambda o, m, **options: attach(o, m, **(options | FAULTS_OF_AVERAGES[fault]))
    )
    assert failures(seeds, "step") > len(seeds) / 2


def at_once(self, records, damping_of):
    APPLY(self, records, damping_of)
    self.step_taken()


APPLY = Averages.apply
FAULTS_OF_LONG_RUNS = {
    "averages are lost when they are loaded": ("reloaded", "load_state_dict", lambda self, state, weights: None),
    "steps that are not taken count": ("spoilt", "apply", at_once),
}


@pytest.mark.parametrize("fault", FAULTS_OF_LONG_RUNS)
def test_a_fault_of_averages_in_long_runs_is_found(monkeypatch, fault):
    kind, name, wrong = FAULTS_OF_LONG_RUNS[fault]
    seeds = [seed for seed in range(300) if Case(seed, "step").averaging in ((0.5, 1), (0.9, 1))]
    seeds = [seed for seed in seeds if any(getattr(step, kind) for step in Case(seed, "step").actions[1:-1])]
    assert len(seeds) > 5
    monkeypatch.setattr(Averages, name, wrong)
    assert failures(seeds, "step") > len(seeds) / 3


@MODES
def test_a_fault_of_groups_is_found(monkeypatch, mode):
    """The dampings of parameter groups are not looked at."""
    seeds = [seed for seed in range(40) if Case(seed, mode).own_dampings]
    assert len(seeds) > 2
    monkeypatch.setattr(Groups, "damping_of", lambda self, parameter: self.default)
    assert failures(seeds, mode) > len(seeds) / 3


@MODES
def test_a_fault_of_units_is_found(monkeypatch, mode):
    """Of modules with several products inside, in loops with nothing but theirs wrong."""
    seeds = [seed for seed in range(100) if Case(seed, mode).net.kind == "units"]
    assert len(seeds) > 10
    right = JointInputs.solve_for

    def wrong(self, gradients, damping, **options):
        return right(self, gradients, replace(damping, value=1.01 * damping.value), **options)

    monkeypatch.setattr(JointInputs, "solve_for", wrong)
    assert failures(seeds, mode) > len(seeds) / 2


def failures(seeds, mode):
    """How many of the seeds fail."""
    found = 0
    for seed in seeds:
        try:
            run(seed, mode)
        except AssertionError:
            found += 1
    return found
