"""include, exclude, and what repr(correction) says about the outcome."""

import re

import pytest
import torch
from models.expected import check_same_grads, check_training, expected_backward, half_squares, named, twin_of
from torch import nn

import consequent
from consequent.layers import KINDS as KINDS_OF_LAYERS

KINDS = ", ".join(cls.__name__ for kind in KINDS_OF_LAYERS for cls in kind.module_types)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 2, 3)
        self.norm = nn.BatchNorm2d(2)
        self.body = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1, groups=2), nn.ReLU(), nn.Conv2d(2, 2, 1))
        self.body10 = nn.Linear(8, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.body10(self.body(self.norm(self.stem(x))).flatten(1))))


ALL = ["stem", "body.0", "body.2", "body10", "head"]
x = torch.randn(5, 1, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def make_model():
    torch.manual_seed(0)
    return Net().double()


SELECTIONS = {
    "default": ({}, ALL),
    "include-type": ({"include": nn.Conv2d}, ["stem", "body.0", "body.2"]),
    "include-types": ({"include": [nn.Linear, nn.Conv3d, nn.Conv2d][:1]}, ["body10", "head"]),
    "include-base-type": ({"include": nn.modules.conv._ConvNd}, ["stem", "body.0", "body.2"]),
    "include-name": ({"include": "head"}, ["head"]),
    "include-names": ({"include": ("head", "stem")}, ["stem", "head"]),
    "include-container": ({"include": "body"}, ["body.0", "body.2"]),  # not body10
    "include-inner-name": ({"include": "body.2"}, ["body.2"]),
    "include-regex": ({"include": re.compile(r"\.\d$")}, ["body.0", "body.2"]),
    "include-regex-search": ({"include": re.compile("body")}, ["body.0", "body.2", "body10"]),
    "include-mixed": ({"include": [nn.Linear, "stem", re.compile("2$")]}, ["stem", "body.2", "body10", "head"]),
    "exclude-type": ({"exclude": nn.Linear}, ["stem", "body.0", "body.2"]),
    "exclude-name": ({"exclude": "head"}, ["stem", "body.0", "body.2", "body10"]),
    "exclude-container": ({"exclude": ["body"]}, ["stem", "body10", "head"]),
    "exclude-regex": ({"exclude": re.compile("^body")}, ["stem", "head"]),
    "both": ({"include": nn.Conv2d, "exclude": "stem"}, ["body.0", "body.2"]),
    "exclude-plain-module": ({"exclude": nn.BatchNorm2d}, ALL),
}


@pytest.mark.parametrize("name", SELECTIONS)
def test_what_is_selected_is_what_is_corrected(name):
    options, corrected = SELECTIONS[name]
    model = make_model()
    twin = twin_of(model)
    correction = consequent.Consequentialism(model, **options)
    assert list(correction.corrected) == corrected
    assert set(correction.plain) == {*ALL, "norm"} - set(corrected)
    half_squares(model(x)).backward()
    correction.step()
    expected_backward(twin, lambda m: half_squares(m(x)), 5, layers=named(twin, *corrected))
    check_same_grads(model, twin)


def test_the_kinds_are_named_once_each():
    assert {"Linear", "Conv1d", "Conv2d", "Conv3d"} <= set(KINDS.split(", "))
    assert len(set(KINDS.split(", "))) == KINDS.count(",") + 1


def test_reasons():
    plain = consequent.Consequentialism(make_model(), include=["body", "head"], exclude="head").plain
    assert plain == {
        "stem": "not included",
        "norm": "BatchNorm2d is none of the layers that can be corrected",
        "body10": "not included",
        "head": "excluded",
    }


class Scaled(nn.Linear):
    """Has a parameter that is no part of its product."""

    def __init__(self, features):
        super().__init__(features, features)
        self.gain = nn.Parameter(torch.ones(features))

    def forward(self, inputs):
        return super().forward(inputs) * self.gain


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, inputs):
        return inputs * self.scale


