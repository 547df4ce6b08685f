"""A sum over samples that nothing divides is told of once; who divides it is left in peace."""

import functools
import re

import pytest
import torch
from doubtful_losses import (
    CLASSES,
    INPUTS,
    SEQUENCES,
    TARGETS,
    Tokens,
    cross_entropy,
    dense,
    of_classes,
    warnings_of,
)
from torch import nn
from torch.nn import functional

import consequent

SUMMED = r"over 5 samples.*; but it is a sum over them.*5 times too long.*loss_reduction=\"sum\""


def focal(outputs):
    each = of_classes(outputs, reduction="none")
    return (1 - torch.exp(-each)).square() * each


def probabilities():
    return TARGETS / TARGETS.sum(1, keepdim=True)


SUMS = {
    "cross-entropy": lambda z: of_classes(z, reduction="sum"),
    "module": lambda z: nn.CrossEntropyLoss(reduction="sum")(z, CLASSES),
    "none-then-sum": lambda z: of_classes(z, reduction="none").sum(),
    "smoothed": lambda z: of_classes(z, reduction="sum", label_smoothing=0.1),
    "smoothed-and-weighted": lambda z: of_classes(z, reduction="sum", label_smoothing=0.1, weight=torch.ones(4)),
    "class-weights": lambda z: of_classes(z, reduction="sum", weight=torch.arange(1.0, 5.0)),
    "probabilities": lambda z: functional.cross_entropy(z, probabilities(), reduction="sum"),
    "nll": lambda z: functional.nll_loss(z.log_softmax(1), CLASSES, reduction="sum"),
    "by-hand": lambda z: -z.log_softmax(1).gather(1, CLASSES[:, None]).sum(),
    "by-index": lambda z: -z.log_softmax(1)[torch.arange(5), CLASSES].sum(0),
    "focal": lambda z: focal(z).sum(),
    "mse": lambda z: functional.mse_loss(z, TARGETS, reduction="sum"),
    "mse-none": lambda z: functional.mse_loss(z, TARGETS, reduction="none").sum(1).sum(),
    "squares-by-hand": lambda z: ((z - TARGETS) ** 2).sum(),
    "l1": lambda z: functional.l1_loss(z, TARGETS, reduction="sum"),
    "huber": lambda z: functional.huber_loss(z, TARGETS, reduction="sum"),
    "bce": lambda z: functional.binary_cross_entropy(z.sigmoid(), TARGETS, reduction="sum"),
    "bce-with-logits": lambda z: functional.binary_cross_entropy_with_logits(z, TARGETS, reduction="sum"),
    "kl": lambda z: functional.kl_div(z.log_softmax(1), probabilities(), reduction="sum"),
    "poisson": lambda z: functional.poisson_nll_loss(z, TARGETS, reduction="sum"),
    "margins": lambda z: functional.multi_margin_loss(z, CLASSES, reduction="sum"),
    "and-a-penalty": lambda z: of_classes(z, reduction="sum") + 0.001 * z.square().sum(),
    "ignored": lambda z: functional.cross_entropy(z, CLASSES, reduction="sum", ignore_index=1),
    "many-ways": lambda z: functools.reduce(lambda ones, _: ones * ones, range(24), z - z.detach() + 1).sum(),
}
NO_SUMS = {
    "mean": of_classes,
    "divided": lambda z: of_classes(z, reduction="sum") / 5,
    "divided-in-place": lambda z: of_classes(z, reduction="sum").div_(5),
    "multiplied": lambda z: of_classes(z, reduction="sum") * 0.2,
    "multiplied-from-the-left": lambda z: 0.2 * of_classes(z, reduction="sum"),
    "divided-by-a-tensor": lambda z: of_classes(z, reduction="none").sum() / torch.tensor(5),
    "divided-before": lambda z: (of_classes(z, reduction="none") / 5).sum(),
    "by-normalised-weights": lambda z: (torch.full((5,), 0.2) * of_classes(z, reduction="none")).sum(),
    "focal-by-weights": lambda z: (torch.full((5,), 0.2) * focal(z)).sum(),
    "focal-by-inner-weights": lambda z: ((0.2 * focal(z)) * of_classes(z, reduction="none")).sum(),
    "smoothed": lambda z: of_classes(z, reduction="sum", label_smoothing=0.1) / 5,
    "multiplied-by-torch": lambda z: of_classes(z, reduction="sum", label_smoothing=0.6),  # by 0.4, and may be by 0.2
    "smoothed-mean": lambda z: of_classes(z, label_smoothing=0.1),
    "probabilities": lambda z: functional.cross_entropy(z, probabilities()),
    "means-of-heads": lambda z: torch.stack([of_classes(z[:, :4]), z.square().sum(1).mean()]).sum(),
    "a-sum-over-outputs": lambda z: functional.mse_loss(z, TARGETS, reduction="none").sum(1).mean(),
    "a-mean-over-samples": lambda z: functional.mse_loss(z, TARGETS, reduction="none").mean(0).sum(),
    "of-a-mean": lambda z: functional.mse_loss(z.mean(0), TARGETS.mean(0), reduction="sum"),
    "batchmean": lambda z: functional.kl_div(z.log_softmax(1), probabilities(), reduction="batchmean"),
    "a-penalty": lambda z: of_classes(z) + 0.001 * z.square().sum(),
    "no-targets": lambda z: z.square().sum(),
    "similarities": lambda z: functional.cross_entropy(z @ z.T, torch.arange(5).roll(1), reduction="sum"),
}


