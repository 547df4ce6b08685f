"""Attaching, detaching, and the arguments that are refused."""

import copy
import math
import pickle
import warnings
from contextlib import nullcontext

import pytest
import torch
from kinds import BATCHES, KINDS, LR, READY, hooks_on, make_model, train, train_expected
from models.expected import check_same, expected_backward, half_squares, twin_of
from torch import nn
from torch.optim.lr_scheduler import StepLR

import consequent


@pytest.mark.parametrize("name", READY)
def test_parameters_instead_of_the_model(name):
    with pytest.raises(TypeError, match="pass the model itself and not its parameters"):
        KINDS[name].ready(make_model().parameters(), lr=0.1)


def test_parameters_instead_of_the_model_in_attach():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="pass the model itself and not its parameters"):
        consequent.attach(optimizer, model.parameters())


def test_arguments_of_attach_in_the_wrong_order():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"got the model Sequential first: the order is attach\(optimizer, model\)"):
        consequent.attach(model, optimizer)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"damping": -1.0}, ValueError),
        ({"damping": math.nan}, ValueError),
        ({"damping": math.inf}, ValueError),
        ({"damping": "0.1"}, TypeError),
        ({"damping": 0.1, "relative_damping": 0.1}, ValueError),
        ({"relative_damping": -0.1}, ValueError),
        ({"relative_damping": math.nan}, ValueError),
        ({"loss_reduction": "average"}, ValueError),
        ({"loss_reduction": 0}, ValueError),
        ({"loss_reduction": -3.0}, ValueError),
        ({"unknown": 3}, TypeError),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["CSGD", "CAdam", "attach"])
def test_wrong_options_name_the_culprit_and_leave_no_hooks(name, wrong, error):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    make = {"attach": lambda **w: consequent.attach(optimizer, model, **w)}.get(name)
    make = make or (lambda **w: KINDS[name].ready(model, lr=0.1, **w))
    with pytest.raises(error, match=next(iter(wrong))):
        make(**wrong)
    assert hooks_on(model, optimizer) == []


@pytest.mark.parametrize("name", READY)
def test_wrong_options_of_the_torch_optimizer(name):
    model = make_model()
    with pytest.raises(ValueError, match="learning rate"):
        KINDS[name].ready(model, lr=-0.1)
    with pytest.raises(TypeError, match="learning_rate"):
        KINDS[name].ready(model, learning_rate=0.1)
    assert hooks_on(model) == []


def test_the_learning_rate_as_second_argument_is_refused_with_advice():
    """``SGD(params, 0.1)`` is common; here the second argument is ``params``."""
    model = make_model()
    with pytest.raises(TypeError, match=r"\blr\b|params"):
        consequent.CSGD(model, 0.1)
    assert hooks_on(model) == []


@pytest.mark.parametrize("damping", [-1.0, math.nan, "1"])
def test_wrong_damping_in_a_parameter_group_changes_no_weight(damping):
    model = make_model()
    optimizer = consequent.CSGD(model, lr=LR)
    train(model, optimizer)
    before = twin_of(model)
    optimizer.param_groups[0]["damping"] = damping
    with pytest.raises((ValueError, TypeError), match=r"damping.*in a parameter group"):
        train(model, optimizer)
    check_same(model, before, rtol=0, atol=0)


def test_the_optimizer_of_another_model():
    model, other = make_model(), make_model()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="made for another model"):
        consequent.attach(optimizer, model)
    assert hooks_on(model, optimizer) == []


def test_not_an_optimizer():
    model = make_model()
    with pytest.raises(TypeError, match=r"expected a torch.optim.Optimizer, got StepLR"):
        consequent.attach(StepLR(torch.optim.SGD(model.parameters(), lr=0.1), 1), model)
    assert hooks_on(model) == []


def test_lbfgs_is_refused():
    model = make_model()
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(TypeError, match="LBFGS cannot be made consequentialist"):
        consequent.attach(optimizer, model)
    assert hooks_on(model, optimizer) == []


def test_attaching_twice():
    model = make_model()
    twin = twin_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    correction = consequent.attach(optimizer, model)
    hooks = len(hooks_on(model, optimizer))
    with pytest.raises(RuntimeError, match="attached to these layers already"):
        consequent.attach(optimizer, model, damping=1.0)
    with pytest.raises(RuntimeError, match="already attached to SGD"):
        correction.attach(torch.optim.SGD(model.parameters(), lr=LR))
    assert len(hooks_on(model, optimizer)) == hooks
    train(model, optimizer)
    train_expected(twin, torch.optim.SGD(twin.parameters(), lr=LR))
    check_same(model, twin)


def test_attaching_to_a_ready_made_optimizer_is_attaching_twice():
    model = make_model()
    optimizer = consequent.CSGD(model, lr=LR)
    with pytest.raises(RuntimeError, match="attached to these layers already"):
        consequent.attach(optimizer, model)


def test_two_optimizers_with_the_same_parameters_are_refused_at_the_step():
    model = make_model()
    optimizers = [torch.optim.SGD(model.parameters(), lr=LR) for _ in range(2)]
    corrections = [consequent.attach(optimizer, model) for optimizer in optimizers]
    half_squares(model(BATCHES[0])).backward()
    optimizers[0].step()
    before = twin_of(model)
    with pytest.raises(RuntimeError, match="corrected twice"):
        optimizers[1].step()
    check_same(model, before, rtol=0, atol=0)
    assert len(corrections) == 2


