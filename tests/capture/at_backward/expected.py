"""What tests of ``at="backward"`` start with, and how they compare."""

import torch
from loop.expected import DAMPING, LR, build
from models.expected import check_same_grads, expected_backward, twin_of

import consequent

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}


def start(kind, at="backward", dtype=torch.float64, batch=None, optimizer=torch.optim.SGD, **options):
    """(model, inputs, targets, optimiser, its correction)."""
    model, x, t = build(kind, dtype=dtype, batch=batch)
    optimizer = optimizer(model.parameters(), lr=LR)
    return model, x, t, optimizer, consequent.attach(optimizer, model, damping=DAMPING, at=at, **options)


def added(*dictionaries):
    """The sum of several dictionaries of gradients."""
    return {name: sum(d[name] for d in dictionaries) for name in dictionaries[0]}


def check_joint(model, compute_loss, divisor, **options):
    """One backward pass, against all uses of each weight solved together; returns the correction."""
    plain = twin_of(model)
    correction = consequent.Consequentialism(model, damping=DAMPING, at="backward", **options)
    compute_loss(model).backward()
    expected_backward(plain, compute_loss, divisor, DAMPING)
    check_same_grads(model, plain)
    assert correction.counters.steps == 1
    return correction