def test_bare_parameters_are_told_of():
    model = nn.Sequential(Scaled(3), nn.Linear(3, 3), Scale())
    model.temperature = nn.Parameter(torch.ones(()))
    model.many = nn.ParameterList([torch.zeros(3)] * 5)
    elsewhere = nn.Parameter(torch.ones(2, 4))
    correction = consequent.attach(torch.optim.SGD([*model.parameters(), elsewhere], lr=0.1), model)
    assert correction.plain == {
        "": "bare parameters, in none of its layers, stay plain: temperature",
        "2": "Scale is none of the layers that can be corrected; its parameters stay plain: scale",
        "many": "ParameterList is none of the layers that can be corrected; its parameters stay plain: 0, 1, 2, … "
        "(5 in all)",
    }
    lines = repr(correction).splitlines()
    assert (
        lines[2]
        == "    0                   Scaled, 4 input columns, side chosen at the first step; its gain stays plain"
    )
    assert lines[5].startswith("    (the model itself)  bare parameters")
    assert lines[8] == "  not in the model, and plain: 1 of the optimiser's parameters, of shape [2, 4]"


@pytest.mark.parametrize("kind", [list, iter], ids=["list", "iterator"])
def test_patterns_may_come_from_any_iterable(kind):
    """They are needed again when a layer joins the optimiser later."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 5)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    correction = consequent.attach(optimizer, model, include=kind(["0", "2"]), exclude=kind(["2"]))
    model.append(nn.Linear(5, 2).double())
    optimizer.add_param_group({"params": list(model[3].parameters())})
    data = torch.randn(3, 6, dtype=torch.float64)
    twin = twin_of(model)
    half_squares(model(data)).backward()
    optimizer.step()
    expected_backward(twin, lambda m: half_squares(m(data)), 3, layers=[twin[0]])
    check_same_grads(model, twin)
    assert list(correction.corrected) == ["0"]


@pytest.mark.parametrize("argument", ["include", "exclude"])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("haed", r"='haed' matches no module of the model; did you mean 'head'\?"),
        ("body.1.", r"did you mean 'body\.[012]'"),
        ("nothing like it", r"matches no module of the model; there are \['"),
        (re.compile("^x"), "matches no module of the model"),
        (nn.Conv3d, r"Conv3d.*matches no module of the model; there are \['BatchNorm2d', 'Conv2d', "),
    ],
    ids=["typo", "close", "far", "regex", "type"],
)
def test_patterns_that_match_nothing(argument, wrong, message):
    model = make_model()
    with pytest.raises(ValueError, match=message) as raised:
        consequent.Consequentialism(model, **{argument: wrong})
    assert str(raised.value).startswith(argument)
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("argument", ["include", "exclude"])
@pytest.mark.parametrize("wrong", [[3], [None], [nn.Linear(1, 1)], [dict], 3], ids=str)
def test_patterns_of_the_wrong_kind(argument, wrong):
    with pytest.raises(TypeError, match=f"{argument} takes module types, names or compiled regular expressions"):
        consequent.Consequentialism(make_model(), **{argument: wrong})


NOTHING = {
    "no-layers": (
        lambda: nn.Sequential(nn.LayerNorm(3), nn.PReLU()),
        {},
        "0: LayerNorm is none of the layers that can be corrected",
    ),
    "no-parameters": (nn.ReLU, {}, "the model has no parameters"),
    "all-excluded": (lambda: nn.Sequential(nn.Linear(2, 2)), {"exclude": nn.Linear}, "0: excluded"),
    "bare-excluded": (lambda: nn.Linear(2, 2), {"exclude": nn.Linear}, r"\(the model itself\): excluded"),
    "not-included": (lambda: nn.Sequential(nn.Linear(2, 2), nn.PReLU()), {"include": "1"}, "0: not included"),
}


@pytest.mark.parametrize("name", NOTHING)
def test_nothing_to_correct(name):
    make, options, listed = NOTHING[name]
    with pytest.raises(ValueError, match="nothing in this model can be corrected") as raised:
        consequent.Consequentialism(make(), **options)
    assert re.search(listed, str(raised.value))


def test_repr_before_and_after_a_step():
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    correction = consequent.attach(optimizer, model, damping=0.03, exclude="body10")
    first = repr(correction).splitlines()
    assert first[0] == "Consequentialism(damping=0.03, loss_reduction='mean'), attached to Adam"
    assert first[1] == "  corrected (4):"
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in first}
    assert rows["stem"] == "Conv2d, 10 input columns, side chosen at the first step"
    assert rows["body.0"] == "Conv2d × 2 groups, 10 input columns, side chosen at the first step"
    assert first[6] == "  plain (2):"
    assert rows["norm"] == "BatchNorm2d is none of the layers that can be corrected"
    assert rows["body10"] == "excluded"
    assert first[-1] == "  counters: steps 0, skipped 0, rescued 0, fallen_back 0, edited 0, bounded 0, promised 0"
    half_squares(model(x[:3])).backward()
    optimizer.step()
    second = repr(correction)
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in second.splitlines()}
    assert rows["head"] == "Linear, 5 input columns, solved on the sample side"
    assert rows["stem"] == "Conv2d, 10 input columns, solved on the feature side, 10 × 10"
    assert rows["body.2"] == "Conv2d, 3 input columns, solved on the feature side, 3 × 3"
    assert "counters: steps 1, skipped 0," in second
    correction.detach()
    assert "not attached" in repr(correction)


def test_repr_names_the_kind_of_damping_and_reduction():
    text = repr(consequent.Consequentialism(nn.Linear(2, 2), relative_damping=0.1, loss_reduction=lambda n: 3 * n))
    assert text.startswith("Consequentialism(relative_damping=0.1, loss_reduction='a function of the samples')")
    assert "not attached" in text


def test_layers_that_the_optimizer_does_not_hold_are_listed_as_plain():
    model = make_model()
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    correction = consequent.attach(optimizer, model)
    assert list(correction.corrected) == ["head"]
    assert set(correction.plain) == {*ALL, "norm"} - {"head"}


def test_a_layer_may_be_registered_under_two_names():
    torch.manual_seed(0)
    model = Twice(nn.Linear(3, 3)).double()
    data = torch.randn(4, 3, dtype=torch.float64)
    correction = check_training(model, lambda m: half_squares(m(data)), 4)
    assert list(correction.corrected) == ["first"]


class Twice(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.first = self.second = layer

    def forward(self, inputs):
        return self.second(torch.tanh(self.first(inputs)))


def test_repr_shows_what_is_not_as_usual():
    text = repr(consequent.Consequentialism(nn.Linear(2, 2), averaging=0.9, refresh=10, bound=None))
    assert ", averaging=0.9, refresh=10, bound=None), not attached" in text
    assert "  bound: " not in text


BOUNDS = {
    "as usual": (torch.optim.SGD, 2, {}, "one step of SGD changes a layer's outputs by at most 0.2 of the size of its"),
    "another": (torch.optim.SGD, 2, {"bound": 0.5}, "by at most 0.5 of the size of its inputs"),
    "Adam": (torch.optim.Adam, 2, {}, "off under Adam, whose steps may have a length of their own"),
    "backward": (torch.optim.SGD, 2, {"at": "backward"}, 'off with at="backward"'),
    "one layer": (torch.optim.SGD, 1, {}, "off where one weight alone is corrected"),
}


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.usefixtures("bounded")
def test_repr_says_what_the_bound_does(name):
    """And that it does: a step that is far too long is shortened exactly where it says so."""
    make, layers, options, words = BOUNDS[name]
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(layers)])
    optimizer = make(model.parameters(), lr=100.0)
    correction = consequent.attach(optimizer, model, **options)
    text = repr(correction)
    (line,) = [line for line in text.splitlines() if line.startswith("  bound: ")]
    assert words in line
    heading = text.splitlines()[0]
    assert (f", bound={options.get('bound', 0.2)})" in heading) == ("bound" in heading) == ("off" not in line)
    half_squares(model(torch.randn(5, 3))).backward()
    optimizer.step()
    assert (correction.counters.bounded > 0) == ("off" not in line)


@pytest.mark.usefixtures("bounded")
def test_repr_says_which_share_of_the_updates_the_bound_has_shortened():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    correction = consequent.attach(optimizer, model)
    inputs = torch.randn(5, 3)

    def step(rate):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        half_squares(model(inputs)).backward()
        optimizer.step()
        return [line for line in repr(correction).splitlines() if "has shortened" in line]

    assert step(1e-4) == []
    (line,) = step(100.0)
    assert correction.counters.bounded == 2  # of four
    assert "the bound has shortened about 50.0% of all updates. If the loss does not fall" in line
    (line,) = step(1e-4)
    assert "about 33.3% of all updates" in line
    resumed = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    optimizer_of_it = torch.optim.SGD(resumed.parameters(), lr=0.1)
    other = consequent.attach(optimizer_of_it, resumed)
    other.load_state_dict(correction.state_dict())
    assert line in repr(other)
