"""What a corrected gradient must be, worked out apart from the library.

A float64 copy of the model without hooks logs every layer's inputs and outputs; ``torch.autograd.grad`` gives the
gradients of the outputs, and numpy solves ``ΔZ (XᵀX + λI)⁻¹ Xᵀ`` (rows are samples here: ``dZᵀ (X Xᵀ + λI)⁻¹ X``).
"""

import copy

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import consequent

DAMPING = 0.1
LR = 0.5
HOOKS = [
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
]


# ---- nets -------------------------------------------------------------------------------------------------------


class Mean(nn.Module):
    def forward(self, x):
        return x.mean((-2, -1))


def build(kind, batch=None, dtype=torch.float64, seed=0, inplace=False):
    """(model, inputs, targets): "wide" has fewer samples than features in every layer, "conv" and "tall" more rows."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if kind == "wide":
            model = nn.Sequential(
                nn.Linear(20, 16), nn.ReLU(inplace), nn.Linear(16, 14), nn.ReLU(inplace), nn.Linear(14, 3)
            )
            shape, default = (20,), 5
        elif kind == "conv":
            model = nn.Sequential(
                nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(inplace), nn.Conv2d(4, 3, 2, stride=2), Mean(), nn.Linear(3, 3)
            )
            shape, default = (2, 6, 6), 6
        else:
            assert kind == "tall", kind
            model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace), nn.Linear(6, 3))
            shape, default = (4,), 16
        batch = default if batch is None else batch
        x = torch.randn(batch, *shape, dtype=torch.float64)
        t = torch.randn(batch, 3, dtype=torch.float64)
        return model.to(dtype), x.to(dtype), t.to(dtype)


KINDS = ["wide", "conv", "tall"]


def start(kind, **options):
    """(model, inputs, targets, SGD, its correction)."""
    model, x, t = build(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, **options)
    correction = consequent.attach(optimizer, model, damping=DAMPING)
    return model, x, t, optimizer, correction


def mean_loss(output, target):
    """½‖z − t‖², averaged over samples: ΔZ = (z − t)/N."""
    return 0.5 * ((output - target) ** 2).sum(tuple(range(1, output.ndim))).sum() / max(len(output), 1)


def loss_on(x, t, weight=1.0):
    """A loss as a function of the model, in the model's own dtype."""

    def loss_of(model):
        dtype = next(model.parameters()).dtype
        return weight * mean_loss(model(x.to(dtype)), t.to(dtype))

    return loss_of


# ---- mathematics ------------------------------------------------------------------------------------------------


def solve(X, dZ, damping):
    """[O, D] from N×D inputs and N×O output gradients."""
    if damping == 0:
        return (np.linalg.pinv(X, rcond=1e-10) @ dZ).T
    if len(X) < X.shape[1]:
        return np.linalg.solve(X @ X.T + damping * np.eye(len(X)), dZ).T @ X
    return solve_gradient(dZ.T @ X, X, damping)


def solve_gradient(G, X, damping):
    """G (XᵀX + λI)⁻¹, for any gradient G."""
    return np.linalg.solve(X.T @ X + damping * np.eye(X.shape[1]), G.T).T


def solve_edited(G, X, dZ, damping, rounding):
    """What becomes of a gradient G that somebody has changed since it was dZᵀX."""
    if len(X) >= X.shape[1]:
        return solve_gradient(G, X, damping)
    plain = dZ.T @ X
    factor = (G * plain).sum() / (plain**2).sum()
    if np.linalg.norm(G - factor * plain) <= rounding * np.linalg.norm(G):
        return factor * solve(X, dZ, damping)
    return G / (damping + (X**2).sum())


def is_layer(module):
    return isinstance(module, nn.Linear | nn.Conv2d)


def twin(model, dtype=torch.float64):
    """A copy of the model without any hooks."""
    result = copy.deepcopy(model)
    for module in result.modules():
        for hooks in HOOKS:
            getattr(module, hooks).clear()
    return result.to(dtype)


def input_matrix(layer, x):
    if isinstance(layer, nn.Conv2d):
        x = x if x.ndim == 4 else x[None]
        patches = F.unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
        return patches.mT.reshape(-1, patches.shape[1])
    return x.reshape(-1, x.shape[-1])


def output_matrix(layer, z):
    if isinstance(layer, nn.Conv2d):
        z = z if z.ndim == 4 else z[None]
        return z.flatten(2).mT.reshape(-1, z.shape[1])
    return z.reshape(-1, z.shape[-1])


