"""Every optimiser, ready-made or attached, is the torch optimiser fed with the reference's corrected gradients."""

import copy
import io
import math
import pickle
import re
from dataclasses import dataclass, field

import pytest
import torch
from models.expected import check_same, expected_backward, half_squares, twin_of
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, StepLR

import consequent

LR = 0.02


@dataclass(frozen=True)
class Kind:
    """How to make an optimiser, and the plain torch one it should agree with."""

    plain: type
    ready: type | None = None  # None: consequent.attach
    options: dict = field(default_factory=dict)

    def make(self, model, params=None, *, damping=0.01, lr=LR, **options):
        options = {**self.options, "lr": lr, **options}
        if self.ready is not None:
            return self.ready(model, params, damping=damping, **options)
        own = {name: options.pop(name) for name in ("relative_damping", "loss_reduction") if name in options}
        optimizer = self.plain(model.parameters() if params is None else params, **options)
        consequent.attach(optimizer, model, damping=damping, **own)
        return optimizer

    def make_plain(self, model, params=None, *, lr=LR, **options):
        return self.plain(model.parameters() if params is None else params, **{**self.options, "lr": lr, **options})


KINDS = {
    "CSGD": Kind(torch.optim.SGD, consequent.CSGD),
    "C-Momentum": Kind(torch.optim.SGD, consequent.CSGD, {"momentum": 0.9}),
    "C-Nesterov": Kind(torch.optim.SGD, consequent.CSGD, {"momentum": 0.9, "nesterov": True}),
    "CAdam": Kind(torch.optim.Adam, consequent.CAdam),
    "CAdamW": Kind(torch.optim.AdamW, consequent.CAdamW, {"betas": (0.8, 0.99)}),
    "CRMSprop": Kind(torch.optim.RMSprop, consequent.CRMSprop, {"centered": True}),
    "SGD": Kind(torch.optim.SGD, options={"momentum": 0.9, "dampening": 0.1}),
    "Adam": Kind(torch.optim.Adam, options={"amsgrad": True}),
    "AdamW": Kind(torch.optim.AdamW),
    "RMSprop": Kind(torch.optim.RMSprop, options={"momentum": 0.5}),
    "Adagrad": Kind(torch.optim.Adagrad),
    "NAdam": Kind(torch.optim.NAdam),
}
READY = [name for name, kind in KINDS.items() if kind.ready is not None]
ATTACHED = [name for name in KINDS if name not in READY]

generator = torch.Generator().manual_seed(3)
# Few samples are solved on the sample side, many on the feature side.
BATCHES = [torch.randn(n, 6, dtype=torch.float64, generator=generator) for n in (4, 9, 3, 12, 1, 5)]


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 2)).double()


def train(model, optimizer, batches=BATCHES[:3], after_step=lambda: None):
    for x in batches:
        optimizer.zero_grad()
        half_squares(model(x)).backward()
        optimizer.step()
        after_step()


def train_expected(twin, optimizer, batches=BATCHES[:3], after_step=lambda: None, damping=0.01):
    """The damping of a parameter group counts here as there."""

    def damping_of(parameter):
        for group in optimizer.param_groups:
            if any(parameter is member for member in group["params"]):
                if group.get("relative_damping") is not None:
                    return "relative", group["relative_damping"]
                return group["damping"] if group.get("damping") is not None else damping
        raise AssertionError("a parameter in no group")

    for x in batches:
        optimizer.zero_grad()
        expected_backward(twin, lambda m, x=x: half_squares(m(x)), len(x), damping_of)
        optimizer.step()
        after_step()


# ---- what all of them pass ------------------------------------------------------------------------------------------


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
    for change in ({}, {"damping": 2.0}, {"relative_damping": 0.1}, {"relative_damping": None, "damping": 0.1}):
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
    model = make_model()
    twin = twin_of(model)
    optimizer = kind.make(model, list(model[0].parameters()))
    plain = kind.make_plain(twin, list(twin[0].parameters()))
    train(model, optimizer)
    trains = set(twin[0].parameters())
    for x in BATCHES[:3]:
        plain.zero_grad()
        expected_backward(twin, lambda m, x=x: half_squares(m(x)), len(x), trains=trains.__contains__)
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


