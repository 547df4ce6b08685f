"""A loss of derivatives of the outputs alone: the last layer acts in ``Wᵀ ΔZ`` and in nothing else, and stays plain."""

import pytest
import torch
from torch import nn

import consequent


def test_it_can_be_trained():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    correction = consequent.attach(optimizer, model, loss_reduction=10.0)
    places = torch.linspace(-1, 1, 20, dtype=torch.float64)[:, None].requires_grad_()
    losses = []

    def step():
        optimizer.zero_grad()
        (slopes,) = torch.autograd.grad(model(places).sum(), places, create_graph=True)
        loss = (slopes - places.detach()).square().mean()
        loss.backward()
        plain = model[4].weight.grad.clone()
        optimizer.step()
        assert torch.equal(model[4].weight.grad, plain)
        losses.append(loss.item())

    with pytest.warns(consequent.ConsequentWarning, match="'4' keeps its plain gradient.*derivatives of its outputs"):
        step()
    for _ in range(99):
        step()
    assert losses[-1] < 0.2 * losses[0]
    assert list(correction.plain) == ["4"]
