"""Layers that join the model and the optimiser later."""

import pytest
import reference
import torch
from torch import nn

import consequent
from models.expected import check_same, check_same_grads, expected_backward, half_squares, twin_of


def check_step(model, optimizer, compute_loss, samples, damping=reference.DEFAULT_DAMPING, layers=None):
    twin = twin_of(model)
    twin.zero_grad()
    optimizer.zero_grad()
    compute_loss(model).backward()
    optimizer.step()
    expected_backward(twin, compute_loss, samples, damping, layers=layers and layers(twin))
    torch.optim.SGD([p for p in twin.parameters() if p.grad is not None], lr=0.1).step()
    check_same_grads(model, twin)
    check_same(model, twin)


@pytest.mark.parametrize("attached", [True, False], ids=["attach", "CSGD"])
@pytest.mark.parametrize("samples", [3, 20])
def test_add_param_group(samples, attached):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh()).double()
    x = torch.randn(samples, 6, dtype=torch.float64)
    if attached:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        correction = consequent.attach(optimizer, model)
    else:
        optimizer = consequent.CSGD(model, lr=0.1)
        correction = optimizer.correction
    check_step(model, optimizer, lambda m: half_squares(m(x)), samples)
    model.append(nn.Linear(5, 4).double())
    optimizer.add_param_group({"params": list(model[2].parameters())})
    check_step(model, optimizer, lambda m: half_squares(m(x)), samples)
    assert list(correction.corrected) == ["0", "2"]
    model.append(nn.Sequential(nn.Tanh(), nn.Linear(4, 2)).double())
    optimizer.add_param_group({"params": list(model[3].parameters()), "damping": 0.7})
    fresh = set(model[3].parameters())
    twin_damping = {tuple(p.shape): 0.7 for p in fresh}
    check_step(
        model,
        optimizer,
        lambda m: half_squares(m(x)),
        samples,
        damping=lambda p: twin_damping.get(tuple(p.shape), reference.DEFAULT_DAMPING),
    )
    assert list(correction.corrected) == ["0", "2", "3.1"]


def test_a_layer_that_is_in_the_model_but_joins_the_optimizer_later():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    x = torch.randn(3, 6, dtype=torch.float64)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    consequent.attach(optimizer, model)
    model[0].requires_grad_(False)
    check_step(model, optimizer, lambda m: half_squares(m(x)), 3)
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": list(model[0].parameters())})
    check_step(model, optimizer, lambda m: half_squares(m(x)), 3)


@pytest.mark.parametrize("samples", [3, 20])
def test_a_list_of_layers_that_is_never_called_itself(samples):
    """nn.ModuleList has no forward; a layer appended to it is to be seen all the same."""

    def compute_loss(model):
        h = x
        for layer in model:
            h = torch.tanh(layer(h))
        return half_squares(h)

    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(6, 5)]).double()
    x = torch.randn(samples, 6, dtype=torch.float64)
    optimizer = consequent.CSGD(model, lr=0.1)
    check_step(model, optimizer, compute_loss, samples)
    model.append(nn.Linear(5, 4).double())
    optimizer.add_param_group({"params": list(model[1].parameters())})
    check_step(model, optimizer, compute_loss, samples)
    assert list(optimizer.correction.corrected) == ["0", "1"]


def test_a_layer_that_is_taken_away():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    x = torch.randn(3, 6, dtype=torch.float64)
    optimizer = consequent.CSGD(model, lr=0.1)
    check_step(model, optimizer, lambda m: half_squares(m(x)), 3)
    del model[2]
    check_step(model, optimizer, lambda m: half_squares(m(x)), 3)
