"""Several optimisers attached at once: what is refused, looked at, saved and loaded."""

import copy

import pytest
import torch
from torch import nn

import consequent
from models.expected import (
    check_same,
    expected_backward,
    half_squares,
    twin_of,
)
from models.two_optimizers import (
    LRS,
    inputs,
    make_model,
    matrices_and_rest,
    step_once,
    two_optimizers,
    zero_all,
)

MODES = ["step", "backward"]


@pytest.mark.parametrize("at", MODES)
def test_attached_separately_is_refused_and_leaves_no_trace(at):
    model = make_model()
    first, second = two_optimizers(model)
    correction = consequent.attach(first, model, at=at)
    with pytest.raises(RuntimeError, match=r"layer '0': its weight and its bias lie in two.*attach\(\[first_opt"):
        consequent.attach(second, model, at=at)
    assert not second._optimizer_step_pre_hooks
    correction.detach()
    consequent.attach(second, model, at=at).detach()
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("at", MODES)
def test_split_by_a_group_that_is_added_later(at):
    model = make_model()
    body = torch.optim.SGD([model[0].weight], lr=0.1)
    head = torch.optim.SGD(model[3].parameters(), lr=0.1)
    corrections = [consequent.attach(optimizer, model, at=at) for optimizer in (body, head)]
    head.add_param_group({"params": [model[0].bias]})
    for _ in range(2):  # and it goes on being refused
        with pytest.raises(RuntimeError, match="layer '0': its weight and its bias lie in two"):
            model(inputs(3))
    corrections[0].detach()
    with pytest.warns(consequent.ConsequentWarning, match="SGD holds its bias and not its weight"):
        step_once(model, inputs(3), head)


def test_a_parameter_that_is_added_to_a_second_one_later():
    model = make_model()
    first, second = two_optimizers(model)
    consequent.attach([first, second], model)
    second.add_param_group({"params": [model[3].weight]})
    for _ in range(2):
        with pytest.raises(ValueError, match="layer '3': SGD and SGD both hold"):
            model(inputs(3))


@pytest.mark.parametrize("at", MODES)
@pytest.mark.parametrize(("place", "held"), [(0, "weight and not its bias"), (1, "bias and not its weight")])
def test_one_half_of_a_layer_is_warned_of(place, held, at):
    model = make_model()
    optimizer = two_optimizers(model)[place]
    correction = consequent.attach(optimizer, model, at=at)
    assert f"; its {held.split()[-1]} is in none of the optimisers" in repr(correction)
    with pytest.warns(consequent.ConsequentWarning, match=f"layer '0': SGD holds its {held}"):
        step_once(model, inputs(3), optimizer)


def test_what_is_refused():
    model = make_model()
    first, second = two_optimizers(model)
    whole = torch.optim.Adam(model.parameters())
    with pytest.raises(ValueError, match="empty list"):
        consequent.attach([], model)
    with pytest.raises(ValueError, match="the same SGD is there twice"):
        consequent.attach([first, first], model)
    with pytest.raises(ValueError, match=r"layer '0': SGD and Adam both hold its parameter of shape \[5, 6\]"):
        consequent.attach([first, whole], model)
    with pytest.raises(TypeError, match=r"expected a torch.optim.Optimizer, got dict"):
        consequent.attach([first, {}], model)
    with pytest.raises(TypeError, match="LBFGS"):
        consequent.attach([first, torch.optim.LBFGS(model.parameters())], model)
    with pytest.raises(ValueError, match="Adam holds no parameter"):
        consequent.attach([first, torch.optim.Adam(make_model().parameters())], model)
    with pytest.raises(ValueError, match="foresight=True looks at what one optimiser's step does"):
        consequent.attach([first, second], model, foresight=True)
    assert type(model[0]) is nn.Linear
    assert not any(optimizer._optimizer_step_pre_hooks for optimizer in (first, second, whole))


