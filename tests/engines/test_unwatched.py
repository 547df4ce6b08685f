"""The sample side without looking, on a CPU that is treated like a GPU in full flight."""

import copy

import pytest
import torch
from torch import nn

import consequent
from consequent.engines import step as rewrite
from consequent.reports.counters import Counters


class Twice(nn.Module):
    """A layer that is called twice, so that its rows come from two uses."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, inputs):
        return self.layer(torch.relu(self.layer(inputs)))


def perceptron():
    return nn.Sequential(nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 50, bias=False), nn.ReLU(), nn.Linear(50, 12))


def repeated():
    return nn.Sequential(nn.Linear(30, 40), nn.ReLU(), Twice(nn.Linear(40, 40)), nn.Linear(40, 12))


def images():
    convolutions = [nn.Conv2d(30, 20, 1, groups=2), nn.ReLU(), nn.Conv2d(20, 18, 1)]
    return nn.Sequential(nn.Unflatten(1, (30, 1, 1)), *convolutions, nn.Flatten(), nn.Linear(18, 12))


MODELS = [perceptron, repeated, images]


def gradients(model, monkeypatch, *, busy, change=None, bad=False, twice=False, **options):
    """The corrected gradients of a second step, and the counters."""
    model = copy.deepcopy(model).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    correction = consequent.attach(optimizer, model, **(options or {"damping": 0.1}))
    generator = torch.Generator().manual_seed(1)
    for step in range(2):
        inputs = torch.randn(6, 30, generator=generator, dtype=torch.float64)
        if bad and step == 1:
            inputs[2, 3] = float("nan")
        if twice and step == 1:
            inputs[4] = inputs[2]
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        if step == 0:
            optimizer.step()
    if change is not None:
        change(model)
    with monkeypatch.context() as patch:
        if busy:
            patch.setattr(rewrite, "answers_at_once", lambda tensor: False)
        correction.step()
    return {name: p.grad.clone() for name, p in model.named_parameters()}, correction.counters


def clipped(model):
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


@pytest.mark.parametrize("options", [{"damping": 0.1}, {"damping": 3.0}, {"relative_damping": 0.1}], ids=str)
@pytest.mark.parametrize("change", [None, clipped])
@pytest.mark.parametrize("make", MODELS)
def test_it_gives_what_looking_gives(monkeypatch, make, change, options):
    model = make()
    expected, _ = gradients(model, monkeypatch, busy=False, change=change, **options)
    actual, counters = gradients(model, monkeypatch, busy=True, change=change, **options)
    for name, gradient in expected.items():
        assert torch.allclose(actual[name], gradient, rtol=1e-8, atol=1e-10 * gradient.norm().item()), name
    assert counters == Counters(steps=2)


def test_an_edited_gradient_is_shortened_and_counted_and_others_are_not(monkeypatch):
    def edited(model):
        model[2].weight.grad[3:] = 0

    model = perceptron()
    plain = {}

    def note(model):
        edited(model)
        plain.update({name: p.grad.clone() for name, p in model.named_parameters()})

    expected, _ = gradients(model, monkeypatch, busy=False)
    actual, counters = gradients(model, monkeypatch, busy=True, change=note)
    assert counters == Counters(steps=2, edited=1)
    for name in expected:
        if name == "2.weight":
            share = actual[name].norm() / plain[name].norm()
            assert torch.allclose(actual[name], share * plain[name])
            assert 0 < share < 6 / 0.1
        else:
            assert torch.allclose(actual[name], expected[name])


@pytest.mark.parametrize("make", MODELS)
def test_nan_zeroes_everything_and_is_counted(monkeypatch, make):
    actual, counters = gradients(make(), monkeypatch, busy=True, bad=True)
    assert not any(gradient.any() for gradient in actual.values())
    assert counters == Counters(steps=2, skipped=1)


def test_a_sample_that_is_there_twice_gets_more_damping_and_is_counted(monkeypatch):
    """With λ below the rounding errors of float64; both samples want the same."""
    model = perceptron()
    expected, _ = gradients(model, monkeypatch, busy=False, twice=True, damping=1e-9)
    actual, counters = gradients(model, monkeypatch, busy=True, twice=True, damping=1e-17)
    assert counters == Counters(steps=2, rescued=3)
    for name, gradient in expected.items():
        assert (actual[name] - gradient).norm() < 1e-6 * gradient.norm(), name


def test_a_matrix_that_cannot_be_factorised_is_counted(monkeypatch):
    model = perceptron()
    plain = {}

    def note(model):
        plain.update({name: p.grad.clone() for name, p in model.named_parameters()})
        monkeypatch.setattr(torch.linalg, "cholesky_ex", failing)

    real = torch.linalg.cholesky_ex

    def failing(matrix):
        factor, info = real(matrix)
        return factor * float("nan"), torch.ones_like(info)

    actual, counters = gradients(model, monkeypatch, busy=True, change=note)
    assert counters == Counters(steps=2, fallen_back=3)
    for name, gradient in plain.items():
        share = actual[name].norm() / gradient.norm()
        assert torch.allclose(actual[name], share * gradient)


def test_layers_of_half_precision_are_not_measured_by_a_layer_of_full_precision(monkeypatch):
    """Rounded gradients beside exact ones, of one batch size, are no edits."""
    torch.manual_seed(0)
    body, head = nn.Sequential(nn.Linear(300, 200), nn.ReLU(), nn.Linear(200, 100)), nn.Linear(100, 12)
    model = nn.ModuleList([body, head])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    correction = consequent.attach(optimizer, model, damping=0.1)
    for step in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            hidden = body(torch.randn(20, 300))
        head(hidden.float()).square().mean().backward()
        with monkeypatch.context() as patch:
            if step > 0:
                patch.setattr(rewrite, "answers_at_once", lambda tensor: False)
            optimizer.step()
    assert correction.counters == Counters(steps=4)
