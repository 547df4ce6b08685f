"""Own inputs in low precision: products may be in it, the correction is not."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from expected import check_same_grads, grads_of, own_inputs_grads
from loops.networks import RHO, attached, batch, network
from torch import nn


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    """Products are in low precision, the correction is not; a backward pass inside of autocast gives the same."""
    model, _ = attached(network(torch.float32))
    plain = network(torch.float32)
    x, y = batch(dtype=torch.float32)

    def run(one, inside=False):
        one.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = F.cross_entropy(one(x).float(), y)
            if inside:
                loss.backward()
        if not inside:
            loss.backward()

    run(model)
    found = grads_of(model)
    assert all(grad.dtype == torch.float32 for grad in found.values())
    check_same_grads(found, own_inputs_grads(plain, run, RHO, 12), rtol=0.03)
    run(model, inside=True)
    check_same_grads(grads_of(model), found, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_in_low_precision(dtype):
    plain = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 4)).to(dtype)
    model, _ = attached(plain)
    x = torch.randn(8, 20).to(dtype)

    def run(one):
        one(x).float().square().mean().backward()

    run(model)
    assert model[0].weight.grad.dtype == dtype
    check_same_grads(grads_of(model), own_inputs_grads(plain, run, RHO, 8), rtol=0.03)