def test_one_that_holds_no_corrected_layer_is_welcome():
    """Layers without biases in one, the normalisation in the other."""
    model = nn.Sequential(nn.Linear(6, 5, bias=False), nn.LayerNorm(5), nn.Linear(5, 2, bias=False)).double()
    optimizers = two_optimizers(model)
    correction = consequent.attach(optimizers, model)
    half_squares(model(inputs(4))).backward()
    for optimizer in optimizers:
        optimizer.step()
    assert len(correction.corrected) == 2


def test_looking_and_detaching(bounded):
    model = make_model()
    first, second = two_optimizers(model, (torch.optim.SGD, torch.optim.AdamW))
    correction = consequent.attach([first, second], model)
    shown = repr(correction)
    assert "attached to SGD and AdamW" in shown
    assert "bound: off with several optimisers" in shown
    assert correction.optimizers == [first, second]
    assert correction.optimizer is first
    with pytest.raises(RuntimeError, match="already attached to SGD and AdamW"):
        correction.attach(first)
    with pytest.raises(RuntimeError, match="SGD and AdamW: attached to these layers already"):
        consequent.attach(second, model)
    first.param_groups[0]["lr"] = 1e4
    half_squares(model(inputs(4))).backward()
    first.step()
    assert correction.counters.bounded == 0
    correction.detach()
    assert not any([*o._optimizer_step_pre_hooks, *o._optimizer_step_post_hooks] for o in (first, second))
    assert type(model[0]) is nn.Linear


def test_one_that_is_thrown_away():
    """Nobody steps what it held: the other's parameters are corrected as if those stood still."""
    model = make_model()
    twin = twin_of(model)
    first, second = two_optimizers(model)
    correction = consequent.attach([first, second], model)
    del second
    assert correction.optimizers == [first]
    x = inputs(4)
    with pytest.warns(consequent.ConsequentWarning, match="SGD holds its weight and not its bias"):
        step_once(model, x, first)
    weights = set(matrices_and_rest(twin)[0])
    expected_backward(twin, lambda m: half_squares(m(x)), 4, trains=weights.__contains__)
    torch.optim.SGD(weights, lr=LRS[0]).step()
    check_same(model, twin)
    del first
    assert "thrown away" in repr(correction)
    assert type(model[0]) is nn.Linear


def test_states_are_saved_and_loaded():
    """What a run that is interrupted goes on with is what it would have gone on with."""

    def make(model):
        optimizers = two_optimizers(model, (torch.optim.SGD, torch.optim.Adam))
        return optimizers, consequent.attach(optimizers, model, relative_damping=0.3, averaging=0.9, refresh=2)

    def train(model, optimizers, numbers):
        for number in numbers:
            zero_all(optimizers)
            half_squares(model(inputs(20, number))).backward()
            for optimizer in optimizers:
                optimizer.step()

    model = make_model()
    optimizers, correction = make(model)
    train(model, optimizers, range(3))
    saved = copy.deepcopy([part.state_dict() for part in (model, *optimizers, correction)])
    train(model, optimizers, range(3, 6))
    other = make_model()
    theirs, its_correction = make(other)
    its_correction.relative_damping = 0.7
    *states, of_correction = saved
    for part, state in zip((other, *theirs), states, strict=True):
        part.load_state_dict(state)
    with pytest.warns(consequent.ConsequentWarning, match=r"takes the place of relative_damping=0\.7"):
        its_correction.load_state_dict(of_correction)
    assert its_correction.relative_damping == 0.3
    train(other, theirs, range(3, 6))
    check_same(model, other, rtol=0, atol=0)
    assert its_correction.counters == correction.counters


def test_a_damping_that_is_set_is_that_of_all_groups_without_their_own():
    model = make_model()
    optimizers = two_optimizers(model)
    for optimizer, damping in zip(optimizers, (0.1, 0.3), strict=True):
        optimizer.param_groups[0]["damping"] = damping
    correction = consequent.attach(optimizers, model, damping=0.1)
    assert "damping=0.1 and damping=0.3" in repr(correction)
    correction.damping = 0.5
    assert [optimizer.param_groups[0]["damping"] for optimizer in optimizers] == [0.5, 0.3]
