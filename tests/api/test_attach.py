"""The arguments of ``attach``: what is chosen, what is refused, and what is said of it."""

import inspect
import re

import pytest
import torch
from torch import nn

import consequent
from consequent.settings import GONE


def perceptron():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def attach(**options):
    model = perceptron()
    return consequent.attach(sgd(model), model, **options)


def test_ten_arguments_each_explained():
    parameters = [name for name in inspect.signature(consequent.attach).parameters if name != "gone"]
    assert len(parameters) == 10
    arguments = inspect.getdoc(consequent.attach).partition("Args:")[2].partition("Returns:")[0]
    for name in parameters:
        assert re.search(rf"^    {name}: ", arguments, re.MULTILINE), name


@pytest.mark.parametrize("name", GONE)
def test_arguments_that_are_gone_are_refused_by_name(name):
    with pytest.raises(TypeError, match=f"{name}= is gone since the third edition; instead: "):
        attach(**{name: 1})
    with pytest.raises(TypeError, match=f"{name}= is gone since the third edition; instead: "):
        consequent.CSGD(perceptron(), **{name: 1})


@pytest.mark.parametrize("name", ["step", "communication", "counters", "foresight"])
def test_methods_that_are_gone_are_refused_by_name(name):
    with pytest.raises(AttributeError, match=f"{name}.* is gone since the third edition"):
        getattr(attach(), name)


def test_an_unknown_argument():
    with pytest.raises(TypeError, match=r"attach\(\) has no argument 'dampning'; did you mean damping\?"):
        attach(dampning=0.1)
    with pytest.raises(TypeError, match="dampning"):
        consequent.CSGD(perceptron(), dampning=0.1)


