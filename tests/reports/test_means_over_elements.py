"""A mean over all numbers of the outputs, by torch or by hand, is told of once; others are left in peace."""

import gc
import re
import weakref

import pytest
import torch
from doubtful_losses import INPUTS, TARGETS, dense, warnings_of
from torch import nn
from torch.nn import functional

import consequent

ELEMENTS = (
    r"pass loss_reduction=\"mse\" if .*, otherwise loss_reduction=criterion, .*over 5 samples.*; but it is one over "
    r"all elements of the outputs \[5, 4\], and steps are 4 times too short.*, of squares without a ½ 2 times"
)
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


# ---- by hand ---------------------------------------------------------------------------------------------------------

MEANS_BY_HAND = {
    "squares": lambda z: ((z - TARGETS) ** 2).mean(),
    "absolute": lambda z: (z - TARGETS).abs().mean(),
    "l1": lambda z: functional.l1_loss(z, TARGETS),
    "of-none": lambda z: functional.binary_cross_entropy_with_logits(z, TARGETS, reduction="none").mean(),
    "poisson": lambda z: functional.poisson_nll_loss(z, TARGETS),
}
OTHER_MEANS_BY_HAND = {
    "of-sums": lambda z: (z - TARGETS).square().sum(1).mean(),
    "multiplied": lambda z: 4 * (z - TARGETS).square().mean(),
    "weighted": lambda z: (TARGETS * (z - TARGETS).square()).mean(),
    "no-targets": lambda z: z.square().mean(),
    "one-output": lambda z: (z[:, :1] - TARGETS[:, :1]).square().mean(),
    "mixed": lambda z: (z @ z.T - torch.eye(5)).square().mean(),
}


@pytest.mark.parametrize("at", ["step", "backward"])
@pytest.mark.parametrize("name", MEANS_BY_HAND)
def test_a_mean_over_all_elements_by_hand_is_told_of(name, at):
    (message,) = warnings_of(dense(4), lambda model: MEANS_BY_HAND[name](model(INPUTS)), at=at)
    assert re.search(ELEMENTS, message)


@pytest.mark.parametrize("name", OTHER_MEANS_BY_HAND)
def test_other_means_by_hand_are_left_in_peace(name):
    assert warnings_of(dense(4), lambda model: OTHER_MEANS_BY_HAND[name](model(INPUTS))) == []
