"""Mixed precision: bfloat16 autocast, GradScaler, fused optimisers."""

import numpy as np
import pytest
import torch
from loop.expected import (
    DAMPING,
    KINDS,
    LR,
    assert_close,
    assert_same,
    assert_stepped,
    build,
    corrected,
    gradients,
    loss_on,
    mean_loss,
    observe,
    weights,
)
from torch import nn

import consequent

SCALE = 2.0**10


def autocast_loss(x, t):
    def loss_of(model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(x)
        return mean_loss(output.float(), t)

    return loss_of


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_autocast_against_the_same_roundings(kind):
    """X and ΔZ as they were in bfloat16, solved in float64.

    On the sample side ΔZ is what autograd passed on: only the float32 solve differs, 1e-4 is plenty at κ < 1e3. On the
    feature side the gradient in .grad is taken, which autocast rounded to bfloat16 (relative 2⁻⁹ in each entry): the
    same rounded gradient is expected there, so that the tolerance is the same.
    """
    model, x, t = build(kind, dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    correction = consequent.attach(optimizer, model, damping=1.0)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of = autocast_loss(x, t)
        loss_of(model).backward()
        final = None if kind == "wide" else gradients(model)
        grads = corrected(model, loss_of, samples=len(x), damping=1.0, dtype=torch.float32, final=final)
        optimizer.step()
        assert_close(gradients(model), grads, tolerance=1e-4)
    assert correction.counters.edited == 0


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_autocast_against_full_precision(kind):
    """Rounding X, ΔZ and G by 2⁻⁹ moves the solution by at most about 2⁻⁹·κ; λ = 10 keeps κ small."""
    model, x, t = build(kind, dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    consequent.attach(optimizer, model, damping=10.0)
    rows, _ = observe(model, loss_on(x, t))
    kappa = max(np.linalg.norm(np.hstack([X, np.ones((len(X), 1))]), 2) ** 2 / 10 + 1 for X, _ in rows.values())
    grads = corrected(model, loss_on(x, t), samples=len(x), damping=10.0)
    autocast_loss(x, t)(model).backward()
    optimizer.step()
    tolerance = 2**-9 * (4 + kappa)  # 4: forward and backward roundings add up over three layers
    assert tolerance < 0.2, "the test would say nothing"
    assert_close(gradients(model), grads, tolerance=tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_autocast_with_norm_clipping(kind):
    model, x, t = build(kind, dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    correction = consequent.attach(optimizer, model, damping=1.0)
    loss_of = autocast_loss(x, t)
    loss_of(model).backward()
    final = None if kind == "wide" else gradients(model)
    grads = corrected(model, loss_of, samples=len(x), damping=1.0, dtype=torch.float32, final=final)
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05))
    optimizer.step()
    # c is recovered from a .grad that was rounded to bfloat16: 2⁻⁹
    expected = {n: g * 0.05 / (norm + 1e-6) for n, g in grads.items()}
    assert_close(gradients(model), expected, tolerance=2**-9 if kind == "wide" else 1e-4)
    assert correction.counters.edited == 0


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=LR),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=LR, fused=True),
    "momentum fused": lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adam fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
}


class ByHand:
    """The optimisers once more, in float64."""

    def __init__(self, name):
        self.name = name
        self.steps = 0
        self.first, self.second = {}, {}

    def step(self, before, grads):
        """The weights after a step."""
        before = {n: w.double() for n, w in before.items()}
        self.steps += 1
        if "sgd" in self.name:
            return {n: w - LR * grads[n] for n, w in before.items()}
        if "momentum" in self.name:
            self.first = {n: 0.9 * self.first.get(n, 0) + g for n, g in grads.items()}
            return {n: w - LR * self.first[n] for n, w in before.items()}
        if "adamw" in self.name:
            before = {n: w * (1 - 0.01 * 0.1) for n, w in before.items()}
        self.first = {n: 0.9 * self.first.get(n, 0) + 0.1 * g for n, g in grads.items()}
        self.second = {n: 0.999 * self.second.get(n, 0) + 0.001 * g**2 for n, g in grads.items()}
        first = {n: m / (1 - 0.9**self.steps) for n, m in self.first.items()}
        second = {n: v / (1 - 0.999**self.steps) for n, v in self.second.items()}
        return {n: w - 0.01 * first[n] / (second[n].sqrt() + 1e-8) for n, w in before.items()}


def state_of(optimizer):
    return [{k: v.clone() for k, v in s.items() if isinstance(v, torch.Tensor)} for s in optimizer.state.values()]


