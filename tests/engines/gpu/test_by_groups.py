"""Dense layers with many rows, at the step: those of one shape together, against one layer after the other."""

import copy
from itertools import pairwise

import pytest
import torch
from recorder import Recorder
from torch import nn

pytest.importorskip("triton")

import consequent
from consequent.engines.engine import Outcome, Work
from consequent.engines.gpu import kernels
from consequent.engines.gpu.by_groups import ByGroups
from consequent.engines.gpu.kernels import dense
from consequent.engines.gpu.recordings import Replays
from consequent.engines.gpu.row_launches import RowLaunches
from consequent.maths.damping import Damping
from consequent.reports.counters import NAMES

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _by_kernels(monkeypatch):
    monkeypatch.setattr(kernels, "run_on", lambda device: True)
    monkeypatch.setattr(dense, "MOST_ROWS", 3)


def network(*, bias=True):
    torch.manual_seed(0)
    widths = [20, 24, 24, 24, 9]
    layers = [nn.Linear(*pair, bias=bias) for pair in pairwise(widths)]
    return nn.Sequential(*[part for layer in layers for part in (layer, nn.Tanh())]).to(DEVICE)


def passed(model, damping, x):
    """The works of a step whose backward pass is over; keep the optimiser."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    name = "relative_damping" if damping.relative else "damping"
    correction = consequent.attach(optimizer, model, **{name: damping.value})
    model(x).square().mean().backward()
    records = correction._parts.corrector.filled_records()
    return optimizer, correction, records


def data(rows=7):
    return torch.randn(rows, 20, generator=torch.Generator().manual_seed(1)).to(DEVICE)


def expected(model, damping, x, change=lambda model: None, scale=5.0, limit=None):
    """By the plain engine in float64 on the CPU."""
    from consequent.engines.bounding import Bounded, shorten
    from consequent.engines.plain import Plain

    other = copy.deepcopy(model).cpu().double()
    kept, _, records = passed(other, damping, x.cpu().double())
    change(other)
    works = [Work(record, damping, True, scale, limit) for record in records]
    solutions = Plain().solve(works)
    if limit is not None:
        shorten([Bounded(solution, solution.change, limit, True) for solution in solutions])
    for solution in solutions:
        solution.write(True)
    del kept
    return {name: p.grad for name, p in other.named_parameters()}


def solved(model, damping, x, change=lambda model: None, scale=5.0, limit=None, finite=True, engine=None):
    kept, correction, records = passed(model, damping, x)
    change(model)
    engine = engine or ByGroups()
    with torch.no_grad():
        solutions = engine.solve([Work(record, damping, False, scale, limit) for record in records])
        counts = torch.zeros(len(NAMES), dtype=torch.int64, device=DEVICE)
        is_finite = torch.stack([torch.as_tensor(s.finite, device=DEVICE) for s in solutions]).all()
        engine.write(solutions, Outcome(is_finite if finite is None else finite, lambda device: counts, False, False))
    correction.detach()
    del kept
    assert len(solutions) == len(records)
    gradients = {name: p.grad.cpu().double() for name, p in model.named_parameters()}
    return gradients, dict(zip(NAMES, counts.tolist(), strict=True)), bool(is_finite)


def assert_same(found, wanted, tolerance=2e-4):
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert (found[name] - gradient).norm() <= tolerance * gradient.norm(), name


@pytest.mark.parametrize("damping", [Damping(0.1), Damping(0.05, relative=True)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_the_gradients_of_one_layer_after_the_other(damping, bias):
    model, x = network(bias=bias), data()
    wanted = expected(model, damping, x)
    found, counts, is_finite = solved(model, damping, x)
    assert_same(found, wanted)
    assert is_finite
    assert set(counts.values()) == {0}


def test_gradients_that_were_scaled_and_one_that_was_edited():
    def change(model):
        for parameter in model.parameters():
            parameter.grad *= 0.25
        model[2].weight.grad[0] = 1.0

    model, x, damping = network(), data(), Damping(0.1)
    wanted = expected(model, damping, x, change)
    found, counts, _ = solved(model, damping, x, change)
    assert_same(found, wanted)
    assert counts["edited"] == 1


def test_a_change_that_is_too_large_is_shortened():
    model, x, damping = network(), data(), Damping(0.1)
    free, limited = expected(model, damping, x), expected(model, damping, x, limit=2e-3)
    shortened = [name for name, gradient in limited.items() if gradient.norm() < 0.99 * free[name].norm()]
    assert 0 < len(shortened) < len(free)  # otherwise this shows nothing
    found, counts, _ = solved(model, damping, x, limit=2e-3)
    assert_same(found, limited)
    assert counts["bounded"] == len(shortened) / 2


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in the interpreter
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_zeroes_all(bad):
    model, x = network(), data()
    x[0, 0] = bad
    found, counts, is_finite = solved(model, Damping(0.1), x, finite=None)
    assert not is_finite
    assert all((gradient == 0).all() for gradient in found.values())
    assert set(counts.values()) == {0}


def test_recorded_launches_read_what_is_there_now(monkeypatch):
    """New rows, gradients and limits at every step, and batches of two sizes."""
    if DEVICE.type == "cpu":
        replays = Replays(Recorder(), 2**30)
        monkeypatch.setattr(RowLaunches, "_replays_on", lambda self, device: replays)
    model, damping, engine = network(), Damping(0.1), ByGroups()
    Recorder.replayed = 0
    for step in range(10):
        x = torch.randn(7 if step % 3 else 5, 20, generator=torch.Generator().manual_seed(step)).to(DEVICE)
        limit = 1e-3 * (1 + step)

        def change(model, step=step):
            if step in (4, 7):
                model[2].weight.grad[0] = 1.0

        model.zero_grad()
        wanted = expected(model, damping, x, change, limit=limit)
        found, counts, is_finite = solved(model, damping, x, change, limit=limit, engine=engine)
        assert_same(found, wanted)
        assert is_finite
        assert counts["edited"] == (step in (4, 7))
    if DEVICE.type == "cpu":
        assert Recorder.replayed >= 3
