"""What is counted and printed."""

import reference
import torch
from loop.expected import DAMPING, LR, mean_loss
from models.expected import half_squares
from torch import nn

import consequent
from at_backward.expected import start


def test_counters_count_passes():
    model, x, t, optimizer, correction = start("wide")
    assert (correction.counters.steps, correction.samples) == (0, None)
    with torch.no_grad():
        model(x)
    model(x)
    assert correction.counters.steps == 0
    for passes in (1, 2, 3):
        mean_loss(model(x), t).backward()
        assert correction.counters.steps == passes
    optimizer.step()
    assert correction.counters == type(correction.counters)(steps=3)


def test_printing_shows_sides_and_samples():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 3), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    correction = consequent.attach(optimizer, model, damping=DAMPING, at="backward")
    assert repr(correction).count("side chosen at the first step") == 2
    half_squares(model(torch.randn(6, 20))).backward()
    shown = repr(correction)
    assert "Linear, 21 input columns, solved on the sample side" in shown
    assert "Linear, 4 input columns, solved on the feature side, 4 × 4" in shown
    assert "samples at the last step: 6; its loss was taken for a sum divided by 6" in shown
    assert "counters: steps 1," in shown


def test_failed_factorisations_are_counted():
    """Samples on one line, λ below the rounding errors of their float32 Gram matrix."""
    torch.manual_seed(0)
    layer, x, output_grad = nn.Linear(100, 2), 10 * torch.randn(32, 1) @ torch.randn(1, 100), torch.randn(32, 2)
    correction = consequent.Consequentialism(layer, damping=1e-3, loss_reduction="sum", at="backward")
    layer(x).backward(output_grad)
    assert (correction.counters.rescued, correction.counters.fallen_back) == (1, 0)
    (expected,) = reference.corrected_matrices(layer, x, output_grad, 1e-3)
    (actual,) = reference.gradient_matrices(layer, layer.weight.grad.numpy(), layer.bias.grad.numpy())
    assert reference.relative_error(actual, expected) <= 1e-4
