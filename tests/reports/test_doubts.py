"""An N that can hardly be what the loss was averaged over is told of once; ordinary models are left in peace."""

import gc
import re
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional

import consequent


def warnings_of(model, loss_of, steps=2, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    consequent.attach(optimizer, model, damping=0.1, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
    return [str(warning.message) for warning in caught if warning.category is consequent.ConsequentWarning]


class LastState(nn.Module):
    """Of inputs [time, batch, features]: one output for each sample."""

    def __init__(self):
        super().__init__()
        self.recurrent = nn.RNN(3, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.recurrent(x)[0][-1])


class LastStep(nn.Module):
    """The same without a layer that knows which dimension is which."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        return self.head(x)[-1]


class Graph(nn.Module):
    """Edges [2, edges] come first."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, edges, nodes):
        return torch.zeros(len(nodes), 2).index_add(0, edges[0], self.layer(nodes)[edges[1]])


class AtATime(nn.Module):
    """One number for all samples comes first."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, time, x):
        return self.layer(x) * time


class Tokens(nn.Module):
    """A vector of logits for every token."""

    def __init__(self, pick=lambda z: z):
        super().__init__()
        self.table, self.head, self.pick = nn.Embedding(7, 3), nn.Linear(3, 5), pick

    def forward(self, tokens):
        return self.pick(self.head(self.table(tokens)))


torch.manual_seed(0)
SEQUENCES, LABELS = torch.randint(0, 7, (4, 6)), torch.randint(0, 5, (4, 6))


def cross_entropy(outputs, **options):
    return functional.cross_entropy(outputs.mT, LABELS, **options)


IMPLAUSIBLE = {
    "sequence first": (LastStep, lambda m: m(torch.randn(9, 4, 3)).square().mean(), r"9 samples.*\[4, 2\]"),
    "edges first": (
        Graph,
        lambda m: m(torch.randint(0, 5, (2, 8)), torch.randn(5, 3)).square().mean(),
        r"2 samples.*\[2, 8\].*\[5, 2\]",
    ),
    "one number first": (
        AtATime,
        lambda m: m(torch.rand(1), torch.randn(5, 3)).square().mean(),
        r"1 sample,.*shape \[1\].*\[5, 2\]",
    ),
    "the tokens of one sequence": (
        Tokens,
        lambda m: functional.cross_entropy(m(SEQUENCES[:1]).mT, LABELS[:1]),
        r"1 sample,.*over all positions .* of the outputs \[1, 6, 5\]",
    ),
    "flattened tokens": (
        lambda: Tokens(lambda z: z.flatten(0, 1)),
        lambda m: functional.cross_entropy(m(SEQUENCES), LABELS.flatten()),
        r"4 samples.*\[24, 5\]",
    ),
    "tokens": (
        Tokens,
        lambda m: cross_entropy(m(SEQUENCES)),
        r'over all positions .* of the outputs \[4, 6, 5\].*"tokens"',
    ),
    "some tokens": (Tokens, lambda m: cross_entropy(m(SEQUENCES), ignore_index=1), r"over all positions"),
    "logits": (
        lambda: Tokens(lambda z: {"loss": z.sum(), "logits": z}),
        lambda m: cross_entropy(m(SEQUENCES)["logits"]),
        r"over all positions",
    ),
    "time steps of numbers": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5)),
        lambda m: cross_entropy(m(torch.randn(4, 6, 3))),
        r"over all positions .* \[4, 6, 5\]",
    ),
    "pixels": (
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 5, 1)),
        lambda m: functional.cross_entropy(m(torch.randn(4, 1, 6, 6)), torch.randint(0, 5, (4, 6, 6))),
        r"over all positions .* \[4, 5, 6, 6\]",
    ),
}


@pytest.mark.parametrize("at", ["step", "backward"])
@pytest.mark.parametrize("name", IMPLAUSIBLE)
def test_implausible_samples_are_told_of_once(name, at):
    make, loss_of, message = IMPLAUSIBLE[name]
    (said,) = warnings_of(make(), loss_of, at=at)
    assert re.search(message, said), said
    assert "loss_reduction=criterion" in said


PLAUSIBLE = {
    "images": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2)),
        lambda m: m(torch.randn(5, 3, 4, 4)).square().mean(),
    ),
    "one image without a leading dimension": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()),
        lambda m: m(torch.randn(3, 4, 4)).square().mean(),
    ),
    "one grey image without a leading dimension": (
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU()),
        lambda m: m(torch.randn(1, 4, 4)).square().mean(),
    ),
    "one sample": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Flatten(0)),
        lambda m: m(torch.randn(1, 3)).square().mean(),
    ),
    "a vector": (lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU()), lambda m: m(torch.randn(3)).square().mean()),
    "a lone layer": (lambda: nn.Linear(3, 4), lambda m: m(torch.randn(6, 2, 3)).square().mean()),
    "a scalar": (lambda: Tokens(lambda z: z.square().mean()), lambda m: m(SEQUENCES)),
    "the last token": (Tokens, lambda m: functional.cross_entropy(m(SEQUENCES)[:, -1], LABELS[:, -1])),
    "a sum over tokens": (Tokens, lambda m: cross_entropy(m(SEQUENCES), reduction="sum") / 4),
    "vectors for tokens, and no cross-entropy": (Tokens, lambda m: m(SEQUENCES).square().mean()),
    "pixels, and no classes": (
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 1, 1)),
        lambda m: functional.mse_loss(m(torch.ones(4, 1, 6, 6)), torch.zeros(4, 1, 6, 6), reduction="sum") / 4,
    ),
    "a sum over pixels": (
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 5, 1)),
        lambda m: (
            functional.cross_entropy(m(torch.randn(4, 1, 6, 6)), torch.zeros(4, 6, 6).long(), reduction="sum") / 4
        ),
    ),
    "one sequence": (Tokens, lambda m: functional.cross_entropy(m(SEQUENCES[:1, :1])[0], LABELS[0, :1])),
    "classes": (Tokens, lambda m: functional.cross_entropy(m(SEQUENCES[:, 0]), LABELS[:, 0])),
    "sequence first, in a recurrent layer": (LastState, lambda m: m(torch.randn(9, 4, 3)).square().mean()),
    "parts": (LastState, lambda m: m.head(m.recurrent(torch.randn(9, 4, 3))[0][-1]).square().mean()),
}


@pytest.mark.parametrize("at", ["step", "backward"])
@pytest.mark.parametrize("name", PLAUSIBLE)
def test_ordinary_models_are_left_in_peace(name, at):
    make, loss_of = PLAUSIBLE[name]
    assert warnings_of(make(), loss_of, at=at) == []


@pytest.mark.parametrize(
    "reduction", ["tokens", "sum", 24, lambda samples: samples], ids=["tokens", "sum", "number", "function"]
)
def test_who_has_said_how_the_loss_sums_up_is_left_in_peace(reduction):
    assert warnings_of(Tokens(), lambda m: cross_entropy(m(SEQUENCES)), loss_reduction=reduction) == []


def dense(outputs):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, outputs))


INPUTS, TARGETS = torch.linspace(-1, 1, 30).view(5, 6), torch.linspace(0, 1, 20).view(5, 4)
ELEMENTS = r"over 5 samples.*; but it is one over all elements of the outputs \[5, 4\].*loss_reduction=criterion"
MEANS_OVER_ELEMENTS = {
    "mse": lambda model: functional.mse_loss(model(INPUTS), TARGETS),
    "module": lambda model: nn.MSELoss()(model(INPUTS), TARGETS),
    "smooth-l1": lambda model: functional.smooth_l1_loss(model(INPUTS), TARGETS),
    "huber": lambda model: functional.huber_loss(model(INPUTS), TARGETS),
    "many-labels": lambda model: functional.binary_cross_entropy_with_logits(model(INPUTS), TARGETS),
    "flat": lambda model: functional.mse_loss(model(INPUTS).view(-1), TARGETS.view(-1)),
    "in-another-type": lambda model: functional.mse_loss(model(INPUTS).double(), TARGETS.double()),
    "targets-first": lambda model: functional.mse_loss(TARGETS, model(INPUTS)),
    "a-part": lambda model: functional.mse_loss(model(INPUTS), TARGETS) / 4 + model[0].weight.square().sum(),
}
OTHER_LOSSES = {
    "sum": lambda model: functional.mse_loss(model(INPUTS), TARGETS, reduction="sum") / 5,
    "by-hand": lambda model: (model(INPUTS) - TARGETS).square().sum(1).mean(),
    "gathered": lambda model: functional.mse_loss(model(INPUTS)[:, 1], TARGETS[:, 1]),
    "classes": lambda model: functional.cross_entropy(model(INPUTS), torch.arange(5) % 4),
}


@pytest.mark.parametrize("at", ["step", "backward"])
@pytest.mark.parametrize("name", MEANS_OVER_ELEMENTS)
def test_a_mean_over_all_elements_is_told_of_once(name, at):
    (message,) = warnings_of(dense(4), MEANS_OVER_ELEMENTS[name], at=at)
    assert re.search(ELEMENTS, message)
    assert warnings_of(dense(4), MEANS_OVER_ELEMENTS[name], at=at, loss_reduction="mse") == []


def test_so_is_one_of_outputs_that_the_model_itself_has_reshaped():
    model = nn.Sequential(dense(4), nn.Unflatten(1, (2, 2)))
    (message,) = warnings_of(model, lambda model: functional.mse_loss(model(INPUTS), TARGETS.view(5, 2, 2)))
    assert "all elements of the outputs [5, 2, 2]" in message


def test_looking_for_it_keeps_nothing_alive():
    model = dense(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    consequent.attach(optimizer, model)
    gc.disable()
    try:
        loss = functional.mse_loss(model(INPUTS), TARGETS)
        held = weakref.ref(loss)
        loss.backward()
        del loss
        assert held() is None
    finally:
        gc.enable()


def test_so_is_a_mean_over_all_pixels():
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 1, 1))
    images = torch.ones(4, 1, 6, 6)
    (message,) = warnings_of(model, lambda model: functional.mse_loss(model(images), images))
    assert "all elements of the outputs [4, 1, 6, 6]" in message


@pytest.mark.parametrize("name", OTHER_LOSSES)
def test_other_losses_of_several_numbers_a_sample_are_left_in_peace(name):
    assert warnings_of(dense(4), OTHER_LOSSES[name]) == []


@pytest.mark.parametrize("outputs", [1, 2])
def test_a_mean_over_one_or_two_numbers_a_sample_is_nearly_one_over_samples(outputs):
    assert warnings_of(dense(outputs), lambda model: functional.mse_loss(model(INPUTS), TARGETS[:, :outputs])) == []
