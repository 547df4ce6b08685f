"""Outputs that come to the loss through another network: their number of elements is not what it divides by."""

import pytest
import torch
from doubtful_losses import INPUTS, TARGETS, dense, warnings_of
from torch import nn
from torch.nn.functional import l1_loss, mse_loss

BEHIND = "come to it only through another network, or another product"


class Coder(nn.Module):
    """An encoder and a decoder that is not trained."""

    def __init__(self):
        super().__init__()
        self.encode, self.decode = dense(3), nn.Linear(3, 6)
        self.decode.requires_grad_(False)

    def forward(self, inputs):
        return self.decode(self.encode(inputs))


def frozen(layer):
    return layer.requires_grad_(False)


JUDGE, PICTURES = frozen(nn.Linear(4, 1)), frozen(nn.Conv1d(1, 3, 3))
TURN, BLUR = torch.linspace(-1, 1, 16).view(4, 4), frozen(nn.Conv1d(1, 1, 3, padding=1))
THROUGH_ANOTHER = {
    "a-judge": (lambda: dense(4), lambda model: mse_loss(JUDGE(model(INPUTS)), TARGETS[:, :1])),
    "features": (lambda: dense(4), lambda model: PICTURES(model(INPUTS)[:, None]).relu().square().mean()),
    "a-frozen-part": (Coder, lambda model: mse_loss(model.decode(model.encode(INPUTS)), INPUTS)),
}
DIRECTLY = {
    "mse": (lambda: dense(4), lambda model: mse_loss(model(INPUTS), TARGETS)),
    "beside-a-judge": (lambda: dense(4), lambda model: mse_loss(z := model(INPUTS), TARGETS) + JUDGE(z).mean()),
    "with-a-penalty": (
        lambda: dense(4),
        lambda model: mse_loss(model(INPUTS), TARGETS) + (model[0].weight @ model[0].weight.T).square().sum(),
    ),
    "scaled": (lambda: dense(4), lambda model: 3 * mse_loss(model(INPUTS).reshape(-1) / 2, TARGETS.reshape(-1))),
    "turned": (lambda: dense(4), lambda model: mse_loss(model(INPUTS) @ TURN, TARGETS)),
    "turned-by-hand": (lambda: dense(4), lambda model: (model(INPUTS) @ TURN - TARGETS).square().mean()),
    "blurred": (lambda: dense(4), lambda model: mse_loss(BLUR(model(INPUTS)[:, None])[:, 0], TARGETS)),
    "as-one": (Coder, lambda model: mse_loss(model(INPUTS), INPUTS)),
}


@pytest.mark.parametrize("reduction", ["mse", l1_loss])
@pytest.mark.parametrize("name", THROUGH_ANOTHER)
def test_it_is_told_of_once(name, reduction):
    make, loss = THROUGH_ANOTHER[name]
    (message,) = warnings_of(make(), loss, loss_reduction=reduction)
    assert BEHIND in message
    assert "give the divisor" in message
    assert warnings_of(make(), loss, loss_reduction=10.0) == []
    assert warnings_of(make(), loss, loss_reduction=reduction, make=torch.optim.Adam) == []


@pytest.mark.parametrize("name", DIRECTLY)
def test_others_are_left_in_peace(name):
    make, loss = DIRECTLY[name]
    assert warnings_of(make(), loss, loss_reduction="mse") == []