# ---- copies ---------------------------------------------------------------------------------------------------------

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


# ---- wrong arguments ------------------------------------------------------------------------------------------------


def hooks_on(model, optimizer=None):
    found = [hook for m in model.modules() for hook in (*m._forward_hooks, *m._forward_pre_hooks)]
    if optimizer is not None:
        found += [*optimizer._optimizer_step_pre_hooks, *optimizer._optimizer_step_post_hooks]
    return found


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
    with pytest.raises(TypeError, match=r"expected a torch.nn.Module, got SGD"):
        consequent.attach(model, optimizer)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"damping": -1.0}, ValueError),
        ({"damping": math.nan}, ValueError),
        ({"damping": math.inf}, ValueError),
        ({"damping": "0.1"}, TypeError),
        ({"damping": None}, (TypeError, ValueError)),
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


# ---- attaching and detaching ----------------------------------------------------------------------------------------


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


# ---- groups and state -----------------------------------------------------------------------------------------------


def test_named_parameters():
    model = make_model()
    twin = twin_of(model)
    train(model, consequent.CSGD(model, model.named_parameters(), lr=LR))
    train_expected(twin, torch.optim.SGD(twin.parameters(), lr=LR))
    check_same(model, twin)


@pytest.mark.parametrize("samples", [3, 9])
def test_a_bare_layer_follows_a_loaded_state_dict(samples):
    """Loading makes new groups; there is no container whose call could tell of it."""
    torch.manual_seed(0)
    model = nn.Linear(6, 2).double()
    twin = twin_of(model)
    x = torch.randn(samples, 6, dtype=torch.float64)
    saved = consequent.CSGD(nn.Linear(6, 2).double(), lr=LR, damping=5.0).state_dict()
    optimizer = consequent.CSGD(model, lr=LR, damping=0.01)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["damping"] == 5.0
    for damping in (5.0, 0.5):
        optimizer.param_groups[0]["damping"] = damping
        train(model, optimizer, [x])
        train_expected(twin, torch.optim.SGD(twin.parameters(), lr=LR), [x], damping=damping)
        check_same(model, twin)


def test_a_state_dict_loaded_between_backward_and_step_counts():
    model = make_model()
    twin = twin_of(model)
    optimizer = consequent.CSGD(model, lr=LR, damping=0.01)
    saved = consequent.CSGD(twin_of(twin), lr=LR, damping=5.0).state_dict()
    half_squares(model(BATCHES[0])).backward()
    optimizer.load_state_dict(saved)
    optimizer.step()
    train_expected(twin, torch.optim.SGD(twin.parameters(), lr=LR), BATCHES[:1], damping=5.0)
    check_same(model, twin)


