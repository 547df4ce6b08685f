"""Which layers are corrected, which are not, and why."""

import re

import pytest
import torch
from expected import check_same_grads, grads_of, own_inputs_grads
from torch import nn

import consequent


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
X = torch.randn(5, 1, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def make_model():
    torch.manual_seed(0)
    return Net().double()


def attach(model, **options):
    return consequent.attach(torch.optim.SGD(model.parameters(), lr=0.1), model, **options)


SELECTIONS = {
    "default": ({}, ALL),
    "include-type": ({"include": nn.Conv2d}, ["stem", "body.0", "body.2"]),
    "include-base-type": ({"include": nn.modules.conv._ConvNd}, ["stem", "body.0", "body.2"]),
    "include-name": ({"include": "head"}, ["head"]),
    "include-names": ({"include": iter(("head", "stem"))}, ["stem", "head"]),
    "include-container": ({"include": "body"}, ["body.0", "body.2"]),  # not body10
    "include-regex": ({"include": re.compile(r"\.\d$")}, ["body.0", "body.2"]),
    "include-mixed": ({"include": [nn.Linear, "stem", re.compile("2$")]}, ["stem", "body.2", "body10", "head"]),
    "exclude-type": ({"exclude": nn.Linear}, ["stem", "body.0", "body.2"]),
    "exclude-container": ({"exclude": ["body"]}, ["stem", "body10", "head"]),
    "both": ({"include": nn.Conv2d, "exclude": "stem"}, ["body.0", "body.2"]),
    "exclude-plain-module": ({"exclude": nn.BatchNorm2d}, ALL),
}


@pytest.mark.parametrize("name", SELECTIONS)
def test_what_is_selected_is_what_is_corrected(name):
    options, corrected = SELECTIONS[name]
    model = make_model()

    def run(one):
        (one(X).square().sum() / 2 / len(X)).backward()

    expected = own_inputs_grads(model, run, ("relative", 0.1), len(X), corrected)
    correction = attach(model, **options)
    assert list(correction.corrected) == corrected
    assert set(correction.plain) == {*ALL, "norm"} - set(corrected)
    run(model)
    check_same_grads(grads_of(model), expected)


@pytest.mark.parametrize("argument", ["include", "exclude"])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("haed", r"='haed' matches no module of the model; did you mean 'head'\?"),
        ("nothing like it", r"matches no module of the model; there are \['"),
        (re.compile("^x"), "matches no module of the model"),
        (nn.Conv3d, r"Conv3d.*matches no module of the model; there are \['BatchNorm2d', 'Conv2d', "),
    ],
    ids=["typo", "far", "regex", "type"],
)
def test_patterns_that_match_nothing(argument, wrong, message):
    model = make_model()
    with pytest.raises(ValueError, match=message) as raised:
        attach(model, **{argument: wrong})
    assert str(raised.value).startswith(argument)
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("wrong", [[3], [None], [nn.Linear(1, 1)], [dict], 3], ids=str)
def test_patterns_of_the_wrong_kind(wrong):
    with pytest.raises(TypeError, match="include takes module types, names or compiled regular expressions"):
        attach(make_model(), include=wrong)


class OwnForward(nn.Linear):
    def forward(self, inputs):
        return super().forward(inputs) * 2


class SameForward(nn.Linear):
    pass


def patched():
    layer = nn.Linear(3, 3)
    layer.forward = lambda x: x
    return layer


class Quantised(nn.Parameter):
    pass


def of_a_class():
    layer = nn.Linear(3, 3)
    layer.weight = Quantised(layer.weight.data)
    return layer


def with_bare_parameter():
    model = nn.Sequential(nn.Linear(3, 3))
    model.temperature = nn.Parameter(torch.ones(()))
    return model


def tied(*layers):
    for layer in layers[1:]:
        layer.weight = layers[0].weight
    return nn.Sequential(*layers)


REASONS = {
    "norm": (lambda: nn.LayerNorm(3), "0", "LayerNorm is none of the layers that can be corrected"),
    "embedding": (lambda: nn.Embedding(3, 3), "0", "Embedding is none of the layers"),
    "own forward": (lambda: OwnForward(3, 3), "0", "OwnForward has a forward of its own, which may not be that of Lin"),
    "patched": (patched, "0", "its forward was replaced by other code"),
    "weight norm": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
        "0",
        "its weight is not a parameter of its own",
    ),
    "attention": (lambda: nn.MultiheadAttention(4, 2), "0.out_proj", "uses its weight without calling it"),
    "bare": (with_bare_parameter, "0", "parameters of its own, in none of its layers, stay plain: temperature"),
    "complex": (lambda: nn.Linear(3, 3, dtype=torch.complex64), "0", "its weight is torch.complex64"),
    "class": (of_a_class, "0", "its weight is of a class of its own, Quantised"),
    "tied embedding": (
        lambda: tied(nn.Embedding(3, 5), nn.Linear(5, 3)),
        "0.1",
        "its weight is shared with '0.0', which is not corrected",
    ),
    "tied shapes": (
        lambda: tied(nn.Conv2d(4, 4, 1), nn.Conv2d(8, 4, 1, groups=2)),
        "0.0",
        "which uses it in another shape",
    ),
}


@pytest.mark.parametrize("name", REASONS)
def test_reasons(name):
    make, where, words = REASONS[name]
    correction = attach(nn.Sequential(make(), nn.Linear(2, 2)))
    assert words in correction.plain[where]
    assert "1" in correction.corrected


def test_subclasses_with_the_forward_of_their_base_are_corrected():
    assert list(attach(nn.Sequential(SameForward(3, 3))).corrected) == ["0"]


@pytest.mark.parametrize("make", [lambda: nn.LazyLinear(3), lambda: nn.LazyConv2d(3, 3)])
def test_lazy_layers(make):
    model = nn.Sequential(nn.Linear(2, 2), make())
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with pytest.raises(ValueError, match="layer '1' is lazy and has no weight yet: run one forward pass"):
        consequent.attach(optimizer, model)


NOTHING = {
    "no-layers": (lambda: nn.Sequential(nn.LayerNorm(3), nn.PReLU()), {}, "0: LayerNorm is none of the layers"),
    "no-parameters": (nn.ReLU, {}, "the model has no parameters"),
    "bare-excluded": (lambda: nn.Linear(2, 2), {"exclude": nn.Linear}, r"\(the model itself\): excluded"),
    "not-included": (lambda: nn.Sequential(nn.Linear(2, 2), nn.PReLU()), {"include": "1"}, "0: not included"),
}


@pytest.mark.parametrize("name", NOTHING)
def test_nothing_to_correct(name):
    make, options, listed = NOTHING[name]
    model = make()
    optimizer = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(ValueError, match="nothing in this model can be corrected: it needs a layer") as raised:
        consequent.attach(optimizer, model, **options)
    assert re.search(listed, str(raised.value))


def test_a_layer_under_two_names_is_corrected_once():
    model = nn.Sequential()
    model.first = model.second = nn.Linear(3, 3)
    assert list(attach(model).corrected) == ["first"]
