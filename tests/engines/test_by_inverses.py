"""Weights with kept inverses, those of one shape together, against one after the other; looked at, and not."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import consequent
from consequent.engines import step as rewrite
from consequent.engines.by_inverses import ByInverses
from consequent.engines.plain import Plain
from consequent.statistics import averages, kept_inverses
from consequent.statistics import together as going_together

SIZES = (9, 9, 5, 9, 14, 9, 9)  # of batches: other ones than those that the inverses are for come in between


class ByTurns(nn.Module):
    """Layers of one shape, of which each call leaves out another one."""

    def __init__(self, width):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.calls = 0

    def forward(self, inputs):
        left_out, self.calls = self.calls % 4, self.calls + 1
        for number, layer in enumerate(self.layers):
            inputs = inputs if number == left_out else torch.tanh(layer(inputs))
        return inputs


def perceptron(width):
    """Three layers of one shape, one that shares its inputs' width alone, and one without a bias."""
    hidden = [module for _ in range(3) for module in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(
        nn.Linear(6, width), nn.Tanh(), *hidden, nn.Linear(width, width, bias=False), nn.Linear(width, 2)
    )


def images(width):
    body = [nn.Conv2d(width, width, 3, padding=1, groups=2) for _ in range(3)]
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, width, 1), *body, nn.Flatten(), nn.Linear(6 * width, 2)
    )


def by_turns(width):
    return nn.Sequential(nn.Linear(6, width), ByTurns(width), nn.Linear(width, 2))


MODELS = [perceptron, images, by_turns]


def trained(make, width, monkeypatch, *, engines, busy, bad_step=None, **options):
    """The weights after some steps, and what was counted."""
    torch.manual_seed(width)
    model = make(width).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    generator = torch.Generator().manual_seed(1)
    with monkeypatch.context() as patch:
        patch.setattr(rewrite, "ENGINES", engines)
        if busy:
            patch.setattr(rewrite, "answers_at_once", lambda tensor: False)
        correction = consequent.attach(optimizer, model, averaging=0.8, refresh=3, **options)
        for step, size in enumerate(SIZES):
            inputs = torch.randn(size, 6, generator=generator, dtype=torch.float64)
            if step == bad_step:
                inputs[2, 3] = float("nan")
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}, correction.counters


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize(
    "options", [{"bound": None}, {"bound": 1e-3}, {"damping": 0.3}, {"relative_damping": 1.0, "bound": 0.05}], ids=str
)
@pytest.mark.parametrize("width", [4, 10])
@pytest.mark.parametrize("make", MODELS)
@pytest.mark.usefixtures("bounded")
def test_it_gives_what_one_after_the_other_gives(monkeypatch, make, width, options, busy):
    taken = []
    solve = ByInverses.solve
    monkeypatch.setattr(ByInverses, "solve", lambda self, works: taken.append(len(works)) or solve(self, works))
    with monkeypatch.context() as one_by_one:
        one_by_one.setattr(going_together, "AT_ONCE", 1)
        expected, its_counters = trained(make, width, monkeypatch, engines=(Plain,), busy=False, **options)
    actual, counters = trained(make, width, monkeypatch, engines=(ByInverses, Plain), busy=busy, **options)
    assert len(taken) == len(SIZES)
    for name, weight in expected.items():
        torch.testing.assert_close(
            actual[name], weight, rtol=1e-8, atol=1e-10, msg=lambda text, name=name: f"{name} {text}"
        )
    assert counters == its_counters
    if options.get("bound") == 1e-3:
        assert counters.bounded > 0


@pytest.mark.parametrize("busy", [False, True])
def test_weights_of_one_shape_are_inverted_together(monkeypatch, busy):
    inverted, invert = [], averages.invert
    monkeypatch.setattr(
        averages, "invert", lambda moments, level: inverted.append(len(moments)) or invert(moments, level)
    )
    trained(perceptron, 10, monkeypatch, engines=(ByInverses, Plain), busy=busy)
    assert sorted(inverted[:3]) == [1, 1, 4]
    assert len(inverted) == 9  # three refreshes
    monkeypatch.setattr(going_together, "AT_ONCE", 2 * 11**2)
    inverted.clear()
    trained(perceptron, 10, monkeypatch, engines=(ByInverses, Plain), busy=busy)
    assert sorted(inverted[:4]) == [1, 1, 2, 2]


@pytest.mark.parametrize("step", [0, 1, 3])
@pytest.mark.parametrize("busy", [False, True])
def test_nan_is_a_step_that_is_not_taken(monkeypatch, busy, step):
    with pytest.warns(consequent.ConsequentWarning, match="NaN or inf") if not busy else nullcontext():
        weights, counters = trained(perceptron, 10, monkeypatch, engines=(ByInverses, Plain), busy=busy, bad_step=step)
    assert counters.skipped == 1
    assert all(weight.isfinite().all() for weight in weights.values())


@pytest.mark.parametrize("busy", [False, True])
def test_what_cannot_be_factorised_gets_a_shortened_plain_gradient(monkeypatch, busy):
    real = kept_inverses.inverse_factor

    def failing(matrix, level, **options):
        found = real(matrix, level, **options)
        found.status[..., 2] = 0
        found.inverse.fill_(float("nan"))
        return found

    monkeypatch.setattr(kept_inverses, "inverse_factor", failing)
    options = {"bound": None, "engines": (ByInverses, Plain)}
    with pytest.warns(consequent.ConsequentWarning, match="could not be factorised") if not busy else nullcontext():
        _, counters = trained(perceptron, 4, monkeypatch, busy=busy, **options)
    assert counters.fallen_back == 6 * len(SIZES)
