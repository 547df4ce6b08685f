"""A model moved to another dtype after attaching, parameters replaced."""

import pytest
import reference
import torch
from torch import nn

import consequent
from models.expected import check_same, check_same_grads, expected_backward, half_squares, twin_of


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))


def check_step(model, optimizer, x, samples, damping=reference.DEFAULT_DAMPING, lr=0.1, rtol=1e-7):
    """One step of the attached optimiser against the twin's; the model as it is now."""
    twin = twin_of(model)
    twin.zero_grad()
    optimizer.zero_grad()
    half_squares(model(x)).backward()
    optimizer.step()
    expected_backward(twin, lambda m: half_squares(m(x)), samples, damping)
    torch.optim.SGD(twin.parameters(), lr=lr).step()
    check_same(model, twin, rtol=rtol)


@pytest.mark.parametrize("samples", [3, 20])
def test_to_double_after_attaching(samples):
    model = make_model()
    optimizer = consequent.CSGD(model, lr=0.1)
    x = torch.randn(samples, 6)
    check_step(model, optimizer, x, samples, rtol=1e-3)
    model.double()
    check_step(model, optimizer, x.double(), samples)
    check_step(model, optimizer, x.double(), samples)


@pytest.fixture
def overwriting():
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    yield
    torch.__future__.set_overwrite_module_params_on_conversion(False)


@pytest.mark.usefixtures("overwriting")
@pytest.mark.parametrize("samples", [3, 20])
def test_parameters_replaced_and_the_optimizer_told(samples):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    consequent.attach(optimizer, model)
    check_step(model, optimizer, torch.randn(samples, 6), samples, rtol=1e-3)
    old = list(model.parameters())
    model.double()
    assert old[0] is not next(model.parameters())
    optimizer.param_groups[0]["params"] = list(model.parameters())
    x = torch.randn(samples, 6, dtype=torch.float64)
    check_step(model, optimizer, x, samples)
    check_step(model, optimizer, x, samples)


@pytest.mark.usefixtures("overwriting")
def test_parameters_replaced_and_the_optimizer_not_told():
    """As in plain torch: the optimiser trains parameters that are no longer the model's, so nothing moves."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    consequent.attach(optimizer, model)
    model.double()
    twin = twin_of(model)
    x = torch.randn(3, 6, dtype=torch.float64)
    half_squares(twin(x)).backward()
    half_squares(model(x)).backward()
    optimizer.step()
    check_same(model, twin, rtol=0, atol=0)
    check_same_grads(model, twin, rtol=0, atol=0)


@pytest.mark.usefixtures("overwriting")
def test_attached_after_the_parameters_were_replaced_but_the_optimizer_before():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.double()
    with pytest.raises(ValueError, match="before the model's parameters were replaced"):
        consequent.attach(optimizer, model)
    assert not model._forward_pre_hooks
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("samples", [3, 20])
@pytest.mark.parametrize("groups", ["one", "two"])
def test_a_new_head_put_in_the_place_of_the_old_one(samples, groups):
    """Fine-tuning: the layer is replaced, and its parameters in the optimiser with it."""
    model = make_model().double()
    x = torch.randn(samples, 6, dtype=torch.float64)
    params = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters())}]
    optimizer = torch.optim.SGD(params if groups == "two" else model.parameters(), lr=0.1)
    consequent.attach(optimizer, model)
    check_step(model, optimizer, x, samples)
    model[2] = nn.Linear(4, 2).double()
    if groups == "two":
        optimizer.param_groups[1]["params"] = list(model[2].parameters())
    else:
        optimizer.param_groups[0]["params"][2:] = list(model[2].parameters())
    check_step(model, optimizer, x, samples)
    check_step(model, optimizer, x, samples)


def test_weights_loaded_in_place_and_by_assignment():
    model = make_model().double()
    x = torch.randn(3, 6, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    consequent.attach(optimizer, model)
    check_step(model, optimizer, x, 3)
    other = make_model().double()
    model.load_state_dict(other.state_dict())
    check_step(model, optimizer, x, 3)
    model.load_state_dict(twin_of(other).state_dict(), assign=True)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    check_step(model, optimizer, x, 3)


def test_an_ordinary_layer_in_the_place_of_one_that_could_not_be_corrected():
    class Odd(nn.Linear):
        def forward(self, input):  # noqa: A002
            return nn.functional.linear(input, self.weight.sin(), self.bias)

    torch.manual_seed(0)
    model = nn.Sequential(Odd(6, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x = torch.randn(3, 6, dtype=torch.float64)
    optimizer = consequent.CSGD(model, lr=0.1)
    half_squares(model(x)).backward()
    with pytest.warns(consequent.ConsequentWarning, match="'0' keeps its plain gradient"):
        optimizer.step()
    model[0] = nn.Linear(6, 4).double()
    optimizer.add_param_group({"params": list(model[0].parameters())})
    check_step(model, optimizer, x, 3)
    assert list(optimizer.correction.corrected) == ["0", "2"]


@pytest.fixture
def swapping():
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.usefixtures("swapping")
@pytest.mark.parametrize("samples", [3, 20])
@pytest.mark.parametrize("at", ["step", "backward"])
@pytest.mark.parametrize("zeroed", [True, False])
def test_the_content_of_parameters_exchanged_after_steps(samples, at, zeroed):
    """Torch refuses to exchange a tensor that is weakly referred to: nothing of ours may do so between steps."""
    model = make_model()
    optimizer = consequent.CSGD(model, lr=0.1, at=at)
    x = torch.randn(samples, 6)
    for _ in range(2):
        check_step(model, optimizer, x, samples, rtol=1e-3)
    if zeroed:
        optimizer.zero_grad()
    old = list(model.parameters())
    model.double()
    assert all(one is other for one, other in zip(old, model.parameters(), strict=True))
    assert old[0].dtype == torch.float64
    for _ in range(2):
        check_step(model, optimizer, x.double(), samples)
