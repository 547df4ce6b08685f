"""What a step should give: an unattached twin of the model, its own hooks, reference.py, torch's own optimiser.

Nothing of ``consequent`` is used here. ΔZ is not seen by a hook on the output: a zero is added to every output of a
layer, and the zero's gradient is ΔZ.
"""

import copy
from contextlib import contextmanager
from math import prod

import numpy as np
import reference
import torch
from torch import nn

import consequent

LAYER_TYPES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def layers_of(model):
    return [module for module in model.modules() if isinstance(module, LAYER_TYPES)]


@contextmanager
def watching(model, layers=None):
    """A list that fills with (layer, input, zero) for each call of a layer; after backward ``zero.grad`` is ΔZ."""
    calls = []

    def note(layer, args, kwargs, output):
        zero = torch.zeros_like(output, requires_grad=True)
        inputs = args[0] if args else kwargs["input"]
        calls.append((layer, inputs.detach().clone(), zero))
        return output + zero

    layers = layers_of(model) if layers is None else layers
    handles = [layer.register_forward_hook(note, with_kwargs=True) for layer in layers]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def design(calls, group, trains):
    """(X, ΔZ, biases) of all calls that share one weight: the features, and a column of ones for each bias."""
    weight = calls[0][0].weight
    biases = []
    for layer, _, _ in calls:
        if layer.bias is not None and trains(layer.bias) and not any(layer.bias is bias for bias in biases):
            biases.append(layer.bias)
    X, dZ = [], []
    for layer, inputs, zero in calls:
        if zero.grad is None:
            continue  # the loss does not depend on this call
        rows = reference.input_rows(layer, inputs)[group]
        ones = np.array([[float(layer.bias is bias) for bias in biases]] * len(rows)).reshape(len(rows), len(biases))
        X.append(np.concatenate([rows, ones] if trains(weight) else [ones], axis=1))
        dZ.append(reference.output_rows(layer, zero.grad)[group])
    return (np.concatenate(X), np.concatenate(dZ), biases) if X else None


def corrected_gradients(calls, damping=reference.DEFAULT_DAMPING, trains=None):
    """{parameter: ΔZ (XᵀX + λI)⁻¹ Xᵀ, as an array}, without the factor N.

    Args:
        calls: from ``watching``, after the backward pass.
        damping: λ, a pair ("relative", ρ), or a function of the weight (the bias, if only that is trained) to either.
        trains: which parameters take part; by default those that require a gradient.
    """
    trains = trains or (lambda parameter: parameter.requires_grad)
    by_weight = {}
    for call in calls:
        by_weight.setdefault(call[0].weight, []).append(call)
    gradients = {}
    for weight, uses in by_weight.items():
        layer = uses[0][0]
        groups = getattr(layer, "groups", 1)
        problems = [design(uses, group, trains) for group in range(groups)]
        if problems[0] is None or problems[0][0].shape[1] == 0:
            continue
        biases = problems[0][2]
        key = weight if trains(weight) else biases[0]
        level = damping(key) if callable(damping) else damping
        matrix = np.concatenate([reference.consequential_gradient(X, dZ, level) for X, dZ, _ in problems])
        features = prod(weight.shape[1:]) if trains(weight) else 0
        if features:
            gradients[weight] = matrix[:, :features].reshape(tuple(weight.shape))
        for place, bias in enumerate(biases):
            gradients[bias] = matrix[:, features + place]
    return gradients


def expected_backward(twin, compute_loss, divisor, damping=reference.DEFAULT_DAMPING, layers=None, trains=None):
    """Backward on the twin, then the gradients that the correction should make of it."""
    with watching(twin, layers) as calls:
        compute_loss(twin).backward()
    for parameter, gradient in corrected_gradients(calls, damping, trains).items():
        parameter.grad = torch.as_tensor(gradient * divisor).to(parameter.dtype)
    return calls


def check_same(model, twin, rtol=1e-7, atol=1e-10):
    """All parameters of two models agree."""
    theirs = dict(twin.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, theirs[name], rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def check_same_grads(model, twin, rtol=1e-7, atol=1e-10):
    """All gradients of two models agree, also in being None."""
    theirs = dict(twin.named_parameters())
    for name, parameter in model.named_parameters():
        expected = theirs[name].grad
        assert (parameter.grad is None) == (expected is None), name
        if expected is not None:
            torch.testing.assert_close(
                parameter.grad, expected, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
            )


def twin_of(model):
    return copy.deepcopy(model)


def named(model, *names):
    return [model.get_submodule(name) for name in names]


def check_training(
    model,
    compute_loss,
    divisor,
    damping=reference.DEFAULT_DAMPING,
    corrected=None,
    steps=2,
    lr=0.05,
    twin=None,
    **options,
):
    """Train a model with C-SGD and its twin with SGD on reference gradients; returns the correction.

    Args:
        model: not attached yet.
        compute_loss: of a model.
        divisor: what the loss was divided by.
        damping: λ, or a pair ("relative", ρ).
        corrected: names of the layers that are corrected; by default all Linear and Conv layers.
        steps: how many.
        lr: μ.
        twin: an equal model, where ``copy.deepcopy`` cannot make one.
        options: of ``attach``.
    """
    twin = twin_of(model) if twin is None else twin
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    correction = consequent.attach(optimizer, model, **reference.damping_options(damping), **options)
    reference_optimizer = torch.optim.SGD(twin.parameters(), lr=lr)
    layers = None if corrected is None else named(twin, *corrected)
    start = [parameter.detach().clone() for parameter in model.parameters()]
    for _ in range(steps):
        optimizer.zero_grad()
        compute_loss(model).backward()
        optimizer.step()
        reference_optimizer.zero_grad()
        expected_backward(twin, compute_loss, divisor, damping, layers)
        reference_optimizer.step()
        check_same_grads(model, twin)
    check_same(model, twin)
    assert any(not torch.equal(before, now) for before, now in zip(start, model.parameters(), strict=True))
    return correction


def half_squares(outputs):
    """A loss whose ΔZ differs for every output, averaged over samples."""
    weights = torch.linspace(-1, 2, outputs.numel(), dtype=outputs.dtype).view(outputs.shape)
    return 0.5 * (outputs - weights).square().sum() / outputs.shape[0]