BAD = {
    "negative damping": ({"damping": -1.5}, ValueError, r"damping must be finite and ≥ 0, got -1\.5; the paper uses"),
    "damping of a string": ({"damping": "0.1"}, TypeError, "damping must be a number, got '0.1'"),
    "relative nan": ({"relative_damping": float("nan")}, ValueError, "relative_damping must be finite"),
    "two dampings": ({"damping": 1, "relative_damping": 2}, ValueError, "damping=1 and relative_damping=2: give one"),
    "averaging 1": ({"averaging": 1.0}, ValueError, r"averaging must be below 1, got 1\.0"),
    "averaging negative": ({"averaging": -0.1}, ValueError, "averaging must be finite and ≥ 0"),
    "refresh 0": ({"refresh": 0}, ValueError, "refresh must be a whole number of steps ≥ 1, got 0"),
    "refresh fraction": ({"refresh": 2.5}, ValueError, r"refresh must be a whole number of steps ≥ 1, got 2\.5"),
    "bound 0": ({"bound": 0}, ValueError, "bound must be finite and > 0, got 0"),
    "reduction": ({"loss_reduction": "average"}, ValueError, 'loss_reduction must be "mean", "sum", a number or'),
    "reduction 0": ({"loss_reduction": 0}, ValueError, "loss_reduction must be finite and > 0"),
    "reduction True": ({"loss_reduction": True}, TypeError, "loss_reduction must be a number, got True"),
    "reduction None": ({"loss_reduction": None}, TypeError, "loss_reduction must be"),
    "mse": ({"loss_reduction": "mse"}, ValueError, r"lambda n: n \* outputs / 2"),
    "tokens": ({"loss_reduction": "tokens"}, ValueError, r"lambda n: n \* tokens"),
    "criterion": ({"loss_reduction": nn.CrossEntropyLoss()}, TypeError, "loss_reduction=CrossEntropyLoss is gone"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_values(name):
    options, error, message = BAD[name]
    with pytest.raises(error, match=message):
        attach(**options)


def test_what_is_no_optimiser_and_no_model():
    model = perceptron()
    with pytest.raises(TypeError, match=r"expected a torch.optim.Optimizer or a list of them, got Sequential"):
        consequent.attach(model, model)
    with pytest.raises(TypeError, match=r"expected a torch.nn.Module, got generator"):
        consequent.attach(sgd(model), model.parameters())
    with pytest.raises(ValueError, match="needs an optimiser, got an empty list"):
        consequent.attach([], model)
    with pytest.raises(TypeError, match=r"nn.DataParallel calls copies"):
        consequent.attach(sgd(model), nn.Sequential(nn.DataParallel(model)))
    with pytest.raises(TypeError, match=r"CSGD\(model, 0.1\): the learning rate is a keyword, lr=0.1"):
        consequent.CSGD(model, 0.1)
    with pytest.raises(TypeError, match="CSGD takes the model itself, got generator"):
        consequent.CSGD(model.parameters())


def test_an_optimiser_of_another_model():
    with pytest.raises(ValueError, match="SGD holds no parameter of the layers to be corrected"):
        consequent.attach(sgd(perceptron()), perceptron())


def test_a_parameter_in_two_optimisers():
    model = perceptron()
    with pytest.raises(ValueError, match="SGD and Adam hold the same parameter of layer '0'"):
        consequent.attach([sgd(model), torch.optim.Adam(model[0].parameters())], model)


@pytest.mark.parametrize("averaging", [0.0, 0.9])
@pytest.mark.parametrize("divisor", [0, -3, "a", None, float("nan")])
def test_a_loss_reduction_that_gives_no_divisor(divisor, averaging):
    model = perceptron()
    consequent.attach(sgd(model), model, loss_reduction=lambda n: divisor, averaging=averaging)
    with pytest.raises((ValueError, TypeError), match=r"loss_reduction\(5\) must be .*, got"):
        model(torch.randn(5, 4))


def test_parameter_groups_with_a_damping_of_their_own_are_refused():
    model = perceptron()
    optimizer = torch.optim.SGD([{"params": model.parameters(), "damping": 0.3}], lr=0.1)
    with pytest.raises(ValueError, match=r"'damping' in a parameter group .* attach\(…, include=…\)"):
        consequent.attach(optimizer, model)


def test_the_default_damping_follows_the_optimiser_of_each_layer():
    model = perceptron()
    first, second = torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.Adam(model[2].parameters())
    correction = consequent.attach([first, second], model)
    assert [str(own.damping) for own in correction.own_inputs.values()] == [
        "relative_damping=0.1",
        "relative_damping=1",
    ]
    assert "Correction of SGD and Adam: relative_damping=0.1, relative_damping=1" in repr(correction)


def test_wrappers_of_optimisers_are_looked_into():
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, optimizer):
            self.optimizer = optimizer

    model = perceptron()
    optimizer = sgd(model)
    optimizer.optimizer = optimizer
    correction = consequent.attach(Wrapper(optimizer), model, averaging=0.9)
    assert correction.optimizers == ["SGD"]
    assert len(optimizer._optimizer_step_pre_hooks) == 1


def test_detaching_leaves_nothing_behind():
    for averaging in (0.0, 0.9):
        model = perceptron()
        optimizer = sgd(model)
        correction = consequent.attach(optimizer, model, averaging=averaging)
        correction.detach()
        correction.detach()  # again: nothing more to do
        assert not any("forward" in module.__dict__ for module in model.modules())
        assert not optimizer._optimizer_step_pre_hooks
        plain, x = perceptron(), torch.randn(5, 4)
        for one in (model, plain):
            one(x).square().mean().backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


def test_attaching_twice():
    model = perceptron()
    optimizer = sgd(model)
    correction = consequent.attach(optimizer, model)
    with pytest.raises(ValueError, match=r"0: corrected by an earlier attach\(\): detach\(\) that one, or give"):
        consequent.attach(sgd(model), model)
    correction.detach()
    consequent.attach(optimizer, model)


@pytest.mark.parametrize("averaging", [0.0, 0.9])
def test_a_correction_whose_optimiser_is_gone_gives_way(averaging):
    """As when a notebook's cell is run again."""
    model, x = perceptron(), torch.randn(5, 4)
    consequent.attach(sgd(model), model, 0.5, averaging=averaging)
    optimizer = sgd(model)
    correction = consequent.attach(optimizer, model, 0.1, averaging=averaging)
    assert list(correction.corrected) == ["0", "2"]
    other = perceptron()
    its = sgd(other)
    consequent.attach(its, other, 0.1, averaging=averaging)
    for one, stepping in ((model, optimizer), (other, its)):
        one(x).square().mean().backward()
        stepping.step()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_a_failed_attach_leaves_nothing_behind():
    class Refusing(torch.optim.SGD):
        def register_step_pre_hook(self, hook):
            raise RuntimeError("no hooks here")

    model = perceptron()
    with pytest.raises(RuntimeError, match="no hooks here"):
        consequent.attach([sgd(model[0]), Refusing(model[2].parameters(), lr=0.1)], model)
    assert not any("forward" in module.__dict__ for module in model.modules())
    consequent.attach(sgd(model), model)


@pytest.mark.parametrize("order", ["first", "last"])
def test_parts_of_a_model_may_have_corrections_of_their_own(order):
    torch.manual_seed(0)
    model, x = perceptron(), torch.randn(5, 4)
    first, second = torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.SGD(model[2].parameters(), lr=0.1)
    corrections = [consequent.attach(first, model, include="0"), consequent.attach(second, model, include="2")]
    other = perceptron()
    optimizer = sgd(other)
    consequent.attach(optimizer, other)
    for one in (model, other):
        one(x).square().mean().backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), other.parameters(), strict=True))
    for correction in corrections if order == "first" else corrections[::-1]:
        correction.detach()
    assert not any("forward" in module.__dict__ for module in model.modules())
    model.zero_grad()
    plain = perceptron()
    for one in (model, plain):
        one(x).square().mean().backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


def test_failed_factorisations_are_counted_and_told_of(monkeypatch):
    monkeypatch.setattr("consequent.maths.factorisation.may_sync", lambda tensor: False)
    model = perceptron()
    optimizer = sgd(model)
    correction = consequent.attach(optimizer, model, damping=0.0)
    model(torch.ones(5, 4)).square().mean().backward()
    assert correction.failed == 2
    optimizer.step()
    assert correction.failed == 2
    assert "2 factorisations failed and were solved in another way: raise the damping" in repr(correction)
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_the_listing():
    model = nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))
    correction = consequent.attach(sgd(model), model, exclude="3")
    assert repr(correction).splitlines() == [
        "Correction of SGD: relative_damping=0.1, loss_reduction='mean'",
        "  corrected (1):",
        "    0  Conv2d, 10 columns × 2 groups → 2, own inputs",
        "  plain (2):",
        "    1  BatchNorm2d is none of the layers that can be corrected",
        "    3  excluded",
        "  bound: off; it is for torch.optim.SGD, for several layers, and for own inputs on one rank",
    ]
    model = perceptron()
    correction = consequent.attach(sgd(model), model, 0.03, averaging=0.95, loss_reduction=7)
    assert repr(correction).splitlines() == [
        "Correction of SGD: damping=0.03, loss_reduction=7, averaging=0.95, refresh=10",
        "  corrected (2):",
        "    0  Linear, 5 columns → 8, averages",
        "    2  Linear, 9 columns → 2, averages",
        "  bound: a step changes outputs by at most 0.2 of the size of a layer's inputs",
    ]
