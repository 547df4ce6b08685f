"""Scaled losses, autocast, and weights in bfloat16."""

import pytest
import reference
import torch
from loop.expected import (
    DAMPING,
    KINDS,
    assert_close,
    assert_same,
    assert_stepped,
    corrected,
    gradients,
    loss_on,
    mean_loss,
    weights,
)
from torch import nn

from at_backward.expected import start


@pytest.mark.parametrize("kind", KINDS)
def test_scaled_losses_give_unscaled_gradients(kind):
    model, x, t, optimizer, _ = start(kind)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = weights(model)
    scaler.scale(mean_loss(model(x), t)).backward()
    expected = corrected(model, loss_on(x, t), samples=len(x))
    assert_close(gradients(model), {name: 1024 * grad for name, grad in expected.items()})
    scaler.unscale_(optimizer)
    assert_close(gradients(model), expected)
    scaler.step(optimizer)
    scaler.update()
    assert_stepped(model, before, expected)
    assert scaler.get_scale() == 1024


@pytest.mark.parametrize("where", ["inputs", "loss"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_scaler_sees_an_overflow_and_skips_the_step(kind, where):
    model, x, t, optimizer, correction = start(kind)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = weights(model)
    bad = x.clone()
    if where == "inputs":
        bad[0] = torch.inf
    loss = mean_loss(model(bad), t) * (torch.inf if where == "loss" else 1)
    scaler.scale(loss).backward()
    assert not any(p.grad.isfinite().any() for p in model.parameters())
    scaler.step(optimizer)
    scaler.update()
    assert_same(weights(model), before)
    assert scaler.get_scale() == 512
    optimizer.zero_grad()
    expected = corrected(model, loss_on(x, t), samples=len(x))
    scaler.scale(mean_loss(model(x), t)).backward()
    scaler.step(optimizer)
    assert_stepped(model, before, expected)
    assert correction.counters.skipped == 0


def observed(model, compute_loss):
    """{name of a layer: (X, ΔZ)} as matrices of rows: what it was really called with, in float64."""
    inputs, grads = {}, {}

    def note(name, layer):
        def hook(_, args, output):
            # autocast rounds the inputs to the dtype that the product is computed in
            inputs[name] = layer, args[0].detach().to(output.dtype)
            output.register_hook(lambda grad: grads.__setitem__(name, grad.clone()))

        return layer.register_forward_hook(hook)

    layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)}
    handles = [note(name, layer) for name, layer in layers.items()]
    compute_loss(model).backward()
    for handle in handles:
        handle.remove()
    return {
        name: (reference.design_matrices(layer, x)[0], reference.output_rows(layer, grads[name])[0])
        for name, (layer, x) in inputs.items()
    }


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_solves_in_float32(kind):
    """From what was rounded to bfloat16, the inputs and ΔZ, to gradients that are not.

    By samples: far below bfloat16's 1/256. By features ``ΔZXᵀ`` is rounded to bfloat16 first, as autocast has it, and
    the solve makes more of that (κ is about 200 here).
    """
    model, x, t, *_kept = start(kind, dtype=torch.float32)

    def compute_loss(m):
        with torch.autocast("cpu", torch.bfloat16):
            outputs = m(x)
        assert outputs.dtype == torch.bfloat16
        return mean_loss(outputs.float(), t)

    for name, (X, dZ) in observed(model, compute_loss).items():
        layer = model.get_submodule(name)
        assert (layer.weight.grad.dtype, layer.bias.grad.dtype) == (torch.float32, torch.float32)
        expected = len(x) * reference.consequential_gradient(X, dZ, DAMPING)
        grads = layer.weight.grad.numpy(), layer.bias.grad.numpy()
        (actual,) = reference.gradient_matrices(layer, *grads)
        assert reference.relative_error(actual, expected) < (3e-5 if len(X) < X.shape[1] else 2**-4)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_in_bfloat16(kind):
    model, x, t, *_kept = start(kind, dtype=torch.bfloat16)
    for name, (X, dZ) in observed(model, lambda m: mean_loss(m(x).float(), t.float())).items():
        layer = model.get_submodule(name)
        assert (layer.weight.grad.dtype, layer.bias.grad.dtype) == (torch.bfloat16, torch.bfloat16)
        expected = len(x) * reference.consequential_gradient(X, dZ, DAMPING)
        (actual,) = reference.gradient_matrices(
            layer, layer.weight.grad.float().numpy(), layer.bias.grad.float().numpy()
        )
        assert reference.relative_error(actual, expected) < (2**-8 if len(X) < X.shape[1] else 2**-4)
