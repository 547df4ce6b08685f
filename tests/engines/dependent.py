"""Inputs whose features depend on each other, and what a factor makes of them, measured in float64."""

import torch


def like_layer_norm(rows, features, *, common=30.0, seed=0):
    """Rows that sum up to zero, most of them along one direction: with a small λ the condition is beyond float32."""
    generator = torch.Generator().manual_seed(seed)
    own = torch.randn(rows, features, generator=generator)
    shared = torch.randn(rows, 1, generator=generator) * torch.randn(1, features, generator=generator)
    inputs = own + common * shared
    return inputs - inputs.mean(1, keepdim=True)


def of_rank(rank, rows, features, *, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, rank, generator=generator) @ torch.randn(rank, features, generator=generator)


def repeated(rows, features, *, zeros, seed=0):
    """Every feature twice, and some that are zero."""
    inputs = of_rank(features, rows, features, seed=seed)
    return torch.cat([inputs, inputs, torch.zeros(rows, zeros)], 1)


def with_spectrum(condition, rows, features, *, seed=0):
    """Of the given condition number of the second moment, the spectrum falling evenly, in any basis."""
    generator = torch.Generator().manual_seed(seed)
    left, _ = torch.linalg.qr(torch.randn(rows, features, dtype=torch.float64, generator=generator))
    right, _ = torch.linalg.qr(torch.randn(features, features, dtype=torch.float64, generator=generator))
    exponents = torch.linspace(0, -0.5, features, dtype=torch.float64)
    return (100 * left * condition**exponents @ right).float()


def second_moment(inputs):
    return inputs.mT @ inputs


def wanted_outputs(inputs, outputs=5, seed=1):
    return torch.randn(len(inputs), outputs, generator=torch.Generator().manual_seed(seed)).to(inputs.device)


def miss(inputs, wanted, update, level):
    """How far the consequence ``X U`` is from that of the ridge solution, as a fraction."""
    X = inputs.double()
    damped = X.mT @ X + level * torch.eye(X.shape[1], dtype=torch.float64, device=X.device)
    consequence = X @ torch.linalg.solve(damped, X.mT @ wanted.double())
    return ((X @ update.double() - consequence).norm() / consequence.norm()).item()


def longest_step(inputs, inverse):
    """The largest eigenvalue of ``S WᵀW``: above 1 a step overshoots."""
    return torch.linalg.matrix_norm(inputs.double() @ inverse.double().mT, 2).item() ** 2