@pytest.mark.parametrize("kind", ["wide", "conv"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("clip", [None, "unscaled", "scaled"])
@pytest.mark.parametrize("bad_steps", [(), (1,), (0, 2)], ids=["clean", "inf at 1", "inf at 0 and 2"])
def test_grad_scaler(kind, name, clip, bad_steps):
    """Four steps; at the bad ones the loss overflows: nothing moves, nothing leaks, nothing is warned of."""
    model, x, t = build(kind, dtype=torch.float32)
    optimizer = OPTIMIZERS[name](model.parameters())
    correction = consequent.attach(optimizer, model, damping=DAMPING)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    by_hand = ByHand(name)
    for step in range(4):
        optimizer.zero_grad()
        loss = loss_on(x, t)(model)
        if step in bad_steps:
            loss = loss * 1e38
        scaler.scale(loss).backward()
        factor = 1.0
        if clip == "unscaled":
            scaler.unscale_(optimizer)
        if clip is not None and step not in bad_steps:
            limit = 0.05 if clip == "unscaled" else 0.05 * scaler.get_scale()
            factor = min(1.0, limit / (float(torch.nn.utils.clip_grad_norm_(model.parameters(), limit)) + 1e-6))
        before, state = weights(model), state_of(optimizer)
        grads = corrected(model, loss_on(x, t), samples=len(x))
        scaler.step(optimizer)
        scaler.update()
        if step in bad_steps:
            assert_same(weights(model), before)
            for old, new in zip(state, state_of(optimizer), strict=False):
                assert_same(new, old)
            continue
        expected = by_hand.step(before, {n: factor * g for n, g in grads.items()})
        moves = {n: before[n].double() - w.double() for n, w in weights(model).items()}
        tolerance = 2e-3 if "adam" in name else 2e-4
        assert_close(moves, {n: before[n].double() - w for n, w in expected.items()}, tolerance=tolerance)
    assert correction.counters.skipped == 0
    assert correction.counters.edited == 0


@pytest.mark.parametrize("kind", ["wide", "conv"])
@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if "fused" in n])
def test_fused_optimisers_without_a_scaler(kind, name):
    model, x, t = build(kind)
    optimizer = OPTIMIZERS[name](model.parameters())
    consequent.attach(optimizer, model, damping=DAMPING)
    by_hand = ByHand(name)
    for _ in range(3):
        optimizer.zero_grad()
        loss_on(x, t)(model).backward()
        before = weights(model)
        expected = by_hand.step(before, corrected(model, loss_on(x, t), samples=len(x)))
        optimizer.step()
        moves = {n: before[n] - w for n, w in weights(model).items()}
        assert_close(moves, {n: before[n] - w for n, w in expected.items()}, tolerance=1e-6)


@pytest.mark.parametrize("kind", ["wide", "conv"])
def test_grad_scaler_with_a_step_by_hand(kind):
    """unscale_, correct, clip the corrected gradients, step."""
    model, x, t = build(kind, dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    correction = consequent.attach(optimizer, model, damping=DAMPING)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(loss_on(x, t)(model)).backward()
        scaler.unscale_(optimizer)
        grads = corrected(model, loss_on(x, t), samples=len(x))
        correction.step()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01))
        before = weights(model)
        scaler.step(optimizer)
        scaler.update()
        assert_stepped(model, before, {n: g * 0.01 / (norm + 1e-6) for n, g in grads.items()}, tolerance=1e-3)


@pytest.mark.parametrize("kind", ["wide", "conv"])
def test_grad_scaler_with_micro_batches(kind):
    model, x, t = build(kind, batch=20, dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    consequent.attach(optimizer, model, damping=DAMPING)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    for xs, ts in zip(x.split(6), t.split(6), strict=True):
        scaler.scale(loss_on(xs, ts, weight=len(xs) / len(x))(model)).backward()
    before, grads = weights(model), corrected(model, loss_on(x, t), samples=len(x))
    scaler.step(optimizer)
    assert_stepped(model, before, grads, tolerance=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_backward_and_step_inside_autocast_are_those_outside(kind):
    """Many scripts call all three inside: the products of the correction must not be rounded to bfloat16 there."""
    results = []
    for inside in (False, True):
        model, x, t = build(kind, dtype=torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        correction = consequent.attach(optimizer, model, damping=DAMPING, foresight=True)
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_on(x, t)(model)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
                loss.backward()
                optimizer.step()
        assert correction.counters.rescued == correction.counters.edited == 0
        results.append((weights(model), [layer.ratio for layer in correction.foresight().values()]))
    (outside, outside_ratios), (inside, inside_ratios) = results
    assert_close(inside, outside, tolerance=1e-6)
    assert inside_ratios == pytest.approx(outside_ratios, rel=1e-5)


def test_the_formula_inside_autocast():
    torch.manual_seed(0)
    inputs, output_grads = torch.randn(40, 6), torch.randn(40, 2)
    expected = consequent.consequential_gradient(inputs, output_grads, 0.01)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(consequent.consequential_gradient(inputs, output_grads, 0.01), expected)


@pytest.mark.parametrize("at", ["step", "backward"])
def test_a_gradient_penalty_under_autocast(at):
    """What comes through the backward pass counts once, whether or not the weight was cast."""

    def gradient(casts):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        consequent.attach(optimizer, model, damping=1.0, at=at)
        x = torch.randn(8, 20, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=casts):
            outputs = model(x)
        (slope,) = torch.autograd.grad(outputs.float().sum(), x, create_graph=True)
        (outputs.float().square().mean() + (slope.norm(dim=1) - 1).square().mean()).backward()
        optimizer.step()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    exact = gradient(casts=False)
    assert (gradient(casts=True) - exact).norm() <= 0.02 * exact.norm()
