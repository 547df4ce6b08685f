"""Gradient accumulation over micro-batches is the whole batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loop.expected import DAMPING, LR, assert_close, assert_stepped, build, corrected, gradients, loss_on, weights
from torch import nn

import consequent

SPLITS = [[5, 5, 5, 5], [3, 8, 1, 8], [2] * 10, [20], [19, 1], [1, 19], [7, 0, 13]]


@pytest.mark.parametrize("kind", ["wide", "conv", "tall"])
@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_micro_batches_equal_the_whole_batch(kind, split, set_to_none):
    """In "wide" a micro-batch is on the sample side; the 20 samples together are on the feature side."""
    model, x, t = build(kind, batch=20)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    consequent.attach(optimizer, model, damping=DAMPING)
    for _ in range(2):
        optimizer.zero_grad(set_to_none=set_to_none)
        for xs, ts in zip(x.split(split), t.split(split), strict=True):
            loss_on(xs, ts, weight=len(xs) / len(x))(model).backward()
        before, grads = weights(model), corrected(model, loss_on(x, t), samples=len(x))
        optimizer.step()
        assert_close(gradients(model), grads)
        assert_stepped(model, before, grads)


@pytest.mark.parametrize("split", [[2, 3], [1, 1, 1, 1, 1], [4, 1]], ids=str)
def test_micro_batches_that_stay_on_the_sample_side(split):
    model, x, t = build("wide")
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    consequent.attach(optimizer, model, damping=DAMPING)
    for xs, ts in zip(x.split(split), t.split(split), strict=True):
        loss_on(xs, ts, weight=len(xs) / len(x))(model).backward()
    before, grads = weights(model), corrected(model, loss_on(x, t), samples=len(x))
    optimizer.step()
    assert_stepped(model, before, grads)


@pytest.mark.parametrize("kind", ["wide", "conv"])
def test_micro_batches_of_a_summed_loss(kind):
    model, x, t = build(kind, batch=20)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    consequent.attach(optimizer, model, damping=DAMPING, loss_reduction="sum")
    for xs, ts in zip(x.split(6), t.split(6), strict=True):
        loss_on(xs, ts, weight=len(xs))(model).backward()
    before, grads = weights(model), corrected(model, loss_on(x, t, weight=len(x)), samples=1)
    optimizer.step()
    assert_stepped(model, before, grads)


@pytest.mark.parametrize("kind", ["wide", "conv"])
@pytest.mark.parametrize("split", [[5, 5, 5, 5], [3, 8, 1, 8]], ids=str)
def test_micro_batches_clipped_at_the_end(kind, split):
    model, x, t = build(kind, batch=20)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    consequent.attach(optimizer, model, damping=DAMPING)
    for xs, ts in zip(x.split(split), t.split(split), strict=True):
        loss_on(xs, ts, weight=len(xs) / len(x))(model).backward()
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    assert norm > 0.1
    before, grads = weights(model), corrected(model, loss_on(x, t), samples=len(x))
    optimizer.step()
    assert_stepped(model, before, {n: g * 0.1 / (norm + 1e-6) for n, g in grads.items()})


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=6), seed=st.integers(0, 1000))
def test_any_split_into_micro_batches_is_the_whole_batch(sizes, seed):
    """A property of the design: k micro-batches accumulated equal one batch, on whichever side each is."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    x, t = torch.randn(sum(sizes), 7, dtype=torch.float64), torch.randn(sum(sizes), 2, dtype=torch.float64)
    correction = consequent.Consequentialism(model, DAMPING)
    updates = []
    for parts in ([sum(sizes)], sizes):
        model.zero_grad()
        for inputs, targets in zip(x.split(parts), t.split(parts), strict=True):
            (0.5 * (model(inputs) - targets).square().sum() / len(x)).backward()
        correction.step()
        updates.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    correction.detach()
    torch.testing.assert_close(updates[0], updates[1], rtol=1e-8, atol=1e-10)


def summed(*gradients_of_passes):
    return {name: sum(grads[name] for grads in gradients_of_passes) for name in gradients_of_passes[0]}


def check_micro_batches(model, losses, samples, at, set_to_none, lr=LR):
    """Micro-batches, some of which have gradients of zeros only: their inputs count, and those of the others."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    consequent.attach(optimizer, model, damping=DAMPING, at=at)
    for _ in range(2):
        optimizer.zero_grad(set_to_none=set_to_none)
        if at == "step":
            grads = corrected(model, *losses, samples=samples * len(losses))
        else:  # every pass by itself
            grads = summed(*(corrected(model, loss_of, samples=samples) for loss_of in losses))
        before = weights(model)
        for loss_of in losses:
            loss_of(model).backward()
        optimizer.step()
        assert_stepped(model, before, grads, lr=lr)


@pytest.mark.parametrize("kind", ["wide", "conv", "tall"])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("at", ["step", "backward"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_micro_batch_whose_loss_is_masked(kind, place, at, set_to_none):
    model, _, _ = build(kind)
    losses = [loss_on(*build(kind, seed=seed)[1:], weight=float(seed != place)) for seed in range(3)]
    check_micro_batches(model, losses, len(build(kind)[1]), at, set_to_none)


@pytest.mark.parametrize(("width", "samples"), [(20, 2), (4, 9)], ids=["wide", "tall"])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("at", ["step", "backward"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_micro_batch_in_which_all_units_are_dead(width, samples, place, at, set_to_none):
    """Neither the layer before the dead units nor the one behind them gets a gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width, bias=False), nn.ReLU(), nn.Linear(width, 3, bias=False)).double()
    with torch.no_grad():
        model[0].weight.abs_()
    losses = []
    for seed in range(3):
        x = torch.rand(samples, width, dtype=torch.float64) + 0.1
        losses.append(loss_on(-x if seed == place else x, torch.randn(samples, 3, dtype=torch.float64)))
    check_micro_batches(model, losses, samples, at, set_to_none, lr=1e-3)  # the dead stay dead
