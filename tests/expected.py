"""What gradients ought to be: plain autograd for X and ΔZ of every call of a layer, then the naive reference."""

import copy

import reference
import torch
from torch import nn

LAYERS = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)


class Watched:
    """A plain copy of a model in which inputs and output gradients of every layer's calls are kept."""

    def __init__(self, model):
        self.model = copy.deepcopy(model)
        self.calls = {}  # name -> list of (x, ΔZ)
        for name, layer in self.model.named_modules():
            if isinstance(layer, LAYERS):
                layer.register_forward_hook(self._note(name))

    def _note(self, name):
        def hook(layer, args, output):
            x = args[0].detach().clone()
            if output.requires_grad:
                output.register_hook(lambda grad: self.calls.setdefault(name, []).append((x, grad.clone())))

        return hook


def own_inputs_grads(model, run, damping, divisor, layers=None):
    """The gradients that one pass of own inputs leaves, by parameter name.

    Args:
        model: plain or corrected; a plain copy of it is run.
        run: does forward and backward pass with the model that it is given.
        damping: λ, or ("relative", ρ).
        divisor: of the loss.
        layers: names of those that are corrected; None: all.
    """
    watched = Watched(model)
    watched.model.zero_grad()
    run(watched.model)
    grads = {name: None if p.grad is None else p.grad.clone() for name, p in watched.model.named_parameters()}
    for name, calls in watched.calls.items():
        layer = watched.model.get_submodule(name)
        if not layer.weight.requires_grad or (layers is not None and name not in layers):
            continue
        weight_grad, bias_grad = 0.0, 0.0
        for x, grad in calls:
            by_weight, by_bias = reference.corrected_gradients(layer, x, grad, damping)
            weight_grad = weight_grad + by_weight * divisor / len(calls)
            bias_grad = None if by_bias is None else bias_grad + by_bias * divisor / len(calls)
        prefix = f"{name}." if name else ""
        grads[f"{prefix}weight"] = torch.as_tensor(weight_grad)
        if bias_grad is not None:
            grads[f"{prefix}bias"] = torch.as_tensor(bias_grad)
    return grads


def grads_of(model):
    return {name: None if p.grad is None else p.grad.detach().clone() for name, p in model.named_parameters()}


def check_same_grads(actual, expected, rtol=1e-8):
    """Relative to each gradient's own length."""
    assert actual.keys() == expected.keys()
    for name, wanted in expected.items():
        got = actual[name]
        assert (got is None) == (wanted is None), name
        if wanted is not None:
            error = (got.double() - wanted.double()).norm()
            assert error <= rtol * wanted.double().norm() + 1e-300, f"{name}: {error / wanted.double().norm():.3g}"
