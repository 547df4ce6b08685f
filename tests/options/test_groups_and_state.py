"""Parameter groups and state dicts."""

import copy
import io
import warnings

import pytest
import torch
from kinds import BATCHES, KINDS, LR, make_model, train, train_expected
from models.expected import check_same, expected_backward, half_squares, twin_of
from torch import nn

import consequent


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
        "version": 3,
        "damping": None,
        "relative_damping": None,  # the default
        "bound": 0.2,
        "promise": None,
        "largest_block": None,
        "loss_reduction": "mean",
        "counters": {
            "steps": 3,
            "skipped": 0,
            "rescued": 0,
            "fallen_back": 0,
            "edited": 0,
            "bounded": 0,
            "promised": 0,
        },
    }
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    twin = twin_of(model)
    correction.load_state_dict({**saved, "damping": 0.7, "relative_damping": None, "loss_reduction": "sum"})
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


def test_the_listing_shows_the_damping_in_use_and_the_samples():
    model = make_model()
    optimizer = consequent.CSGD(model, lr=LR, damping=0.25)
    saved = optimizer.state_dict()
    other = consequent.CSGD(model, lr=LR, damping=0.5)
    other.load_state_dict(saved)
    assert other.correction.damping == 0.25
    assert "damping=0.25" in repr(other.correction)
    other.correction.damping = 7.0
    assert [group["damping"] for group in other.param_groups] == [7.0]
    half_squares(model(BATCHES[1])).backward()
    other.step()
    assert other.correction.samples == len(BATCHES[1])
    samples = len(BATCHES[1])
    divided = f"samples at the last step: {samples}; its loss was taken for a sum divided by"
    assert f"{divided} {samples}" in repr(other.correction)
    asked = []
    other.correction.loss_reduction = lambda samples: asked.append(samples) or 3 * samples
    other.zero_grad()
    half_squares(model(BATCHES[1])).backward()
    other.step()
    assert f"{divided} {3 * samples}" in repr(other.correction)
    assert len(asked) == 1, "showing it asks nobody"


def test_numbers_of_numpy_are_numbers():
    import numpy as np

    model = make_model()
    assert consequent.CSGD(model, lr=LR, damping=np.float32(0.5)).correction.damping == 0.5


def test_a_bad_damping_of_a_group_is_refused_when_attaching_and_shown_where_it_comes_later():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    groups = [{"params": model[0].parameters(), "damping": -5.0}, {"params": model[1].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    with pytest.raises(ValueError, match=r"damping \(in a parameter group\) must be finite and ≥ 0, got -5"):
        consequent.attach(optimizer, model)
    optimizer.param_groups[0]["damping"] = 0.5
    correction = consequent.attach(optimizer, model)
    optimizer.param_groups[0]["damping"] = -1.0
    assert "unusable: damping (in a parameter group) must be finite and ≥ 0, got -1" in repr(correction)


def test_the_state_of_a_plain_optimiser_leaves_the_damping_as_it_is():
    model = nn.Linear(3, 2)
    optimizer = consequent.CSGD(model, lr=0.1, damping=0.07)
    optimizer.load_state_dict(torch.optim.SGD(model.parameters(), lr=0.5).state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert optimizer.state_dict()["param_groups"][0]["damping"] == 0.07
    other = consequent.CSGD(nn.Linear(3, 2), lr=0.1, damping=0.01)
    other.load_state_dict(optimizer.state_dict())
    assert other.correction.damping == 0.07


def test_frozen_layers_are_told_of():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(consequent.ConsequentWarning, match="frozen: SGD stays as it is until one of them is trained"):
        correction = consequent.attach(optimizer, model)
    model[0].bias.requires_grad_(True)
    listing = repr(correction)
    assert "0  Linear, its bias alone: the weight is frozen" in listing
    assert "BatchNorm layers: 1; the paper found that they conflict" in listing


def saved_and_loaded(saved, **options):
    """What is told when the state of a correction with some options is loaded into one with others."""
    states = []
    for given in (saved, options):
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        correction = consequent.attach(optimizer, model, **given)
        model(torch.randn(6, 4)).square().mean().backward()
        optimizer.step()
        states.append((correction, correction.state_dict()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        states[1][0].load_state_dict(states[0][1])
    told = [str(one.message) for one in caught]
    assert all(one.category is consequent.ConsequentWarning for one in caught)
    assert {one.filename for one in caught} <= {__file__}
    return told


def test_a_state_of_defaults_leaves_each_optimiser_its_own():
    """Two optimisers have two defaults; and a choice of the user's stays."""

    def begin(**options):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
        parts = [torch.optim.SGD(model[0].parameters(), lr=LR), torch.optim.Adam(model[1].parameters())]
        return model, parts, consequent.attach(parts, model, **options)

    *_, first = begin()
    for options, expected in (({}, [0.1, 1.0]), ({"relative_damping": 0.3}, [0.3, 0.3])):
        model, _parts, second = begin(**options)
        second.load_state_dict(first.state_dict())
        assert [second._groups.damping_of(layer.weight).value for layer in model] == expected


def test_without_its_optimiser_a_correction_has_the_damping_it_had():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    correction = consequent.attach(optimizer, model)
    correction.detach()
    assert correction.relative_damping == 1
    assert "relative_damping=1" in repr(correction)


def test_what_is_no_state_at_all_is_refused_by_its_type():
    with pytest.raises(TypeError, match="expected a state dict of Consequentialism, got NoneType"):
        consequent.Consequentialism(nn.Linear(3, 2)).load_state_dict(None)


@pytest.mark.parametrize(
    ("saved", "options", "words"),
    [
        ({}, {}, []),
        ({"damping": 0.3, "bound": 0.1}, {}, []),
        ({"damping": 0.3, "bound": 0.1}, {"damping": 0.3, "bound": 0.1}, []),
        ({}, {"damping": 0.01}, []),
        ({"relative_damping": 1.0}, {"relative_damping": 0.5}, ["takes the place of relative_damping=0.5"]),
        ({"relative_damping": 1.0}, {"relative_damping": 0.1}, ["takes the place of relative_damping=0.1"]),
        ({}, {"bound": None}, ["has bound=0.2, which takes the place of bound=None"]),
        ({}, {"promise": 0.5}, ["has promise=None, which takes the place of promise=0.5"]),
        ({"averaging": 0.9}, {}, ["averaged moments, which are left out"]),
        ({"averaging": 0.9}, {"averaging": 0.9}, []),
    ],
)
def test_options_that_a_state_replaces_are_told(saved, options, words):
    told = saved_and_loaded(saved, **options)
    assert len(told) == len(words)
    assert all(word in one for word, one in zip(words, told, strict=True))
