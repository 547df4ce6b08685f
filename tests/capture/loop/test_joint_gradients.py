"""Gradients of units of several parameters that were scaled, edited or penalised, or are bad."""

import copy

import pytest
import torch
from models.expected import check_same_grads
from recurrent_training import DAMPING, Expected, attached, made, normal, split, squares
from torch import nn

import consequent

AT = ["step", "backward"]


@pytest.mark.parametrize("factor", [0.01, 65536.0])
def test_scaled_gradients_are_solved_for_scaled(factor):
    model, twin = made()
    optimizer, _ = attached(model)
    x = normal(5, 4, 3)
    squares(model(x)).sum().backward()
    for parameter in model.parameters():
        parameter.grad.mul_(factor)
    optimizer.step()
    expected = Expected(twin)
    squares(expected(x)).sum().backward()
    expected.correct(scale=factor)
    check_same_grads(model, twin)


@pytest.mark.parametrize("samples", [1, 5])
def test_groups_that_are_scaled_apart_are_solved_for_together(samples):
    model, twin = made(nn.LSTM)
    groups = [[p for p in model.parameters() if p.ndim == dims] for dims in (2, 1)]
    optimizer = torch.optim.SGD([{"params": group} for group in groups], lr=0.05)
    correction = consequent.attach(optimizer, model, relative_damping=DAMPING[1], loss_reduction="sum")
    x = normal(samples, 4, 3)
    squares(model(x)).sum().backward()
    for group, factor in zip(groups, (0.5, 0.01), strict=True):
        for parameter in group:
            parameter.grad.mul_(factor)
    optimizer.step()
    expected = Expected(twin)
    squares(expected(x)).sum().backward()
    expected.correct()
    for parameter in twin.parameters():
        parameter.grad *= 0.5 if parameter.ndim == 2 else 0.01
    check_same_grads(model, twin)
    assert correction.counters.edited == 0


@pytest.mark.parametrize("at", AT)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_penalty_on_the_weights_stays_as_it_is(kind, at):
    model, twin = made(kind)
    optimizer, _ = attached(model, at=at)
    x = normal(5, 4, 3)

    def penalty(m):
        return sum((number + 1) * p.square().sum() for number, p in enumerate(m.recurrent.parameters()))

    (squares(model(x)).sum() + penalty(model)).backward()
    optimizer.step()
    expected = Expected(twin)
    squares(expected(x)).sum().backward()
    expected.correct()
    for number, parameter in enumerate(twin.recurrent.parameters()):
        parameter.grad += 2 * (number + 1) * parameter.detach()
    check_same_grads(model, twin)


def test_an_edited_gradient_is_solved_for_like_any_other():
    model, twin = made(nn.RNN)
    optimizer, _ = attached(model, relative_damping=None, damping=0.03)
    x = normal(5, 4, 3)
    squares(model(x)).sum().backward()
    torch.nn.utils.clip_grad_value_(model.recurrent.parameters(), 1.0)
    grads = {name: p.grad.clone() for name, p in model.recurrent.named_parameters()}
    assert any((grad.abs() == 1).any() for grad in grads.values())
    optimizer.step()
    expected = Expected(twin)
    squares(expected(x)).sum().backward()
    X = torch.stack([torch.cat([x, h, x.new_ones(1)]) for x, h, _ in expected.loops.units[0][0].seen])
    bias = (grads["bias_ih_l0"] + grads["bias_hh_l0"])[:, None] / 2
    G = torch.cat([grads["weight_ih_l0"], grads["weight_hh_l0"], bias], dim=1)
    new = torch.linalg.solve(X.T @ X + 0.03 * torch.eye(8, dtype=X.dtype), G.T).T
    torch.testing.assert_close(model.recurrent.weight_ih_l0.grad, new[:, :3])
    torch.testing.assert_close(model.recurrent.weight_hh_l0.grad, new[:, 3:7])
    torch.testing.assert_close(model.recurrent.bias_ih_l0.grad, new[:, 7] / 2)


