"""Weights that are functions of other parameters: plain, with a reason."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import consequent
from models.expected import check_training, half_squares


class Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).T


def old_weight_norm(layer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(layer)


def parametrized(layer):
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


def parametrized_bias(layer):
    parametrize.register_parametrization(layer, "bias", nn.Softplus())
    return layer


REPARAMETRISATIONS = {
    "parametrize": parametrized,
    "parametrize-bias": parametrized_bias,
    "weight_norm": parametrizations.weight_norm,
    "old-weight_norm": old_weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "old-spectral_norm": nn.utils.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "prune": lambda layer: prune.l1_unstructured(layer, "weight", 4),
    "prune-bias": lambda layer: prune.l1_unstructured(layer, "bias", 1),
}


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def reparametrised(name, model=None):
    """In eval mode, since spectral norm's power iteration moves on at every forward pass in training."""
    model = model or make_model()
    torch.manual_seed(1)
    REPARAMETRISATIONS[name](model[0])
    return model.eval()


@pytest.mark.parametrize("samples", [3, 30])
@pytest.mark.parametrize("name", REPARAMETRISATIONS)
def test_stays_plain_with_a_reason(name, samples):
    model, twin = reparametrised(name), reparametrised(name)
    x = torch.randn(samples, 4, dtype=torch.float64)
    correction = check_training(model, lambda m: half_squares(m(x)), samples, corrected=["2"], twin=twin)
    assert list(correction.corrected) == ["2"]
    assert "not a parameter of its own" in correction.plain["0"]


@pytest.mark.parametrize("name", ["parametrize", "prune", "old-weight_norm", "old-spectral_norm"])
@pytest.mark.parametrize("samples", [3, 30])
def test_reparametrised_after_attaching_is_plain_and_said_so(name, samples):
    """Never silently: plain gradients at the learning rate of a corrected optimiser."""
    model = make_model()
    x = torch.randn(samples, 4, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    correction = consequent.attach(optimizer, model)
    reparametrised(name, model)
    twin = reparametrised(name)
    half_squares(twin(x)).backward()
    half_squares(model(x)).backward()
    with pytest.warns(consequent.ConsequentWarning, match="'0'"):
        optimizer.step()
    assert "0" in correction.plain
    for parameter, expected in zip(model[0].parameters(), twin[0].parameters(), strict=True):
        assert torch.equal(parameter.grad, expected.grad)


@pytest.mark.parametrize("name", ["parametrize", "prune", "old-weight_norm"])
def test_the_parametrisation_removed_again_before_attaching(name):
    model = reparametrised(name)
    if name == "parametrize":
        parametrize.remove_parametrizations(model[0], "weight")
    elif name == "prune":
        prune.remove(model[0], "weight")
    else:
        nn.utils.remove_weight_norm(model[0])
    x = torch.randn(3, 4, dtype=torch.float64)
    correction = check_training(model, lambda m: half_squares(m(x)), 3)
    assert list(correction.corrected) == ["0", "2"]
