"""Optimisers attached at once, or parameter groups, whose gradients were scaled by different numbers, or are bad."""

import pytest
import torch
from torch import nn

import consequent
from models.expected import (
    check_same,
    check_same_grads,
    expected_backward,
    half_squares,
    twin_of,
)
from models.two_optimizers import (
    LRS,
    inputs,
    make_model,
    matrices_and_rest,
    one_optimizer,
    two_optimizers,
    zero_all,
)

MODES = ["step", "backward"]


@pytest.mark.parametrize("samples", [3, 20])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["weights first", "biases first"])
@pytest.mark.parametrize("unscaled", ["none", "first", "second", "both"])
@pytest.mark.parametrize("at", MODES)
def test_a_scaler_that_unscales_one_after_the_other(samples, order, unscaled, at):
    model = make_model()
    twin = twin_of(model)
    optimizers, naive = two_optimizers(model), two_optimizers(twin)
    correction = consequent.attach(optimizers, model, at=at)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16 / 3)
    for number in range(2):
        x = inputs(samples, number)
        zero_all([*optimizers, *naive])
        scaler.scale(half_squares(model(x))).backward()
        for place in {"none": (), "first": order[:1], "second": order[1:], "both": order}[unscaled]:
            scaler.unscale_(optimizers[place])
        for place in order:
            scaler.step(optimizers[place])
        scaler.update()
        expected_backward(twin, lambda m, x=x: half_squares(m(x)), samples)
        for optimizer in naive:
            optimizer.step()
    check_same(model, twin)
    assert correction.counters.edited == 0


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("samples", [50, 400])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.03)], ids=str)
def test_a_scaler_with_rounded_gradients(dtype, tolerance, samples, waits, monkeypatch):
    """What one optimiser would do with all parameters; also as on a GPU, where nobody looks at the numbers."""
    if not waits:
        monkeypatch.setattr("consequent.capture.separate_scales.answers_at_once", lambda tensor: False)
    torch.manual_seed(0)
    model = nn.Linear(300, 100, dtype=dtype)
    twin = twin_of(model)
    optimizers, single = two_optimizers(model, lrs=(0.1, 0.1)), one_optimizer(twin, lrs=(0.1, 0.1))
    for optimizer, m in ((optimizers, model), (single, twin)):
        consequent.attach(optimizer, m)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16 / 3)
    x = torch.randn(samples, 300, dtype=dtype)
    scaler.scale(half_squares(model(x))).backward()
    half_squares(twin(x)).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    single.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert (p.grad - q.grad).norm() <= tolerance * q.grad.norm()


@pytest.mark.parametrize("fused", [(True, False), (False, True), (True, True)])
def test_a_scaler_with_fused_optimizers(fused):
    model = make_model()
    twin = twin_of(model)
    optimizers = [
        torch.optim.SGD(part, lr=lr, fused=is_fused)
        for part, lr, is_fused in zip(matrices_and_rest(model), LRS, fused, strict=True)
    ]
    naive = two_optimizers(twin)
    correction = consequent.attach(optimizers, model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x = inputs(20)
    scaler.scale(half_squares(model(x))).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    expected_backward(twin, lambda m: half_squares(m(x)), 20)
    for optimizer in naive:
        optimizer.step()
    check_same(model, twin)
    assert correction.counters.edited == 0


@pytest.mark.parametrize("are_groups", [False, True], ids=["optimisers", "groups"])
@pytest.mark.parametrize("samples", [3, 20])
def test_each_is_clipped_by_itself(samples, are_groups):
    """Scaling the gradients of an optimiser, or of a parameter group, by a number scales its update by it."""
    model = make_model()
    twin = twin_of(model)
    optimizers = [one_optimizer(model)] if are_groups else two_optimizers(model)
    correction = consequent.attach(optimizers, model)
    x = inputs(samples)
    half_squares(model(x)).backward()
    factors = [0.01 / nn.utils.clip_grad_norm_(part, 0.01) for part in matrices_and_rest(model)]
    for optimizer in optimizers:
        optimizer.step()
    expected_backward(twin, lambda m: half_squares(m(x)), samples)
    for part, factor in zip(matrices_and_rest(twin), factors, strict=True):
        assert factor < 0.9
        for parameter in part:
            parameter.grad *= factor
    check_same_grads(model, twin, rtol=1e-4)  # clip_grad_norm_ adds 1e-6 to the norm
    assert correction.counters.edited == 0


def test_a_penalty_is_still_told_apart():
    model = make_model()
    twin = twin_of(model)
    optimizers = two_optimizers(model)
    consequent.attach(optimizers, model)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    x = inputs(20)
    scaler.scale(half_squares(model(x)) + sum(p.square().sum() for p in model[0].parameters())).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    expected_backward(twin, lambda m: half_squares(m(x)), 20)
    for parameter in twin[0].parameters():
        parameter.grad += 2 * parameter.detach()
    check_same_grads(model, twin)


def test_edited_gradients_are_told_of():
    model = make_model()
    optimizers = two_optimizers(model)
    correction = consequent.attach(optimizers, model)
    half_squares(model(inputs(3))).backward()
    nn.utils.clip_grad_value_(model[0].weight, 1e-3)
    with pytest.warns(consequent.ConsequentWarning, match="not the one its inputs explain"):
        optimizers[0].step()
    assert correction.counters.edited == 1


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("samples", [3, 20])
@pytest.mark.filterwarnings("ignore::consequent.ConsequentWarning")
def test_nan_skips_the_steps_of_both(samples, order):
    model = make_model()
    optimizers = two_optimizers(model, weight_decay=0.1)
    correction = consequent.attach(optimizers, model)
    before = twin_of(model)
    bad = inputs(samples)
    bad[0, 0] = torch.nan
    half_squares(model(bad)).backward()
    for place in order:
        optimizers[place].step()
        optimizers[place].zero_grad()
    check_same(model, before, rtol=0, atol=0)
    assert correction.counters.skipped == 1
    half_squares(model(inputs(samples))).backward()
    for place in order:
        optimizers[place].step()
    assert all(not torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters(), strict=True))


@pytest.mark.filterwarnings("ignore::consequent.ConsequentWarning")
def test_a_scaler_that_skips_one_of_them_skips_both():
    """The overflow is in the gradients of one alone; the scaler would let the other go on."""
    model = make_model()
    optimizers = two_optimizers(model)
    consequent.attach(optimizers, model)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    before = twin_of(model)
    scaler.scale(half_squares(model(inputs(20)))).backward()
    model[0].bias.grad[0] = torch.inf
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    check_same(model, before, rtol=0, atol=0)
    assert scaler.get_scale() == 128.0
