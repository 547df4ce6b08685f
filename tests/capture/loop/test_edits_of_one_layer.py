"""Layers that are solved together: what was done to the gradient of one of them counts, and is seen in every step."""

import pytest
import torch
from torch import nn

import consequent


def network():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(12, 12) for _ in range(4)])


def corrected(scaled):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    correction = consequent.attach(optimizer, model, damping=0.1)
    if scaled:
        for parameter in model[2].parameters():
            parameter.register_hook(lambda grad: 0.1 * grad)
    gradients = []
    for step in range(6):
        optimizer.zero_grad()
        model(torch.randn(5, 12, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
        gradients.append([layer.weight.grad.clone() for layer in model])
    assert correction.counters.edited == 0
    return gradients


def test_a_hook_on_one_parameter_scales_that_layer_in_every_step():
    for plain, scaled in zip(corrected(False), corrected(True), strict=True):
        for place, (one, other) in enumerate(zip(plain, scaled, strict=True)):
            torch.testing.assert_close(other, one * (0.1 if place == 2 else 1.0), rtol=1e-3, atol=1e-6)


def test_inputs_overwritten_before_the_step_are_refused():
    model = network()
    optimizer = consequent.CSGD(model, lr=0.1, damping=0.1)
    inputs = torch.randn(5, 12)
    model(inputs).square().mean().backward()
    inputs.copy_(torch.randn(5, 12))
    with pytest.raises(RuntimeError, match="overwritten between backward"):
        optimizer.step()


@pytest.mark.parametrize("options", [{"averaging": 0.9}, {"averaging": 0.9, "refresh": 3}], ids=str)
def test_inputs_overwritten_before_a_step_that_averages_their_moment_are_refused(options):
    model = network()
    optimizer = consequent.CSGD(model, lr=0.1, damping=0.1, **options)
    inputs = torch.randn(5, 12)
    model(inputs).square().mean().backward()
    inputs.copy_(torch.randn(5, 12))
    with pytest.raises(RuntimeError, match="overwritten between backward"):
        optimizer.step()


def two_micro_batches_in_one_buffer(optimizer, model):
    inputs = torch.randn(5, 12)
    model(inputs).square().mean().backward()
    inputs.resize_(9, 12).copy_(torch.randn(9, 12))
    model(inputs).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("options", [{}, {"largest_block": 5}, {"averaging": 0.5}], ids=str)
def test_micro_batches_in_one_buffer_are_refused_also_where_they_become_many_rows(options):
    """The first one's inputs are kept, being few, until the second one's come."""
    model = network()
    optimizer = consequent.CSGD(model, lr=0.1, damping=0.1, **options)
    with pytest.raises(RuntimeError, match="give each micro-batch one of its own"):
        two_micro_batches_in_one_buffer(optimizer, model)


@pytest.mark.parametrize("layer", [0, 2])
def test_nan_in_a_gradient_that_backpropagation_left_zero_is_not_lost(layer):
    """All samples are masked: no multiple of zero is NaN, and the step is not taken."""
    model = nn.Sequential(nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    correction = consequent.attach(optimizer, model)
    before = [p.detach().clone() for p in model.parameters()]
    (0 * model(torch.randn(5, 12)).square().sum(1).mean()).backward()
    model[layer].weight.grad[0, 0] = torch.nan
    with pytest.warns(consequent.ConsequentWarning, match="NaN or inf"):
        optimizer.step()
    assert correction.counters.skipped == 1
    torch.testing.assert_close(list(model.parameters()), before, rtol=0, atol=0)
