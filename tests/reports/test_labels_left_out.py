"""Labels that are ignored or left out of a mean are told of once; where all count nothing is said."""

import re

import pytest
import torch
from doubtful_losses import CLASSES, INPUTS, LABELS, SEQUENCES, TARGETS, Tokens, dense, of_classes, warnings_of
from torch import nn
from torch.nn import functional

SOME = torch.tensor([0, 1, -100, 3, -100])
MASK = SOME >= 0
FEWER = {
    "ignored": lambda z: functional.cross_entropy(z, SOME),
    "module": lambda z: nn.CrossEntropyLoss()(z, SOME),
    "smoothed": lambda z: functional.cross_entropy(z, SOME, label_smoothing=0.1),
    "weights": lambda z: functional.cross_entropy(z, SOME, weight=torch.arange(1.0, 5.0)),
    "another-index-and-a-weight-of-zero": lambda z: functional.cross_entropy(
        z, SOME.clamp(min=0), weight=torch.tensor([1.0, 1, 1, 0]), ignore_index=1
    ),
    "nll": lambda z: functional.nll_loss(z.log_softmax(1), SOME),
    "scaled": lambda z: 1000 * functional.cross_entropy(z, SOME),
    "a-mask": lambda z: functional.cross_entropy(z[MASK], SOME[MASK]),
    "chosen": lambda z: functional.cross_entropy(z.index_select(0, torch.tensor([0, 1, 4])), SOME[[0, 1, 3]]),
    "a-mask-of-losses": lambda z: functional.cross_entropy(z, SOME.clamp(min=0), reduction="none")[MASK].mean(),
    "a-mask-of-numbers": lambda z: (z[:, 0] - TARGETS[:, 0])[MASK].square().mean(),
}
ALL_COUNT = {
    "classes": of_classes,
    "divided-by-all": lambda z: functional.cross_entropy(z, SOME, reduction="sum") / 5,
    "a-mask-divided-by-all": lambda z: (functional.cross_entropy(z, CLASSES, reduction="none") * MASK).sum() / 5,
    "class-weights": lambda z: of_classes(z, weight=torch.arange(1.0, 5.0)),
    "satisfied-margins": lambda z: functional.relu(-9 - z[torch.arange(5), CLASSES]).mean() + 0 * z.sum(),
    "chosen-outputs": lambda z: functional.mse_loss(z[torch.arange(5), CLASSES], TARGETS[:, 0]),
    "none-counts": lambda z: 0 * z.sum() + functional.cross_entropy(z, torch.full((5,), -100)).nan_to_num(),
}


@pytest.mark.parametrize("at", ["step", "backward"])
@pytest.mark.parametrize("name", FEWER)
def test_labels_that_are_ignored_or_left_out_are_told_of_once(name, at):
    (message,) = warnings_of(dense(4), lambda model: FEWER[name](model(INPUTS)), at=at)
    assert re.search(r"mean over 5 samples.*; but it is one over 3 of them only.*loss_reduction=criterion", message)
    assert "steps are 1.67 times too long" in message
    assert warnings_of(dense(4), lambda model: FEWER[name](model(INPUTS)), at=at, loss_reduction=3) == []


@pytest.mark.parametrize("at", ["step", "backward"])
@pytest.mark.parametrize("name", ALL_COUNT)
def test_where_all_labels_count_nothing_is_said(name, at):
    assert warnings_of(dense(4), lambda model: ALL_COUNT[name](model(INPUTS)), at=at) == []


@pytest.mark.parametrize("flat", [True, False])
def test_tokens_that_are_ignored_are_told_of(flat):
    labels = LABELS.clone()
    labels[:, 4:] = -100

    def loss_of(model, labels=labels):
        outputs = model(SEQUENCES)
        if flat:
            return functional.cross_entropy(outputs.view(-1, 5), labels.view(-1))
        return functional.cross_entropy(outputs.mT, labels)

    (message,) = warnings_of(Tokens(), loss_of, loss_reduction="tokens")
    assert re.search(r"all 24 positions of the outputs \[4, 6, 5\]; but it is one over 16 of them only", message)
    assert "steps are 1.5 times too long" in message
    assert "loss_reduction=criterion" in message
    assert warnings_of(Tokens(), lambda m: loss_of(m, LABELS), loss_reduction="tokens") == []
    for some in (LABELS[:, -1:], LABELS[:1, -2:]):  # where the next token is the label the last has none; and a few
        few = LABELS.clone()
        few[: len(some), -some.size(1) :] = -100
        assert warnings_of(Tokens(), lambda m, few=few: loss_of(m, few), loss_reduction="tokens") == []


def test_so_are_labels_where_the_function_was_given():
    loss_of = FEWER["ignored"]
    (message,) = warnings_of(dense(4), lambda m: loss_of(m(INPUTS)), loss_reduction=functional.cross_entropy)
    assert "all 5 positions of the outputs [5, 4]; but it is one over 3 of them only" in message


def test_a_criterion_that_was_given_counts_itself():
    criterion = nn.CrossEntropyLoss()
    assert warnings_of(dense(4), lambda m: criterion(m(INPUTS), SOME), loss_reduction=criterion) == []


def test_in_float16_a_gradient_of_zero_may_be_rounding():
    model = nn.Sequential(dense(4), Halved())
    assert warnings_of(model, lambda m: functional.cross_entropy(m(INPUTS).float(), SOME)) == []


class Halved(nn.Module):
    def forward(self, x):
        return x.half()
