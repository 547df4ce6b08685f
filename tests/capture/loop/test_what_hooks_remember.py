"""Hooks look at a layer's parameters once: whatever changes after that is noticed."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.func import functional_call

import consequent


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def backward(model, samples=20, features=5):
    generator = torch.Generator().manual_seed(1)
    model(torch.randn(samples, features, dtype=torch.float64, generator=generator)).square().mean().backward()


def corrected_gradients(model, correction):
    model.zero_grad()
    backward(model, features=model[0].weight.shape[1])
    correction.step()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("options", [{"damping": 0.1}, {"relative_damping": 0.1}], ids=str)
@pytest.mark.parametrize("samples", [4, 20])
def test_a_weight_that_grows(options, samples):
    model = net()
    correction = consequent.Consequentialism(model, **options)
    corrected_gradients(model, correction)
    model[0].weight.data = torch.randn(6, 9, dtype=torch.float64)
    model[2].weight.data = torch.randn(2, 6, dtype=torch.float64)
    model[2].bias.data = torch.randn(2, dtype=torch.float64)
    fresh = copy.deepcopy(model)
    for parameter in (*model.parameters(), *fresh.parameters()):
        parameter.grad = None
    expected = corrected_gradients(fresh, consequent.Consequentialism(fresh, **options))
    assert torch.allclose(corrected_gradients(model, correction), expected, rtol=1e-12)


def test_weights_that_were_computed_are_not_kept_alive():
    model = net()
    consequent.Consequentialism(model, damping=0.1)
    start = torch.ones(6, 5, dtype=torch.float64, requires_grad=True)
    weight = start * 2
    watched = weakref.ref(weight)
    parameters = {"0.weight": weight, "0.bias": torch.zeros(6, dtype=torch.float64)}
    functional_call(model, parameters, torch.randn(4, 5, dtype=torch.float64)).sum().backward()
    model.zero_grad()
    del weight, parameters
    gc.collect()
    assert watched() is None


def test_weights_that_stand_in_for_others_do_not_gather():
    model = net()
    correction = consequent.Consequentialism(model, damping=0.1)
    for _ in range(5):
        model.zero_grad()
        weights = {"0.weight": model[0].weight.detach() * 2, "2.weight": model[2].weight.detach() * 2}
        functional_call(model, weights, torch.randn(4, 5, dtype=torch.float64)).square().mean().backward()
        correction.step()
    assert len(correction._parts.corrector.records) <= 2


@pytest.mark.parametrize("conv", [True, False])
def test_a_layer_frozen_between_forward_and_backward_is_not_in_its_gradient(conv):
    torch.manual_seed(0)
    layer = (nn.Conv1d(3, 2, 2) if conv else nn.Linear(3, 2)).double()
    model = nn.Sequential(nn.Identity(), layer)
    first, second = (torch.randn(6, 3, 3, dtype=torch.float64) for _ in range(2))
    twin = copy.deepcopy(model)
    correction, other = (consequent.Consequentialism(m, damping=0.1, loss_reduction="sum") for m in (model, twin))
    for m in (model, twin):
        m(first).square().sum().backward()
    inputs = second.requires_grad_()
    loss = model(inputs).square().sum()
    layer.requires_grad_(False)
    loss.backward()
    layer.requires_grad_(True)
    correction.step()
    other.step()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(mine.grad, theirs.grad, rtol=1e-12)


def test_after_an_error_while_a_group_was_added_it_is_read_again():
    model = net()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    correction = consequent.attach(optimizer, model, damping=0.1)
    model.append(nn.LazyLinear(4))
    optimizer.add_param_group({"params": list(model[2].parameters())})
    with pytest.raises((ValueError, TypeError, RuntimeError)):
        model(torch.randn(4, 5, dtype=torch.float64))
    model.pop(3)
    backward(model)
    optimizer.step()
    assert list(correction.corrected) == ["0", "2"]
    assert not {"0", "2"} & correction.plain.keys()
