"""K-FAC and FOOF against their formulae with whole Kronecker products."""

import pytest
import torch
from torch import nn

import consequent
from consequent_lab.race.kronecker import AVERAGING, FOOF, KFAC, KL_BOUND

SAMPLES, LR = 5, 0.1


def stepped(kind, layer, inputs, damping, lr=LR):
    """The change of weight and bias `[outputs, inputs + 1]` by one step, and the gradient before it."""
    optimizer = kind(layer, lr, damping)
    layer(inputs).square().flatten(1).sum(1).mean().backward()
    parameters = [layer.weight, layer.bias]
    gradient = torch.cat([parameter.grad.reshape(len(parameter), -1) for parameter in parameters], 1)
    before = torch.cat([parameter.detach().reshape(len(parameter), -1).clone() for parameter in parameters], 1)
    optimizer.step()
    after = torch.cat([parameter.detach().reshape(len(parameter), -1) for parameter in parameters], 1)
    return after - before, gradient


def linear():
    torch.manual_seed(0)
    return nn.Linear(3, 2).double(), torch.randn(SAMPLES, 3, dtype=torch.float64)


def moments(layer, inputs):
    """Second moments of the inputs with a one appended, and of each sample's own gradient of the outputs."""
    rows = torch.cat([inputs, torch.ones(SAMPLES, 1)], 1)
    gradients = 2 * layer(inputs).detach()
    return rows.T @ rows / SAMPLES, gradients.T @ gradients / SAMPLES


NESTEROV = 1.9  # the first step of momentum 0.9


def test_foof_is_its_formula():
    layer, inputs = linear()
    a, _ = moments(layer, inputs)
    change, gradient = stepped(FOOF, layer, inputs, 0.3)
    expected = gradient @ torch.linalg.inv(a + 0.3 * torch.eye(4))
    torch.testing.assert_close(change, -LR * NESTEROV * expected)


def test_sparing_foof_averages_as_the_other_and_inverts_at_every_tenth_step():
    torch.manual_seed(0)
    always, sparing = nn.Linear(3, 2).double(), nn.Linear(3, 2).double()
    optimizers = {always: FOOF(always, LR, 0.3), sparing: FOOF(sparing, LR, 0.3, sparing=True)}
    for step in range(11):
        inputs = torch.randn(SAMPLES, 3, dtype=torch.float64)
        sparing.load_state_dict(always.state_dict())
        for layer, optimizer in optimizers.items():
            optimizer.zero_grad()
            layer(inputs).square().sum(1).mean().backward()
            optimizer.step()
        inverses, kept = (optimizers[layer]._inverses[layer][0] for layer in (always, sparing))
        assert torch.allclose(inverses, kept) == (step % 10 == 0)
    torch.testing.assert_close(*(optimizers[layer]._moments[layer] for layer in (always, sparing)))


def test_foof_is_the_averaged_mode_of_nesterov_once_the_first_batch_is_forgotten():
    """FOOF's average begins with the first batch alone; ours does so if it takes that for many."""
    torch.manual_seed(0)
    ours, theirs = (nn.Sequential(nn.Linear(20, 9), nn.Tanh(), nn.Linear(9, 2)).double() for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    optimizer = torch.optim.SGD(ours.parameters(), lr=LR, momentum=0.9, nesterov=True)
    correction = consequent.attach(optimizer, ours, averaging=AVERAGING, refresh=1, damping=0.3 * SAMPLES, bound=None)
    other = FOOF(theirs, LR, 0.3)
    for step in range(4):
        if step == 1:
            state = correction.state_dict()
            for average in state["averages"][0]["layers"].values():
                average["weight"] = SAMPLES / (1 - AVERAGING)
            correction.load_state_dict(state)
        inputs = torch.randn(SAMPLES, 20, dtype=torch.float64)
        for model, its in ((ours, optimizer), (theirs, other)):
            its.zero_grad()
            model(inputs).square().sum(1).mean().backward()
            its.step()
    for one, two in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("lr", [1e-6, 10.0])
def test_kfac_is_the_inverse_of_a_kronecker_product(lr):
    layer, inputs = linear()
    a, g = moments(layer, inputs)
    change, gradient = stepped(KFAC, layer, inputs, 0.01, lr)
    ratio = (a.diagonal().mean() / g.diagonal().mean()).sqrt()
    fisher = torch.kron(g + 0.1 / ratio * torch.eye(2), a + 0.1 * ratio * torch.eye(4))
    natural = torch.linalg.solve(fisher, gradient.flatten())
    length = lr**2 * natural @ gradient.flatten()
    assert (length > KL_BOUND) == (lr > 1)
    factor = (KL_BOUND / length).sqrt() if lr > 1 else 1.0
    torch.testing.assert_close(change.flatten(), -lr * NESTEROV * factor * natural)


@pytest.mark.parametrize("kind", [FOOF, KFAC])
def test_a_convolution_of_one_pixel_is_a_dense_layer(kind):
    layer, inputs = linear()
    convolution = nn.Conv2d(3, 2, 1).double()
    convolution.load_state_dict({"weight": layer.weight[:, :, None, None], "bias": layer.bias})
    change, _ = stepped(kind, layer, inputs, 0.01)
    same, _ = stepped(kind, convolution, inputs[:, :, None, None], 0.01)
    torch.testing.assert_close(change, same)
