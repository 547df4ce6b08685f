"""One backward pass a step: the consequentialist gradient of that very pass is in ``.grad`` after it."""

import numpy as np
import pytest
import reference
import torch
from kinds import BATCHES, make_model
from loop.expected import (
    DAMPING,
    KINDS,
    LR,
    after_sgd,
    assert_close,
    assert_same,
    assert_stepped,
    build,
    corrected,
    gradients,
    loss_on,
    mean_loss,
    twin,
    weights,
)
from models.expected import half_squares, twin_of
from torch import nn

import consequent
from at_backward.expected import TOLERANCE, start


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_is_there_after_backward(kind, dtype):
    model, x, t, *_kept, correction = start(kind, dtype=dtype)
    mean_loss(model(x), t).backward()
    assert_close(gradients(model), corrected(model, loss_on(x, t), samples=len(x)), TOLERANCE[dtype])
    assert {p.grad.dtype for p in model.parameters()} == {dtype}
    assert correction.samples == len(x)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("batch", [1, None, 40])
@pytest.mark.parametrize("kind", KINDS)
def test_one_pass_is_what_the_step_would_make_of_it(kind, batch, dtype):
    found = []
    for at in ("backward", "step"):
        model, x, t, optimizer, _ = start(kind, at, dtype, batch)
        before = weights(model)
        mean_loss(model(x), t).backward()
        optimizer.step()
        assert_stepped(model, before, gradients(model), tolerance=1e-3)
        found.append(gradients(model))
    assert_close(*found, TOLERANCE[dtype])


@pytest.mark.parametrize("options", [{"damping": 0.0}, {"relative_damping": 0.2}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_other_dampings(kind, options):
    found = []
    for at in ("backward", "step"):
        model, x, t = build(kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        consequent.attach(optimizer, model, at=at, **options)
        mean_loss(model(x), t).backward()
        optimizer.step()
        found.append(gradients(model))
    assert_close(*found, 1e-7)
    if options == {"damping": 0.0}:
        model, x, t = build(kind)
        assert_close(found[0], corrected(model, loss_on(x, t), samples=len(x), damping=0.0), 1e-7)


@pytest.mark.parametrize(
    ("loss_reduction", "divisor"),
    [("sum", 1), (7.0, 7), (lambda samples: 3 * samples, 15)],
    ids=["sum", "number", "callable"],
)
def test_the_divisor_of_the_loss(loss_reduction, divisor):
    model, x, t, *_kept = start("wide", loss_reduction=loss_reduction)
    mean_loss(model(x), t).backward()
    assert_close(gradients(model), corrected(model, loss_on(x, t), samples=divisor))


def test_dampings_of_groups_and_changes_of_the_damping():
    model, x, t = build("wide")
    groups = [{"params": model[0].parameters(), "damping": 3.0}, {"params": [*model[2:].parameters()]}]
    optimizer = torch.optim.SGD(groups, lr=0.0)
    correction = consequent.attach(optimizer, model, damping=DAMPING, at="backward")
    for damping in (DAMPING, 7.0):
        correction.damping = damping
        optimizer.zero_grad()
        mean_loss(model(x), t).backward()
        default = corrected(model, loss_on(x, t), samples=len(x), damping=damping)
        own = corrected(model, loss_on(x, t), samples=len(x), damping=3.0)
        assert_close(gradients(model), {name: (own if name[0] == "0" else default)[name] for name in default})


@pytest.mark.parametrize("frozen", ["weight", "bias"])
@pytest.mark.parametrize("kind", KINDS)
def test_frozen_parameters_leave_the_solve(kind, frozen):
    model, x, t = build(kind)
    getattr(model[0], frozen).requires_grad_(False)
    getattr(model[-1], frozen).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    consequent.attach(optimizer, model, damping=DAMPING, at="backward")
    mean_loss(model(x), t).backward()
    expected = corrected(model, loss_on(x, t), samples=len(x))
    assert f"0.{frozen}" not in expected
    assert_close(gradients(model), expected)


def test_frozen_and_thawed_again():
    model, x, t, optimizer, _ = start("wide")
    for trained in (False, True, False):
        model[2].weight.requires_grad_(trained)
        optimizer.zero_grad()
        mean_loss(model(x), t).backward()
        assert_close(gradients(model), corrected(model, loss_on(x, t), samples=len(x)))


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_input_gradients_stay_plain(kind, requires_grad):
    """ΔZ of the layers below is what backpropagation says: also where inputs have a gradient of their own."""
    model, x, t, *_kept = start(kind)
    x.requires_grad_(requires_grad)
    mean_loss(model(x), t).backward()
    assert_close(gradients(model), corrected(model, loss_on(x.detach(), t), samples=len(x)))
    if requires_grad:
        plain = x.detach().clone().requires_grad_()
        mean_loss(twin(model)(plain), t).backward()
        torch.testing.assert_close(x.grad, plain.grad)


def test_a_layer_as_the_model_and_its_output_as_the_root():
    torch.manual_seed(0)
    layer, x, output_grad = nn.Linear(6, 3).double(), torch.randn(4, 6).double(), torch.randn(4, 3).double()
    correction = consequent.Consequentialism(layer, damping=DAMPING, at="backward")
    layer(x).backward(output_grad)
    (expected,) = reference.corrected_matrices(layer, x, output_grad, DAMPING)
    (actual,) = reference.gradient_matrices(layer, layer.weight.grad.numpy(), layer.bias.grad.numpy())
    np.testing.assert_allclose(actual, 4 * expected, rtol=1e-10)
    assert correction.samples == 4


def test_one_sample_without_a_batch_dimension():
    model, x, t, *_kept, correction = start("wide")
    (0.5 * (model(x[0]) - t[0]).square().sum()).backward()
    assert_close(gradients(model), corrected(model, loss_on(x[:1], t[:1]), samples=1))
    assert correction.samples == 1


@pytest.mark.parametrize("kind", KINDS)
def test_no_samples_give_no_gradient(kind):
    model, x, t, *_kept, correction = start(kind)
    mean_loss(model(x[:0]), t[:0]).backward()
    assert_same(gradients(model), {name: torch.zeros_like(p) for name, p in model.named_parameters()})
    assert correction.samples == 0


def test_parameters_that_are_not_corrected_stay_plain():
    model = make_model()
    optimizer = torch.optim.SGD([*model[:3].parameters()], lr=LR)  # not the last layer
    consequent.attach(optimizer, model, damping=DAMPING, at="backward")
    x, plain = BATCHES[0], twin_of(model)
    half_squares(model(x)).backward()
    half_squares(plain(x)).backward()
    for name in ("2.weight", "2.bias", "3.weight", "3.bias"):
        torch.testing.assert_close(model.get_parameter(name).grad, plain.get_parameter(name).grad)
    assert not torch.allclose(model[0].weight.grad, plain[0].weight.grad)


def test_two_steps_go_where_they_should():
    model, x, t, optimizer, _ = start("wide")
    for _ in range(2):
        expected = after_sgd(weights(model), corrected(model, loss_on(x, t), samples=len(x)))
        optimizer.zero_grad()
        mean_loss(model(x), t).backward()
        optimizer.step()
        assert_close(weights(model), expected)
