"""Muon, SOAP and Lion as bases: they get the gradients that any optimiser would get, and train on."""

import copy

import pytest
import reference
import torch
from models.expected import check_same_grads, expected_backward, half_squares, twin_of
from torch import nn

import consequent

pytorch_optimizer = pytest.importorskip("pytorch_optimizer")
NEWTON_MUON = {"relative_damping": 0.2, "averaging": 0.95, "refresh": 32}


def muon_and_adamw(model, lr):
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    return [torch.optim.Muon(matrices, lr=lr), torch.optim.AdamW(rest, lr=lr)]


def soap(model, lr):
    return [pytorch_optimizer.SOAP(model.parameters(), lr=lr, precondition_frequency=2)]


def lion(model, lr):
    return [pytorch_optimizer.Lion(model.parameters(), lr=lr)]


BASES = {"Muon": muon_and_adamw, "SOAP": soap, "Lion": lion}
bases = pytest.mark.parametrize("make", BASES.values(), ids=BASES)
modes = pytest.mark.parametrize("at", ["step", "backward"])


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3)).double()


def inputs(samples, seed):
    return torch.randn(samples, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def train(model, optimizers, seeds, samples=20):
    for seed in seeds:
        model.zero_grad()
        half_squares(model(inputs(samples, seed))).backward()
        for optimizer in optimizers:
            optimizer.step()


def given_to(optimizers, model):
    """A list that fills with the gradients as the first of the optimisers finds them."""
    found = []

    def note(*_):
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})

    optimizers[0].register_step_pre_hook(note)
    return found


@bases
@modes
@pytest.mark.parametrize("samples", [3, 20])
def test_the_gradients_are_those_of_plain_sgd_and_of_the_reference(samples, at, make):
    model = make_model()
    optimizers = make(model, 0.01)
    consequent.attach(optimizers, model, at=at)
    found = given_to(optimizers, model)
    for seed in range(4):
        twin, third = twin_of(model), twin_of(model)
        train(model, optimizers, [seed], samples)
        damping = reference.DEFAULT_DAMPING_OF_OTHERS
        expected_backward(twin, lambda m, seed=seed: half_squares(m(inputs(samples, seed))), samples, damping)
        sgd = torch.optim.SGD(third.parameters(), lr=0.01)
        consequent.attach(sgd, third, at=at, **reference.damping_options(damping))
        train(third, [sgd], [seed], samples)
        for name, p in model.named_parameters():
            p.grad = found[-1][name]
        check_same_grads(model, twin)
        check_same_grads(model, third, rtol=1e-12, atol=1e-14)


@bases
@modes
def test_the_step_is_the_bases_own(make, at):
    """A plain one that is handed the same gradients ends at the same weights."""
    model = make_model()
    twin = twin_of(model)
    optimizers, plain = make(model, 0.01), make(twin, 0.01)
    consequent.attach(optimizers, model, at=at)
    found = given_to(optimizers, model)
    for seed in range(5):
        train(model, optimizers, [seed])
        for name, p in twin.named_parameters():
            p.grad = found[-1][name]
        for optimizer in plain:
            optimizer.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)


@bases
def test_training_goes_on(make):
    model = make_model()
    optimizers = make(model, 0.03)
    correction = consequent.attach(optimizers, model)
    x = inputs(20, 0)
    before = half_squares(model(x)).item()
    train(model, optimizers, [0] * 60)
    assert half_squares(model(x)).item() < 0.5 * before
    assert correction.counters.steps == 60
    assert correction.counters.skipped == correction.counters.edited == 0


@bases
@pytest.mark.parametrize("options", [{}, NEWTON_MUON], ids=["default", "Newton-Muon"])
def test_an_interrupted_training_goes_on_as_if_nothing_had_been(make, options):
    def begin():
        model = make_model()
        optimizers = make(model, 0.01)
        return model, optimizers, consequent.attach(optimizers, model, **options)

    model, optimizers, correction = begin()
    train(model, optimizers, range(3))
    saved = copy.deepcopy([part.state_dict() for part in (model, *optimizers, correction)])
    train(model, optimizers, range(3, 6))
    other, theirs, its_correction = begin()
    for part, state in zip((other, *theirs, its_correction), saved, strict=True):
        part.load_state_dict(state)
    train(other, theirs, range(3, 6))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


@bases
def test_the_bound_leaves_them_alone(make, bounded):
    weights = []
    for bound in (1e-6, None):
        model = make_model()
        optimizers = make(model, 0.03)
        correction = consequent.attach(optimizers, model)
        correction.load_state_dict({**correction.state_dict(), "bound": bound})
        train(model, optimizers, range(3))
        assert correction.counters.bounded == 0
        assert (bound is None) or "bound: off" in repr(correction)
        weights.append([p.detach() for p in model.parameters()])
    assert all(torch.equal(p, q) for p, q in zip(*weights, strict=True))


@bases
@pytest.mark.filterwarnings("ignore::consequent.ConsequentWarning")
def test_nan_changes_nothing_and_training_goes_on(make):
    model = make_model()
    optimizers = make(model, 0.01)
    correction = consequent.attach(optimizers, model)
    train(model, optimizers, range(2))
    before = twin_of(model)
    model.zero_grad()
    half_squares(model(torch.nan * inputs(4, 0))).backward()
    for optimizer in optimizers:
        optimizer.step()
    for p, q in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.equal(p, q)
    assert correction.counters.skipped == 1
    train(model, optimizers, [2])
    assert all(p.isfinite().all() for p in model.parameters())
    assert not torch.equal(model[0].weight, before[0].weight)
