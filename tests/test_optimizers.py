"""Every optimiser, ready-made or attached, is the torch optimiser fed with the reference's corrected gradients."""

import copy
import io
import pickle
import re

import pytest
import torch
from kinds import ATTACHED, BATCHES, KINDS, LR, READY, default_damping, make_model, train, train_expected
from models.expected import check_same, expected_backward, half_squares, twin_of
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, StepLR

import consequent


def is_a_torch_optimizer(kind):
    model = make_model()
    optimizer = kind.make(model)
    assert isinstance(optimizer, kind.plain)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert [p for group in optimizer.param_groups for p in group["params"]] == list(model.parameters())
    assert all(group["lr"] == LR for group in optimizer.param_groups)


def three_steps(kind):
    model = make_model()
    twin = twin_of(model)
    train(model, kind.make(model))
    train_expected(twin, kind.make_plain(twin))
    check_same(model, twin)


def weight_decay_is_added_to_the_corrected_gradient(kind):
    model = make_model()
    twin = twin_of(model)
    train(model, kind.make(model, weight_decay=0.3))
    train_expected(twin, kind.make_plain(twin, weight_decay=0.3))
    check_same(model, twin)


def maximise(kind):
    model = make_model()
    twin = twin_of(model)
    train(model, kind.make(model, maximize=True))
    train_expected(twin, kind.make_plain(twin, maximize=True))
    check_same(model, twin)


def schedulers(kind):
    makers = [
        lambda optimizer: StepLR(optimizer, 1, gamma=0.5),
        lambda optimizer: OneCycleLR(optimizer, max_lr=0.05, total_steps=6, cycle_momentum=False),
        lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    ]
    for make_scheduler in makers:
        model = make_model()
        twin = twin_of(model)
        optimizer, plain = kind.make(model), kind.make_plain(twin)
        scheduler, plain_scheduler = make_scheduler(optimizer), make_scheduler(plain)
        train(model, optimizer, after_step=scheduler.step)
        train_expected(twin, plain, after_step=plain_scheduler.step)
        assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"] != LR
        check_same(model, twin)


def groups_of(model, **head):
    return [
        {"params": list(model[0].parameters())},
        {"params": [*model[2].parameters(), *model[3].parameters()], **head},
    ]


def groups_with_their_own_learning_rate_and_damping(kind):
    for own in ({"damping": 0.5}, {"relative_damping": 0.3}, {"damping": 0.0}):
        model = make_model()
        twin = twin_of(model)
        head = {"lr": LR / 10, **own}
        train(model, kind.make(model, groups_of(model, **head)))
        train_expected(twin, kind.make_plain(twin, groups_of(twin, **head)))
        check_same(model, twin, rtol=1e-6)


def damping_changed_between_steps(kind):
    model = make_model()
    twin = twin_of(model)
    optimizer, plain = kind.make(model, groups_of(model)), kind.make_plain(twin, groups_of(twin))
    changes = (
        {},
        {"relative_damping": None, "damping": 2.0},
        {"relative_damping": 0.2, "damping": None},
        {"relative_damping": None, "damping": 0.1},
    )
    for change in changes:
        optimizer.param_groups[1].update(change)
        plain.param_groups[1].update(change)
        train(model, optimizer)
        train_expected(twin, plain)
    check_same(model, twin, rtol=1e-6)


def relative_damping_for_all(kind):
    model = make_model()
    twin = twin_of(model)
    train(model, kind.make(model, relative_damping=0.2))
    train_expected(twin, kind.make_plain(twin), damping=("relative", 0.2))
    check_same(model, twin)


def state_dict_continues_in_a_new_optimizer(kind):
    model = make_model()
    twin = twin_of(model)
    optimizer, plain = kind.make(model, damping=0.2, lr=LR / 2), kind.make_plain(twin, lr=LR / 2)
    train(model, optimizer)
    train_expected(twin, plain, damping=0.2)
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    fresh = twin_of(model)
    # An attached optimiser's damping is the correction's own, which has a state dict of its own.
    resumed = kind.make(fresh, damping=0.01 if kind.ready else 0.2)
    resumed.load_state_dict(torch.load(buffer, weights_only=True))
    train(fresh, resumed, BATCHES[3:])
    train_expected(twin, plain, BATCHES[3:], damping=0.2)
    check_same(fresh, twin)


def state_dict_of_a_plain_optimizer(kind):
    """From plain training to corrected training: the momentum is kept, the damping is the new optimiser's."""
    model = make_model()
    plain = kind.make_plain(model)
    train(model, plain)
    twin = twin_of(model)
    plain_twin = kind.make_plain(twin)
    optimizer = kind.make(model, damping=0.2)
    for either in (optimizer, plain_twin):
        either.load_state_dict(copy.deepcopy(plain.state_dict()))
    train(model, optimizer, BATCHES[3:])
    train_expected(twin, plain_twin, BATCHES[3:], damping=0.2)
    check_same(model, twin)


def add_param_group(kind):
    if kind.plain is torch.optim.Adagrad and torch.__version__ < "2.13":
        pytest.skip("Adagrad itself has no state for added parameters before torch 2.13")
    model = make_model()
    twin = twin_of(model)
    optimizer = kind.make(model, list(model[0].parameters()))
    plain = kind.make_plain(twin, list(twin[0].parameters()))
    train(model, optimizer)
    trains = set(twin[0].parameters())
    for x in BATCHES[:3]:
        plain.zero_grad()
        damping = default_damping(plain)
        expected_backward(twin, lambda m, x=x: half_squares(m(x)), len(x), damping, trains=trains.__contains__)
        plain.step()
    check_same(model, twin)
    for network, either in ((model, optimizer), (twin, plain)):
        either.add_param_group({"params": list(network[2:].parameters()), "lr": LR / 5})
        network.zero_grad()
    train(model, optimizer, BATCHES[3:])
    train_expected(twin, plain, BATCHES[3:])
    check_same(model, twin)


