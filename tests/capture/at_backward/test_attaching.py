"""Attaching and detaching: what is refused, what stands side by side, what stays."""

import pytest
import torch
from kinds import hooks_on
from loop.expected import DAMPING, LR, assert_close, build, corrected, gradients, loss_on, mean_loss, observe
from torch import nn

import consequent
from at_backward.expected import start


def test_foresight_is_refused():
    model, _, _ = build("wide")
    with pytest.raises(ValueError, match=r'foresight=True .* needs at="step"'):
        consequent.attach(torch.optim.SGD(model.parameters(), lr=LR), model, at="backward", foresight=True)
    assert hooks_on(model) == []
    with pytest.raises(ValueError, match="foresight"):
        consequent.CSGD(model, at="backward", foresight=True)


def test_a_time_that_is_none_is_refused():
    model, _, _ = build("wide")
    with pytest.raises(ValueError, match="'forward'"):
        consequent.attach(torch.optim.SGD(model.parameters(), lr=LR), model, at="forward")


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("modes", [("backward", "backward"), ("backward", "step"), ("step", "backward")])
def test_a_second_correction_of_the_same_layers_is_refused(modes, same):
    model, x, t = build("wide")
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    other = optimizer if same else torch.optim.Adam(model.parameters())
    first = consequent.attach(optimizer, model, damping=DAMPING, at=modes[0])
    with pytest.raises(RuntimeError, match="corrected twice"):
        consequent.attach(other, model, damping=DAMPING, at=modes[1])
    mean_loss(model(x), t).backward()
    expected = corrected(model, loss_on(x, t), samples=len(x))
    optimizer.step()
    assert_close(gradients(model), expected)
    first.detach()
    consequent.attach(other, model, damping=DAMPING, at=modes[1])


@pytest.mark.parametrize("modes", [("backward", "backward"), ("backward", "step"), ("step", "backward")])
def test_corrections_of_different_layers_stand_side_by_side(modes):
    model, x, t = build("wide")
    kept = []
    for part, at in zip(("0", "2"), modes, strict=True):
        optimizer = torch.optim.SGD(model.get_submodule(part).parameters(), lr=0.0)
        kept.append(optimizer)
        consequent.attach(optimizer, model, damping=DAMPING, at=at, include=[part])
        mean_loss(model(x), t).backward()
        optimizer.step()
        expected = corrected(model, loss_on(x, t), samples=len(x))
        found = gradients(model)
        names = [f"{part}.weight", f"{part}.bias"]
        assert_close({name: found[name] for name in names}, {name: expected[name] for name in names})
        model.zero_grad()


def test_detached_models_are_plain():
    model, x, t, optimizer, correction = start("wide")
    mean_loss(model(x), t).backward()
    correction.detach()
    assert hooks_on(model, optimizer) == []
    optimizer.zero_grad()
    mean_loss(model(x), t).backward()
    _, expected = observe(model, loss_on(x, t))
    assert_close(gradients(model), expected)
    again = consequent.attach(optimizer, model, damping=DAMPING, at="backward")
    optimizer.zero_grad()
    mean_loss(model(x), t).backward()
    assert_close(gradients(model), corrected(model, loss_on(x, t), samples=len(x)))
    assert again.counters.steps == 1


def test_a_graph_from_before_attaching_stays_plain():
    model, x, t = build("wide")
    loss = mean_loss(model(x), t)
    consequent.Consequentialism(model, damping=DAMPING, at="backward")
    loss.backward()
    _, expected = observe(model, loss_on(x, t))
    assert_close(gradients(model), expected)


def test_a_graph_from_before_detaching_still_has_gradients():
    model, x, t, *_kept, correction = start("wide")
    loss = mean_loss(model(x), t)
    correction.detach()
    loss.backward()
    assert_close(gradients(model), corrected(model, loss_on(x, t), samples=len(x)))


def test_weights_loaded_or_replaced_between_steps():
    model, x, t, optimizer, _ = start("wide")
    mean_loss(model(x), t).backward()
    optimizer.zero_grad()
    state = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    mean_loss(model(x), t).backward()
    assert_close(gradients(model), corrected(model, loss_on(x, t), samples=len(x)))
    optimizer.zero_grad()
    model[2] = nn.Linear(16, 14).double()
    optimizer.add_param_group({"params": [*model[2].parameters()]})
    mean_loss(model(x), t).backward()
    assert_close(gradients(model), corrected(model, loss_on(x, t), samples=len(x)))
