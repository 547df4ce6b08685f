"""Copies and pickles of a hooked model: they do not feed the original, and can be attached themselves."""

import copy
import io
import pickle

import pytest
import reference
import torch
from torch import nn

import consequent
from models.expected import check_same, expected_backward, half_squares, twin_of


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Tanh(), nn.Linear(12, 3)).double()


def through_torch_save(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIERS = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": through_torch_save,
}


@pytest.fixture(params=COPIERS)
def copier(request):
    return COPIERS[request.param]


@pytest.fixture
def x():
    return torch.randn(5, 2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def expected_step(twin, compute_loss, samples, damping=reference.DEFAULT_DAMPING, lr=0.1):
    twin.zero_grad()
    expected_backward(twin, compute_loss, samples, damping)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter -= lr * parameter.grad


def test_passes_through_the_copy_do_not_feed_the_original(copier, x):
    model = make_model()
    twin = twin_of(model)
    optimizer = consequent.CSGD(model, lr=0.1)
    half_squares(model(x)).backward()
    average = copier(model)
    half_squares(average(3 * x + 1)).backward()  # between backward and step
    optimizer.step()
    expected_step(twin, lambda m: half_squares(m(x)), 5)
    check_same(model, twin)
    # and before the forward pass
    half_squares(average(2 * x)).backward()
    optimizer.zero_grad()
    half_squares(model(x)).backward()
    optimizer.step()
    expected_step(twin, lambda m: half_squares(m(x)), 5)
    check_same(model, twin)


def test_the_copy_made_in_the_middle_of_a_step_has_plain_gradients(copier, x):
    model = make_model()
    optimizer = consequent.CSGD(model, lr=0.1)
    half_squares(model(x)).backward()
    average, twin = copier(model), twin_of(make_model())
    optimizer.step()
    average.zero_grad()
    twin.zero_grad()
    half_squares(average(x)).backward()
    half_squares(twin(x)).backward()
    for parameter, plain in zip(average.parameters(), twin.parameters(), strict=True):
        assert torch.equal(parameter.grad, plain.grad)


def test_the_copy_can_be_attached_itself(copier, x):
    model = make_model()
    twin = twin_of(model)
    original = consequent.CSGD(model, lr=0.1)
    other = copier(model)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    consequent.attach(optimizer, other, damping=0.5)
    half_squares(other(x)).backward()
    half_squares(model(2 * x)).backward()
    optimizer.step()
    original.step()
    twins = twin, twin_of(twin)
    expected_step(twins[0], lambda m: half_squares(m(2 * x)), 5)
    expected_step(twins[1], lambda m: half_squares(m(x)), 5, damping=0.5)
    check_same(model, twins[0])
    check_same(other, twins[1])


def test_an_averaged_model_keeps_the_average_of_corrected_weights(x):
    model = make_model()
    twin = twin_of(model)
    optimizer = consequent.CSGD(model, lr=0.1)
    average = torch.optim.swa_utils.AveragedModel(model)
    twin_average = torch.optim.swa_utils.AveragedModel(twin)
    for _ in range(3):
        optimizer.zero_grad()
        half_squares(model(x)).backward()
        optimizer.step()
        average.update_parameters(model)
        average(x)
        expected_step(twin, lambda m: half_squares(m(x)), 5)
        twin_average.update_parameters(twin)
    check_same(average, twin_average)


def test_hooks_do_not_pile_up_over_generations(copier):
    """Saving and resuming again and again must not make the model slower each time."""
    model = make_model()
    kept = []
    for _ in range(4):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        consequent.attach(optimizer, model)
        kept.append(optimizer)
        model = copier(model)
    assert len(model._forward_hooks) <= 1
    assert len(model._forward_pre_hooks) <= 1
    assert (type(model[0]), type(model[3])) == (nn.Conv2d, nn.Linear)


def test_a_copy_that_is_attached_and_detached_has_no_hooks():
    model = make_model()
    kept = consequent.CSGD(model, lr=0.1)
    other = copy.deepcopy(model)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    consequent.attach(optimizer, other).detach()
    assert kept.correction.optimizer is kept
    for module in other.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert (type(other[0]), type(other[3])) == (nn.Conv2d, nn.Linear)


@pytest.mark.parametrize("at", ["step", "backward"])
def test_a_watched_layer_is_of_a_subclass_of_the_same_name_until_it_is_detached(at, x):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = repr(model)
    correction = consequent.attach(optimizer, model, at=at)
    for layer, kind in ((model[0], nn.Conv2d), (model[3], nn.Linear)):
        assert type(layer) is not kind
        assert isinstance(layer, kind)
        assert (type(layer).__name__, type(layer).__module__) == (kind.__name__, kind.__module__)
        assert not layer._forward_hooks
        assert not layer._forward_pre_hooks
    assert len(model._forward_hooks) == len(model._forward_pre_hooks) == 1
    assert repr(model) == before
    half_squares(model(x)).backward()
    optimizer.step()
    correction.detach()
    assert (type(model[0]), type(model[3])) == (nn.Conv2d, nn.Linear)
    assert not any("consequent" in name for module in model.modules() for name in vars(module))
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_a_layer_that_two_corrections_watch_is_watched_until_both_are_detached():
    model = make_model()
    optimizers = [torch.optim.SGD(model[place].parameters(), lr=0.1) for place in (0, 3)]
    one, two = (consequent.attach(optimizer, model) for optimizer in optimizers)
    one.detach()
    assert type(model[3]) is not nn.Linear
    two.detach()
    assert (type(model[0]), type(model[3])) == (nn.Conv2d, nn.Linear)


def test_a_copy_of_a_watched_layer_is_a_plain_one(copier):
    model = make_model()
    optimizer = consequent.CSGD(model, lr=0.1)
    for layer, kind in ((model[0], nn.Conv2d), (model[3], nn.Linear)):
        copied = copier(layer)
        assert type(copied) is kind
        assert vars(copied).keys() == vars(kind(*((2, 3, 3) if kind is nn.Conv2d else (12, 3)))).keys()
        assert torch.equal(copied.weight, layer.weight)
        assert type(layer) is not kind  # the original is watched still
    assert optimizer.correction.corrected.keys() == {"0", "3"}


def test_the_pickle_of_a_watched_layer_needs_nothing_of_ours():
    model = make_model()
    optimizer = consequent.CSGD(model, lr=0.1)
    assert optimizer.correction.corrected
    buffer = io.BytesIO()
    torch.save(model[3], buffer)
    assert b"consequent" not in pickle.dumps(model[3]) + buffer.getvalue()


class Agent(nn.Module):
    """A model that holds its own optimiser, as reinforcement learners do."""

    def __init__(self, make_optimizer):
        super().__init__()
        self.layer = nn.Linear(4, 2).double()
        self.optimizer = make_optimizer(self)

    def forward(self, x):
        return self.layer(x)


@pytest.mark.parametrize("name", ["deepcopy", "pickle"])
def test_a_model_that_holds_its_own_optimizer(name):
    torch.manual_seed(0)
    agent = Agent(lambda model: consequent.CSGD(model, lr=0.1))
    with pytest.raises(TypeError, match="holds its own CSGD"):
        COPIERS[name](agent)