@pytest.mark.parametrize("ready", [True, False], ids=["CSGD", "attach"])
def test_the_state_dict_of_the_correction(ready):
    model = make_model()
    optimizer = KINDS["CSGD" if ready else "SGD"].make(model)
    correction = optimizer.correction if ready else None
    if correction is None:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        correction = consequent.attach(optimizer, model)
    train(model, optimizer)
    state = correction.state_dict()
    assert state == {
        "damping": 0.01,
        "relative_damping": None,
        "loss_reduction": "mean",
        "counters": {"steps": 3, "skipped": 0, "rescued": 0, "fallen_back": 0, "edited": 0},
    }
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    twin = twin_of(model)
    correction.load_state_dict({**saved, "damping": 0.7, "loss_reduction": "sum"})
    assert correction.counters.steps == 3
    x = BATCHES[0]
    optimizer.zero_grad()
    half_squares(model(x)).backward()
    optimizer.step()
    assert correction.counters.steps == 4
    twin.zero_grad()
    expected_backward(twin, lambda m: half_squares(m(x)), 1, damping=0.7)
    torch.optim.SGD(twin.parameters(), lr=LR).step()
    check_same(model, twin)


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ({"damping": 0.1}, ValueError),
        ({}, ValueError),
        ({"damping": -1.0, "relative_damping": None, "loss_reduction": "mean", "counters": {}}, ValueError),
        ({"damping": 0.3, "relative_damping": None, "loss_reduction": "median", "counters": {}}, ValueError),
        (
            {"damping": 0.3, "relative_damping": None, "loss_reduction": "sum", "counters": {"strides": 1}},
            (ValueError, TypeError),
        ),
        (
            {"damping": None, "relative_damping": None, "loss_reduction": "sum", "counters": {}},
            (ValueError, TypeError),
        ),
    ],
    ids=["one-key", "empty", "negative-damping", "wrong-reduction", "unknown-counter", "no-damping"],
)
def test_bad_state_dicts_change_nothing(bad, error):
    model = make_model()
    twin = twin_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    correction = consequent.attach(optimizer, model, damping=0.05)
    before = copy.deepcopy(correction.state_dict())
    with pytest.raises(error):
        correction.load_state_dict(bad)
    assert correction.state_dict() == before
    train(model, optimizer)
    train_expected(twin, torch.optim.SGD(twin.parameters(), lr=LR), damping=0.05)
    check_same(model, twin)


def test_counters_are_a_snapshot():
    model = make_model()
    optimizer = consequent.CSGD(model, lr=LR)
    before = optimizer.correction.counters
    train(model, optimizer)
    assert before.steps == 0
    assert optimizer.correction.counters.steps == 3


# ---- relative damping -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("samples", [4, 30])
def test_relative_damping_is_a_fraction_of_the_mean_squared_norm(samples, bias):
    """λ = r · mean ‖x‖², the bias's constant 1 included, computed here without the reference's helper."""
    torch.manual_seed(0)
    model = nn.Linear(6, 2, bias=bias).double()
    x = 3 * torch.randn(samples, 6, dtype=torch.float64)
    output_grad = torch.randn(samples, 2, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    consequent.attach(optimizer, model, relative_damping=0.25, loss_reduction="sum")
    (model(x) * output_grad).sum().backward()
    optimizer.step()
    X = torch.cat([x, torch.ones(samples, 1, dtype=torch.float64)], 1) if bias else x
    level = 0.25 * X.square().sum(1).mean()
    expected = torch.linalg.solve(X.T @ X + level * torch.eye(X.shape[1], dtype=torch.float64), X.T @ output_grad).T
    torch.testing.assert_close(model.weight.grad, expected[:, :6])
    if bias:
        torch.testing.assert_close(model.bias.grad, expected[:, 6])


@pytest.mark.parametrize("samples", [1, 4])
def test_relative_damping_of_dead_inputs_is_no_update(samples):
    """A channel that is zero throughout the batch (dead ReLUs) has a zero Gram matrix; its filter must stay finite."""
    torch.manual_seed(0)
    model = nn.Conv2d(2, 2, 3, groups=2, bias=False, padding=1).double()
    twin = twin_of(model)
    x = torch.randn(samples, 2, 4, 4, dtype=torch.float64)
    x[:, 1] = 0
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    consequent.attach(optimizer, model, relative_damping=0.1)
    half_squares(model(x)).backward()
    optimizer.step()
    assert torch.equal(model.weight[1], twin.weight[1])
    assert model.weight.isfinite().all()


@pytest.mark.parametrize("samples", [2, 20])
@pytest.mark.parametrize("option", [{"damping": 0.01}, {"damping": 0.0}, {"relative_damping": 0.1}], ids=str)
def test_inputs_that_are_all_zero_leave_the_weight_alone(option, samples):
    torch.manual_seed(0)
    model = nn.Linear(6, 2, bias=False).double()
    twin = twin_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    consequent.attach(optimizer, model, **option)
    half_squares(model(torch.zeros(samples, 6, dtype=torch.float64))).backward()
    optimizer.step()
    check_same(model, twin, rtol=0, atol=0)
