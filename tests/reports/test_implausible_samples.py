"""An N that can hardly be what the loss was averaged over is told of once; ordinary models are left in peace."""

import re

import pytest
import torch
from doubtful_losses import LABELS, SEQUENCES, Tokens, cross_entropy, warnings_of
from torch import nn
from torch.nn import functional

SOME_TOKENS = rf"over all positions.* {int((LABELS != 1).sum()) / 4:g} times too short"


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


IMPLAUSIBLE = {
    "sequence first": (
        LastStep,
        lambda m: m(torch.randn(9, 4, 3)).square().mean(),
        r"9 samples.*\[4, 2\].* 2\.25 times too long",
    ),
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
        r"1 sample,.*over all positions .* of the outputs \[1, 6, 5\].* 6 times too short",
    ),
    "flattened tokens": (
        lambda: Tokens(lambda z: z.flatten(0, 1)),
        lambda m: functional.cross_entropy(m(SEQUENCES), LABELS.flatten()),
        r"4 samples.*\[24, 5\]: if it is one over these 24, steps are 6 times too short",
    ),
    "tokens": (
        Tokens,
        lambda m: cross_entropy(m(SEQUENCES)),
        r'over all positions .* of the outputs \[4, 6, 5\].* 6 times too short.*"tokens"',
    ),
    "some tokens": (Tokens, lambda m: cross_entropy(m(SEQUENCES), ignore_index=1), SOME_TOKENS),
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
        r"over all positions .* \[4, 5, 6, 6\].* 36 times too short",
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
    "sequences without a token": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Flatten(0, 1), nn.Linear(4, 2)),
        lambda m: m(torch.randn(4, 0, 3)).sum(),
    ),
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