def observe(model, *losses, dtype=torch.float64):
    """Each layer's inputs and output gradients as matrices of rows, and all plain gradients, of the sum of the losses.

    Returns ``{layer name: (X, dZ)}`` without a column of ones, and ``{parameter name: gradient}``.
    """
    model = twin(model, dtype)
    calls = []

    def logging(name, layer):
        forward = layer.forward

        def logged(x):
            z = forward(x)
            if z.requires_grad:
                calls.append((name, layer, x.detach().to(z.dtype), z))
            return z.clone()  # an in-place activation must not overwrite what was logged

        return logged

    for name, module in model.named_modules():
        if is_layer(module):
            module.forward = logging(name, module)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with torch.enable_grad():
        total = sum(loss_of(model) for loss_of in losses)
    outputs = [z for _, _, _, z in calls]
    grads = torch.autograd.grad(total, [*outputs, *parameters.values()], allow_unused=True)
    rows = {}
    for (name, layer, x, _), grad in zip(calls, grads, strict=False):
        if grad is not None:
            X, dZ = input_matrix(layer, x).double().numpy(), output_matrix(layer, grad).double().numpy()
            before = rows.get(name)
            rows[name] = (X, dZ) if before is None else (np.vstack([before[0], X]), np.vstack([before[1], dZ]))
    gradients = zip(parameters, grads[len(outputs) :], strict=True)
    return rows, {name: grad.double() for name, grad in gradients if grad is not None}


def with_ones(layer, X, gradients, name):
    """The columns whose parameters have a gradient: features, and a 1 for the bias."""
    columns = [X] if f"{name}weight" in gradients else []
    if f"{name}bias" in gradients:
        columns.append(np.ones((len(X), 1)))
    return np.concatenate(columns, axis=1) if columns else None


def gradient_of(name, gradients):
    parts = []
    if f"{name}weight" in gradients:
        weight = gradients[f"{name}weight"]
        parts.append(weight.reshape(len(weight), -1).numpy())
    if f"{name}bias" in gradients:
        parts.append(gradients[f"{name}bias"].reshape(-1, 1).numpy())
    return np.concatenate(parts, axis=1)


def corrected(
    model, *losses, samples, damping=DAMPING, only=None, final=None, dtype=torch.float64, shortened=(), rounding=1e-5
):
    """What must be in ``.grad`` after the correction: ``{parameter name: float64 gradient}``.

    Args:
        model: the model, with the weights of the step.
        losses: functions of the model; their gradients add up.
        samples: the factor N (the loss's divisor).
        damping: λ.
        only: names of the parameters that have a gradient; all by default.
        final: what is in ``.grad`` where that is not the gradient of the losses (clipped, scaled, edited). A multiple
            of the gradient gives a multiple of the correction. Anything else is solved for as it is where there are at
            least as many rows as columns, and otherwise only shortened, ``G / (trace(XᵀX) + λ)``.
        dtype: of the forward pass.
        shortened: layers whose factorisation fails.
        rounding: of ``final``, relative to its size: as far it may be from a multiple of the gradient.
    """
    rows, plain = observe(model, *losses, dtype=dtype)
    gradients = plain if final is None else {name: grad.double() for name, grad in final.items()}
    if only is not None:
        gradients = {name: grad for name, grad in gradients.items() if name in only}
    result = dict(gradients)
    layers = {name: module for name, module in model.named_modules() if is_layer(module)}
    for name, (X, dZ) in rows.items():
        prefix = f"{name}." if name else ""
        X = with_ones(layers[name], X, gradients, prefix)
        if X is None:
            continue
        if name in shortened:
            matrix = dZ.T @ X / (damping + (X**2).sum())
        elif final is not None:
            matrix = solve_edited(gradient_of(prefix, gradients), X, dZ, damping, rounding)
        else:
            matrix = solve(X, dZ, damping)
        place = 0
        if f"{prefix}weight" in gradients:
            weight = gradients[f"{prefix}weight"]
            place = weight[0].numel()
            result[f"{prefix}weight"] = samples * torch.from_numpy(matrix[:, :place].copy()).reshape(weight.shape)
        if f"{prefix}bias" in gradients:
            result[f"{prefix}bias"] = samples * torch.from_numpy(matrix[:, place].copy())
    return result


# ---- comparing --------------------------------------------------------------------------------------------------


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def gradients(model):
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def after_sgd(before, grads, lr=LR):
    return {name: w.double() - lr * grads[name] if name in grads else w.double() for name, w in before.items()}


def assert_close(actual, expected, tolerance=1e-9):
    """Every entry of the two dictionaries: relative Frobenius error at most ``tolerance``."""
    assert set(actual) == set(expected)
    for name, tensor in expected.items():
        error = (actual[name].double() - tensor.double()).norm()
        assert error <= tolerance * tensor.double().norm(), f"{name}: {error / tensor.double().norm():.3g}"


def assert_same(actual, expected):
    assert set(actual) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


def assert_stepped(model, before, grads, lr=LR, tolerance=1e-9):
    """The weights moved by exactly −lr × the expected gradient: compares the moves, not the weights."""
    moves = {name: before[name].double() - w.double() for name, w in weights(model).items()}
    wanted = {name: lr * grads[name] if name in grads else torch.zeros_like(moves[name]) for name in moves}
    for name, wanted_move in wanted.items():
        error, size = (moves[name] - wanted_move).norm(), wanted_move.norm()
        assert error <= tolerance * size, f"{name}: moved wrongly by {error / size:.3g}"