@pytest.mark.parametrize("at", ["step", "backward"])
@pytest.mark.parametrize("name", SUMS)
def test_a_sum_over_samples_is_told_of_once(name, at):
    (message,) = warnings_of(dense(4), lambda model: SUMS[name](model(INPUTS)), at=at)
    assert re.search(SUMMED, message), message
    assert "loss_reduction=criterion" in message
    assert warnings_of(dense(4), lambda model: SUMS[name](model(INPUTS)), at=at, loss_reduction="sum") == []


@pytest.mark.parametrize("at", ["step", "backward"])
@pytest.mark.parametrize("name", NO_SUMS)
def test_who_divides_a_sum_is_left_in_peace(name, at):
    assert warnings_of(dense(4), lambda model: NO_SUMS[name](model(INPUTS)), at=at) == []


def test_a_sum_over_one_sample_is_its_mean():
    assert warnings_of(dense(4), lambda m: functional.mse_loss(m(INPUTS[:1]), TARGETS[:1], reduction="sum")) == []


def test_a_sum_over_tokens_is_told_of():
    (message,) = warnings_of(Tokens(), lambda m: cross_entropy(m(SEQUENCES), reduction="sum"))
    assert "a sum over them" in message


def test_who_gives_a_gradient_to_backward_may_have_divided_by_it():
    model = dense(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    consequent.attach(optimizer, model)
    of_classes(model(INPUTS), reduction="sum").backward(torch.tensor(0.2))
    optimizer.step()  # and a warning would be an error


def scaled_step(loss_of, *, at="step", by_hand=False, **options):
    model = dense(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    consequent.attach(optimizer, model, at=at)
    scaler = torch.amp.GradScaler("cpu", **options)
    scaler.scale(loss_of(model(INPUTS))).backward()
    if by_hand:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()


def test_a_scaler_hides_a_sum_only_where_it_does_not_make_the_step():
    with pytest.warns(consequent.ConsequentWarning, match="a sum over them"):
        scaled_step(SUMS["cross-entropy"])
    with pytest.warns(consequent.ConsequentWarning, match="a sum over them"):
        scaled_step(SUMS["cross-entropy"], enabled=False)
    scaled_step(SUMS["cross-entropy"], by_hand=True)
    scaled_step(SUMS["cross-entropy"], at="backward")


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("name", NO_SUMS)
def test_who_divides_a_sum_that_is_scaled_is_left_in_peace(name, enabled):
    scaled_step(NO_SUMS[name], enabled=enabled)


@pytest.mark.parametrize(
    ("make", "count"), [(torch.optim.SGD, 1), (torch.optim.Adam, 0), (torch.optim.AdamW, 0), (torch.optim.RMSprop, 0)]
)
def test_optimisers_whose_steps_have_their_own_length_are_left_in_peace(make, count):
    model, inputs, labels = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)), torch.randn(8, 4), torch.arange(8) % 3
    told = warnings_of(model, lambda m: functional.cross_entropy(m(inputs), labels, reduction="sum"), make=make)
    assert len(told) == count