def detached_is_bitwise_plain(kind):
    model = make_model()
    twin = twin_of(model)
    optimizer = kind.make_plain(model)
    correction = consequent.attach(optimizer, model)
    correction.detach()
    train(model, optimizer)
    train(twin, kind.make_plain(twin))
    check_same(model, twin, rtol=0, atol=0)


COMMON_CASES = [
    is_a_torch_optimizer,
    three_steps,
    weight_decay_is_added_to_the_corrected_gradient,
    maximise,
    schedulers,
    groups_with_their_own_learning_rate_and_damping,
    damping_changed_between_steps,
    relative_damping_for_all,
    state_dict_continues_in_a_new_optimizer,
    state_dict_of_a_plain_optimizer,
    add_param_group,
    detached_is_bitwise_plain,
]


@pytest.mark.parametrize("case", COMMON_CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("name", KINDS)
def test_common(name, case):
    case(KINDS[name])


PAIR_COPIERS = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda pair: pickle.loads(pickle.dumps(pair)),
}


@pytest.mark.parametrize("copier", PAIR_COPIERS)
@pytest.mark.parametrize("name", READY)
def test_a_copied_pair_is_a_working_pair(name, copier):
    model = make_model()
    twin = twin_of(model)
    optimizer, plain = KINDS[name].make(model, damping=0.2), KINDS[name].make_plain(twin)
    train(model, optimizer)
    train_expected(twin, plain, damping=0.2)
    other, other_optimizer = PAIR_COPIERS[copier]((model, optimizer))
    assert other_optimizer.correction.model is other
    before = twin_of(model)
    train(other, other_optimizer, BATCHES[3:])
    check_same(model, before, rtol=0, atol=0)
    train_expected(twin, plain, BATCHES[3:], damping=0.2)
    check_same(other, twin)
    train(model, optimizer, BATCHES[3:])  # the original goes on as well
    check_same(model, twin)


@pytest.mark.parametrize("name", READY)
def test_a_copied_optimizer_takes_its_own_model_along(name):
    model = make_model()
    twin = twin_of(model)
    optimizer, plain = KINDS[name].make(model), KINDS[name].make_plain(twin)
    train(model, optimizer)
    train_expected(twin, plain)
    alone = copy.deepcopy(optimizer)
    other = alone.correction.model
    assert other is not model
    assert [p for group in alone.param_groups for p in group["params"]] == list(other.parameters())
    train(other, alone, BATCHES[3:])
    train_expected(twin, plain, BATCHES[3:])
    check_same(other, twin)


@pytest.mark.parametrize("name", ATTACHED)
def test_the_copy_of_an_attached_torch_optimizer_is_plain(name):
    model = make_model()
    optimizer = KINDS[name].make(model)
    train(model, optimizer)
    other, other_optimizer = copy.deepcopy((model, optimizer))
    twin = twin_of(model)
    plain = KINDS[name].make_plain(twin)
    plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(other, other_optimizer, BATCHES[3:])
    train(twin, plain, BATCHES[3:])
    check_same(other, twin, rtol=1e-9, atol=0)  # load_state_dict rounds NAdam's mu_product


@pytest.mark.parametrize("copier", PAIR_COPIERS)
def test_a_copied_pair_goes_on_from_averaged_moments(copier):
    model = make_model()
    optimizer = consequent.CSGD(model, lr=LR, damping=0.2, averaging=0.7, refresh=2)
    train(model, optimizer)
    pair = PAIR_COPIERS[copier]((model, optimizer))
    for one in ((model, optimizer), pair):
        train(*one, BATCHES[3:])
    check_same(pair[0], model, rtol=0, atol=0)
    assert pair[1].correction.counters == optimizer.correction.counters


@pytest.mark.parametrize("copier", PAIR_COPIERS)
def test_settings_that_were_changed_since_are_copied(copier):
    model = make_model()
    optimizer = consequent.CSGD(model, lr=LR, damping=0.2)
    correction = optimizer.correction
    changed = {"loss_reduction": "sum", "damping": 0.5, "bound": None, "largest_block": 5, "check": True}
    for name, value in changed.items():
        setattr(correction, name, value)
    _, copied = PAIR_COPIERS[copier]((model, optimizer))
    assert {name: getattr(copied.correction, name) for name in changed} == changed


def test_a_pair_is_copied_after_a_layer_was_frozen():
    """Whose average has begun anew."""
    model = make_model()
    optimizer = consequent.CSGD(model, lr=LR, damping=0.2, averaging=0.7)
    train(model, optimizer)
    model[0].bias.requires_grad_(False)
    pair = copy.deepcopy((model, optimizer))
    for one in ((model, optimizer), pair):
        train(*one, BATCHES[3:])
    check_same(pair[0], model, rtol=0, atol=0)


def test_copied_options_stay():
    model = make_model()
    twin = twin_of(model)
    optimizer = consequent.CSGD(
        model, lr=LR, relative_damping=0.2, loss_reduction="sum", exclude=re.compile("^0$"), check=True, foresight=True
    )
    other, other_optimizer = pickle.loads(pickle.dumps((model, optimizer)))
    x = BATCHES[0]
    half_squares(other(x)).backward()
    other_optimizer.step()
    expected_backward(twin, lambda m: half_squares(m(x)), 1, ("relative", 0.2), layers=[twin[3]])
    torch.optim.SGD(twin.parameters(), lr=LR).step()
    check_same(other, twin)
    assert list(other_optimizer.correction.corrected) == ["3"]
    assert list(other_optimizer.correction.foresight()) == ["3"]
