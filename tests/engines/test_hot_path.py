"""What a training step must not do, for speed: F.unfold loops over the batch, and explicit inverses are slow."""

import pytest
import torch
from torch import nn

import consequent

FORBIDDEN = [
    (nn.functional, "unfold"),
    (torch.linalg, "inv"),
    (torch.linalg, "inv_ex"),
    (torch, "inverse"),
    (torch, "cholesky_inverse"),
    (torch.linalg, "pinv"),
    (torch.linalg, "svd"),
    (torch.linalg, "eigh"),
]


@pytest.mark.parametrize("samples", [3, 40])
def test_a_step_needs_no_unfold_and_no_explicit_inverse(monkeypatch, samples):
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 30), nn.Linear(30, 3))
    optimizer = consequent.CSGD(model, lr=0.1, damping=0.1)
    for module, name in FORBIDDEN:

        def refuse(*_, name=name, **__):
            raise AssertionError(f"{name} was called in a training step")

        monkeypatch.setattr(module, name, refuse)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(samples, 2, 4, 4)).square().mean().backward()
        optimizer.step()
    assert optimizer.correction.counters.steps == 2
    assert optimizer.correction.counters.rescued == 0
