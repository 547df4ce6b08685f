"""All arguments are written out, documented, and unknown ones refused with the nearest known one; so are attributes."""

import copy
import inspect
import pickle
import weakref

import pytest
import torch
from torch import nn

import consequent
from consequent.options.settings import Options

READY_MADE = {
    consequent.CSGD: torch.optim.SGD,
    consequent.CAdam: torch.optim.Adam,
    consequent.CAdamW: torch.optim.AdamW,
    consequent.CRMSprop: torch.optim.RMSprop,
}
OURS = {"damping", *Options.__annotations__}


OWN_RATES = {consequent.CSGD: 0.1, consequent.CAdam: 0.003, consequent.CAdamW: 0.003}  # where one would start


def parameters_of(function):
    return {name: p for name, p in inspect.signature(function).parameters.items() if name != "self"}


@pytest.mark.parametrize("ours", READY_MADE)
def test_ready_made_optimisers_have_all_arguments_of_torch_s(ours):
    theirs = parameters_of(READY_MADE[ours])
    mine = parameters_of(ours)
    assert list(mine) == ["model", *theirs, "damping", *Options.__annotations__]  # a new one of torch's is noticed
    assert all(p.kind is p.KEYWORD_ONLY for name, p in mine.items() if name not in ("model", "params"))
    for name in set(theirs) - {"params"}:
        default = OWN_RATES.get(ours, theirs[name].default) if name == "lr" else theirs[name].default
        assert mine[name].default == default, name


def test_our_arguments_are_the_same_everywhere():
    expected = parameters_of(consequent.Consequentialism)
    assert set(expected) == {"model"} | OURS
    for function in (consequent.attach, *READY_MADE):
        mine = parameters_of(function)
        assert {name: mine[name].default for name in OURS} == {name: expected[name].default for name in OURS}


@pytest.mark.parametrize("function", [consequent.attach, consequent.Consequentialism, *READY_MADE])
def test_every_argument_is_typed_and_documented(function):
    documentation = inspect.getdoc(function).partition("Args:\n")[2]
    for name, parameter in parameters_of(function).items():
        assert parameter.annotation is not parameter.empty, name
        assert f"\n    {name}: " in "\n" + documentation, name


@pytest.mark.parametrize("ours", READY_MADE)
def test_arguments_arrive(ours):
    given = {
        name: p.default + 0.25 if isinstance(p.default, float) else p.default
        for name, p in parameters_of(READY_MADE[ours]).items()
        if name not in ("params", "betas", "alpha")
    }
    given |= {"maximize": True}
    group = ours(nn.Linear(2, 2), damping=0.3, **given).param_groups[0]
    assert {name: group[name] for name in given if name in group} == {n: v for n, v in given.items() if n in group}
    assert group["damping"] == 0.3


def test_settings_arrive():
    given = {"loss_reduction": "sum", "include": "0", "exclude": "2", "check": True, "across_ranks": False}
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    ready_made = consequent.CAdam(model, relative_damping=0.5, at="step", **given)
    ready_made.correction.detach()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attached = consequent.attach(optimizer, model, relative_damping=0.5, at="backward", **given)
    for correction, at in ((ready_made.correction, "step"), (attached, "backward")):
        assert correction.relative_damping == 0.5
        assert correction.at == at
        assert (correction.loss_reduction, correction.include, correction.exclude) == ("sum", ["0"], ["2"])
        assert (correction.check, correction.across_ranks) == (True, False)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, o: consequent.attach(o, m, dampening=0.1), "no argument 'dampening'.*SGD; did you mean damping?"),
        (lambda m, o: consequent.attach(o, m, dampng=1.0), "attach.* has no argument 'dampng'; did you mean damping?"),
        (lambda m, o: consequent.attach(o, m, lr=0.1), "'lr', which is one of torch.optim.SGD; it has optimizer"),
        (lambda m, o: consequent.Consequentialism(m, exlude="0"), "Consequentialism.*did you mean exclude?"),
        (lambda m, o: consequent.CSGD(m, lr=0.1, nestrov=True), "CSGD.*did you mean nesterov?"),
        (lambda m, o: consequent.CAdam(m, nesterov=True), "'nesterov', which is one of torch.optim.SGD"),
        (lambda m, o: consequent.CAdamW(m, loss_reducton="sum"), "did you mean loss_reduction?"),
    ],
)
def test_unknown_arguments_are_refused(call, message):
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=message):
        call(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_dampening_is_momentum_s_where_there_is_momentum():
    assert consequent.CSGD(nn.Linear(2, 2), momentum=0.5, dampening=0.25).param_groups[0]["dampening"] == 0.25


def test_help_names_all_public_names():
    for name in consequent.__all__:
        assert f"``{name}" in consequent.__doc__, name


def attached():
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return consequent.attach(optimizer, model), optimizer


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dampnig", "has no attribute 'dampnig' that can be set; did you mean damping?"),
        ("loss_reducton", "'loss_reducton'.*did you mean loss_reduction?"),
        ("Bound", "did you mean bound?"),
        ("lr", "'lr' that can be set; those that can are .*, largest_block, bound, promise, check, loss"),
        ("at", "at of a Consequentialism cannot be changed any more.*attach anew with at=…"),
        ("averaging", "averaging of a .*cannot be changed"),
        ("foresight", "foresight of a .*cannot be changed"),
        ("exclude", "exclude of a .*cannot be changed"),
        ("samples", "samples"),  # Python's own words
    ],
)
def test_setting_an_attribute_that_would_have_no_effect_is_an_error(name, message):
    correction, _ = attached()
    before = dict(vars(correction))
    with pytest.raises(AttributeError, match=message):
        setattr(correction, name, 0.3)
    assert vars(correction) == before


def test_what_may_be_set_can_be_set():
    correction, _ = attached()
    settable = {name for name, value in vars(type(correction)).items() if getattr(value, "fset", None) is not None}
    values = {"damping": 0.3, "relative_damping": 0.2, "largest_block": 4, "bound": None, "promise": 1, "check": True}
    values |= {"loss_reduction": "sum"}
    assert settable == set(values)
    for name, value in values.items():
        setattr(correction, name, value)
        assert getattr(correction, name) == value
    correction.detach = correction.detach  # a method may be replaced, as in tests of users
    assert weakref.ref(correction)() is correction
    with pytest.warns(consequent.ConsequentWarning, match="cannot be copied or pickled"):
        assert copy.deepcopy(correction) is copy.copy(correction) is pickle.loads(pickle.dumps(correction)) is None


def test_a_subclass_may_have_attributes_of_its_own():
    class Named(consequent.Consequentialism):
        def __init__(self, model, name):
            super().__init__(model)
            self.name = name

    named = Named(nn.Linear(2, 2), "mine")
    named.dampnig, named.damping = 1, 0.3
    assert (named.name, named.dampnig, named.damping) == ("mine", 1, 0.3)