def test_attached_again_after_detaching():
    model = make_model()
    twin = twin_of(model)
    optimizer, plain = (torch.optim.SGD(m.parameters(), lr=LR, momentum=0.9) for m in (model, twin))
    correction = consequent.attach(optimizer, model)
    train(model, optimizer)
    train_expected(twin, plain)
    correction.detach()
    assert hooks_on(model, optimizer) == []
    train(model, optimizer)
    train(twin, plain)
    with pytest.raises(RuntimeError, match="detached"):
        correction.attach(optimizer)
    consequent.attach(optimizer, model, damping=0.3)
    train(model, optimizer)
    train_expected(twin, plain, damping=0.3)
    check_same(model, twin)


def test_detaching_twice():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    correction = consequent.attach(optimizer, model)
    correction.detach()
    with pytest.raises(RuntimeError, match="detached already"):
        correction.detach()
    assert hooks_on(model, optimizer) == []


def test_detached_between_backward_and_step_is_plain():
    model = make_model()
    twin = twin_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    correction = consequent.attach(optimizer, model)
    half_squares(model(BATCHES[0])).backward()
    correction.detach()
    optimizer.step()
    train(twin, torch.optim.SGD(twin.parameters(), lr=LR), BATCHES[:1])
    check_same(model, twin, rtol=0, atol=0)


def test_a_detached_ready_made_optimizer_is_plain():
    model = make_model()
    twin = twin_of(model)
    optimizer = consequent.CAdam(model, lr=LR)
    optimizer.correction.detach()
    train(model, optimizer)
    train(twin, torch.optim.Adam(twin.parameters(), lr=LR))
    check_same(model, twin, rtol=0, atol=0)
    assert hooks_on(model, optimizer) == []


def test_correction_by_hand_is_not_repeated():
    model = make_model()
    twin = twin_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    correction = consequent.attach(optimizer, model)

    def by_hand():
        half_squares(model(BATCHES[0])).backward()
        correction.step()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    by_hand()
    expected_backward(twin, lambda m: half_squares(m(BATCHES[0])), 4)
    nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
    torch.optim.SGD(twin.parameters(), lr=LR).step()
    check_same(model, twin)


def test_an_optimizer_that_nobody_holds():
    model = make_model()
    correction = consequent.attach(torch.optim.SGD(model.parameters(), lr=0.1), model)
    assert "thrown away" in repr(correction)
    assert not hooks_on(model)
    with pytest.warns(consequent.ConsequentWarning, match="no longer exists, and with it the correction"):
        half_squares(model(BATCHES[0])).backward()
    with pytest.raises(RuntimeError, match="no longer exists; keep a reference"):
        correction.step()


def test_nothing_is_told_of_an_optimizer_that_is_gone_after_detaching():
    model = make_model()
    correction = consequent.attach(torch.optim.SGD(model.parameters(), lr=0.1), model)
    correction.detach()
    assert not any(parameter._backward_hooks for parameter in model.parameters())
    half_squares(model(BATCHES[0])).backward()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda given: pickle.loads(pickle.dumps(given))])
def test_a_copied_correction_is_none_and_that_is_told(copied):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    correction = consequent.attach(optimizer, model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copied(model)
        copied(optimizer)
    with pytest.warns(
        consequent.ConsequentWarning, match=r"there is None in its place.*Attach to the copies"
    ) as caught:
        assert copied({"correction": correction})["correction"] is None
    assert caught[0].filename == __file__


def test_a_class_instead_of_an_optimizer():
    with pytest.raises(TypeError, match="got the class SGD; make an instance"):
        consequent.attach(torch.optim.SGD, make_model())


def test_ranks_that_nothing_connects_are_warned_of(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    for options in ({}, {"across_ranks": False}):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        correction = consequent.attach(optimizer, model, **options)
        half_squares(model(BATCHES[0])).backward()
        expected = pytest.warns(consequent.ConsequentWarning, match="4 ranks") if not options else nullcontext()
        with expected:
            optimizer.step()
        with pytest.raises(RuntimeError, match="corrects alone"):
            correction.communication()


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"damping": "0.1"}, "damping must be a number, got '0.1'; the paper uses 0.001 to 0.03"),
        ({"damping": -1}, "the paper uses 0.001 to 0.03"),
        ({"relative_damping": -1}, "relative_damping must be finite and ≥ 0, got -1; 0.01 to 1 are usual"),
        ({"promise": -1}, "promise must be finite and > 0, got -1; 1 is all of the loss"),
        ({"bound": 0}, "bound must be finite and > 0, got 0; 0.2 is usual"),
        ({"loss_reduction": lambda: 1}, "must take the number of samples"),
        ({"loss_reduction": lambda samples, outputs: 1}, "must take the number of samples"),
    ],
)
def test_wrong_options_are_refused_at_once_with_a_remedy(options, remedy):
    model = nn.Linear(2, 1)
    with pytest.raises((TypeError, ValueError), match=remedy):
        consequent.attach(torch.optim.SGD(model.parameters(), lr=0.1), model, **options)
    assert type(model) is nn.Linear
    assert hooks_on(model) == []


@pytest.mark.parametrize("divisor", [lambda samples: samples, lambda *samples: 1, float])
def test_functions_of_the_samples_are_taken(divisor):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert consequent.attach(optimizer, model, loss_reduction=divisor).loss_reduction is divisor


def test_a_layer_without_samples_is_not_counted_as_rescued():
    model = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])  # experts, of which one has nothing to do
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    correction = consequent.attach(optimizer, model)
    inputs = torch.randn(16, 8)
    (model[0](inputs).square().mean() + model[1](inputs[:0]).square().sum()).backward()
    optimizer.step()
    assert (correction.counters.steps, correction.counters.rescued) == (1, 0)
