"""What can be done with the gradient between ``backward()`` and the step: clipping, hooks, penalties."""

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
    weights,
)
from torch import nn

import consequent
from at_backward.expected import added, start


@pytest.mark.parametrize("kind", KINDS)
def test_clipping_clips_what_is_applied(kind):
    model, x, t, optimizer, _ = start(kind)
    before = weights(model)
    mean_loss(model(x), t).backward()
    expected = corrected(model, loss_on(x, t), samples=len(x))
    norm = torch.stack([grad.norm() for grad in expected.values()]).norm()
    assert nn.utils.clip_grad_norm_(model.parameters(), 0.01).item() == pytest.approx(norm.item(), rel=1e-7)
    optimizer.step()
    assert_stepped(
        model, before, {name: grad * 0.01 / (norm + 1e-6) for name, grad in expected.items()}, tolerance=1e-7
    )


def test_clipping_by_value_is_no_trouble():
    model, x, t, optimizer, correction = start("wide")
    mean_loss(model(x), t).backward()
    expected = {name: g.clamp(-0.05, 0.05) for name, g in corrected(model, loss_on(x, t), samples=len(x)).items()}
    nn.utils.clip_grad_value_(model.parameters(), 0.05)
    before = weights(model)
    optimizer.step()
    assert_stepped(model, before, expected)
    assert correction.counters.edited == 0


def test_hooks_on_parameters_see_it():
    model, x, t, *_kept = start("wide")
    seen, accumulated = {}, {}
    for name, p in model.named_parameters():
        p.register_hook(lambda grad, name=name: seen.setdefault(name, grad.clone()) * 2)
        p.register_post_accumulate_grad_hook(lambda p, name=name: accumulated.update({name: p.grad.clone()}))
    mean_loss(model(x), t).backward()
    expected = corrected(model, loss_on(x, t), samples=len(x))
    twice = {name: 2 * grad for name, grad in expected.items()}
    assert_close(seen, expected)
    assert_close(accumulated, twice)
    assert_close(gradients(model), twice)


@pytest.mark.parametrize("kind", KINDS)
def test_optimizers_in_the_backward_pass(kind):
    """``torch``'s recipe: each parameter is stepped, and its gradient thrown away, as soon as it is there."""
    model, x, t = build(kind)
    consequent.Consequentialism(model, damping=DAMPING, at="backward")
    optimizers = {p: torch.optim.SGD([p], lr=LR) for p in model.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    for _ in range(3):
        before, expected = weights(model), corrected(model, loss_on(x, t), samples=len(x))
        mean_loss(model(x), t).backward()
        assert_stepped(model, before, expected)
        assert gradients(model) == {}


def test_a_step_by_hand_is_nothing():
    model, x, t, optimizer, correction = start("wide")
    correction.step()  # nothing is there, and nothing is asked for
    mean_loss(model(x), t).backward()
    before, now = gradients(model), weights(model)
    correction.step()
    correction.step()
    assert_same(gradients(model), before)
    optimizer.step()
    assert_stepped(model, now, before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_penalty_in_the_loss_stays_plain(kind):
    model, x, t, *_kept, correction = start(kind)
    (mean_loss(model(x), t) + 0.3 * sum(p.square().sum() for p in model.parameters())).backward()
    expected = corrected(model, loss_on(x, t), samples=len(x))
    penalty = {name: 0.6 * p.detach() for name, p in model.named_parameters()}
    assert_close(gradients(model), added(expected, penalty))
    assert correction.counters.edited == 0


def test_a_penalty_on_a_weight_by_itself():
    """A pass that goes through no product."""
    model, x, *_kept = start("wide")
    model(x)
    model[0].weight.square().sum().backward()
    assert_same(gradients(model), {"0.weight": 2 * model[0].weight.detach()})