@pytest.mark.parametrize("at", AT)
def test_in_half_precision_by_autocast(at):
    model, twin = made(nn.GRU)
    model, twin = model.float(), twin.double()
    optimizer, _ = attached(model, at=at)
    x = normal(5, 4, 3)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(x.float())
    squares(outputs.float()).sum().backward()
    optimizer.step()
    expected = Expected(twin)
    squares(expected(x)).sum().backward()
    expected.correct()
    for name, parameter in model.named_parameters():
        assert parameter.grad.dtype == torch.float32
        error = (parameter.grad - twin.get_parameter(name).grad).norm() / twin.get_parameter(name).grad.norm()
        assert error < 0.1, name


def test_nan_skips_the_step():
    model, _ = made()
    optimizer, correction = attached(model)
    before = copy.deepcopy(model.state_dict())
    x = normal(5, 4, 3)
    x[0, 0, 0] = torch.nan
    squares(model(x)).sum().backward()
    with pytest.warns(consequent.ConsequentWarning, match="NaN"):
        optimizer.step()
    assert correction.counters.skipped == 1
    torch.testing.assert_close(dict(model.state_dict()), dict(before))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.usefixtures("bounded")
def test_the_bound_shortens_a_unit_as_a_whole(kind):
    model, twin = made(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=100.0)
    correction = consequent.attach(optimizer, model, relative_damping=DAMPING[1], loss_reduction="sum")
    x = normal(5, 4, 3)
    squares(model(x)).sum().backward()
    optimizer.step()
    expected = Expected(twin)
    squares(expected(x)).sum().backward()
    expected.correct()
    ratios = [
        (p.grad / twin.recurrent.get_parameter(name).grad).flatten() for name, p in model.recurrent.named_parameters()
    ]
    ratios = torch.cat(ratios)
    assert correction.counters.bounded == 2
    assert ratios.max() < 0.5
    torch.testing.assert_close(ratios, ratios[:1].expand_as(ratios), rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
@pytest.mark.parametrize("at", AT)
def test_weights_and_biases_in_two_optimisers(at, kind):
    model, twin = made(kind)
    optimizers, (optimizer, correction) = split(model), attached(twin, at=at)
    together = consequent.attach(optimizers, model, at=at, relative_damping=DAMPING[1], loss_reduction="sum")
    x = normal(5, 4, 3)
    for net, one in ((model, together), (twin, correction)):
        squares(net(x)).sum().backward()
        if at == "step":
            one.step()
    check_same_grads(model, twin)
    del optimizer


def test_biases_of_another_scale():
    """One of two optimisers clips its gradients before the step: its part of the new ones is clipped as much."""
    model, twin = made(nn.LSTM)
    optimizers, (optimizer, correction) = split(model), attached(twin)
    consequent.attach(optimizers, model, relative_damping=DAMPING[1], loss_reduction="sum", bound=None)
    x, biases = normal(5, 4, 3), [[p for p in net.parameters() if p.ndim == 1] for net in (model, twin)]
    squares(model(x)).sum().backward()
    squares(twin(x)).sum().backward()
    for bias in biases[0]:
        bias.grad *= 0.25
    correction.step()
    for bias in biases[1]:
        bias.grad *= 0.25
    for one in optimizers:
        one.step()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    for parameter, expected in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected)
    del optimizer


@pytest.mark.parametrize("kind", [nn.LSTM, nn.MultiheadAttention])
def test_what_few_rows_do_not_explain_is_shortened_counted_and_told_of(kind):
    torch.manual_seed(0)
    model = (nn.LSTM(64, 8, batch_first=True) if kind is nn.LSTM else nn.MultiheadAttention(64, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    correction = consequent.attach(optimizer, model)
    x = normal(3, 1, 64)
    (model(x)[0] if kind is nn.LSTM else model(x, x, x)[0]).sum().backward()
    weight = model.weight_ih_l0 if kind is nn.LSTM else model.in_proj_weight
    outside = torch.eye(64, dtype=x.dtype) - torch.linalg.pinv(x[:, 0]) @ x[:, 0]
    edit = normal(*weight.shape, seed=1) @ outside
    weight.grad += edit
    with pytest.warns(consequent.ConsequentWarning, match="not the one its inputs explain"):
        correction.step()
    assert correction.counters.edited == 1
    left = weight.grad @ outside
    cosine = (left * edit).sum() / (left.norm() * edit.norm())
    assert cosine > 0.999
    assert 0 < left.norm() < 0.2 * edit.norm()
