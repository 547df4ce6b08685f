"""Parameters of other modules keep exactly their plain gradient beside corrected layers."""

import warnings

import pytest
import torch
from torch import nn

import consequent
from models.expected import check_same_grads, check_training, expected_backward, half_squares, twin_of


class Scaled(nn.Module):
    """A parameter of the root module's own."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(3, 2), nn.Parameter(torch.ones(2))

    def forward(self, x):
        return self.layer(x) * self.scale


MODELS = {
    "batch-norm": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.Conv2d(3, 2, 2)),
        lambda: torch.randn(4, 2, 5, 5, dtype=torch.float64),
        ["0", "3"],
    ),
    "other-norms": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.GroupNorm(2, 4), nn.PReLU(), nn.Linear(4, 2), nn.RMSNorm(2)),
        lambda: torch.randn(4, 3, dtype=torch.float64),
        ["0", "3"],
    ),
    "own-parameter": (Scaled, lambda: torch.randn(4, 3, dtype=torch.float64), ["layer"]),
}


@pytest.mark.parametrize("name", MODELS)
def test_plain_gradients_are_bitwise_those_of_autograd(name):
    torch.manual_seed(0)
    make, make_input, corrected = MODELS[name]
    model, x = make().double(), make_input()
    twin = twin_of(model)
    half_squares(twin(x)).backward()
    plain = {n: p.grad for n, p in twin.named_parameters() if n.rpartition(".")[0] not in corrected}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    correction = consequent.attach(optimizer, model)
    half_squares(model(x)).backward()
    optimizer.step()
    assert plain
    assert list(correction.corrected) == corrected
    for parameter_name, expected in plain.items():
        assert torch.equal(model.get_parameter(parameter_name).grad, expected), parameter_name
        assert parameter_name.rpartition(".")[0] in correction.plain


@pytest.mark.parametrize("name", MODELS)
def test_the_layers_between_them_are_corrected(name):
    torch.manual_seed(0)
    make, make_input, corrected = MODELS[name]
    x = make_input()
    check_training(make().double(), lambda m: half_squares(m(x)), len(x), corrected=corrected, damping=0.1)


def test_a_sparse_embedding_gradient_stays_sparse_and_plain():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2)).double()
    tokens = torch.tensor([1, 3, 3, 8])
    check_training(model, lambda m: half_squares(m(tokens)), 4, corrected=["1"])
    assert model[0].weight.grad.is_sparse


class PartlyCalled(nn.Module):
    """The weight of one layer is used without the layer being called."""

    def __init__(self):
        super().__init__()
        self.first, self.around, self.last = nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, 2)

    def forward(self, x):
        h = torch.tanh(self.first(x))
        return self.last(torch.tanh(nn.functional.linear(h, self.around.weight, self.around.bias)))


def by_functions(model, x):
    for layer in model:
        x = nn.functional.linear(x, layer.weight, layer.bias)
    return x


def by_vmap(model, x):
    return torch.func.vmap(model)(x)


@pytest.mark.parametrize("at", ["step", "backward"])
@pytest.mark.parametrize("call", [by_functions, by_vmap])
def test_a_model_of_which_no_call_is_seen_is_told_of(call, at):
    """The optimiser is the plain one, and says so."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    correction = consequent.attach(optimizer, model, at=at)
    before = [p.detach().clone() for p in model.parameters()]
    for number in range(3):
        optimizer.zero_grad()
        half_squares(call(model, torch.ones(3, 6))).backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        assert len(caught) == (2 if number == 0 else 0)
        assert all("from no call of the layer that can be seen" in str(one.message) for one in caught)
    assert correction.counters.steps == 0
    assert list(correction.plain) == ["0", "1"]
    assert not any(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    optimizer.zero_grad()
    half_squares(model(torch.ones(3, 6))).backward()
    optimizer.step()
    assert correction.plain == {}


@pytest.mark.parametrize("samples", [3, 30])
@pytest.mark.parametrize("by", ["correction", "optimizer"])
def test_a_step_with_one_layer_that_was_not_called(samples, by):
    torch.manual_seed(0)
    model = PartlyCalled().double()
    twin = twin_of(model)
    x = torch.randn(samples, 6, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    correction = consequent.attach(optimizer, model)
    half_squares(model(x)).backward()
    with pytest.warns(consequent.ConsequentWarning, match="'around' keeps its plain gradient") as caught:
        (correction if by == "correction" else optimizer).step()
    assert len(caught) == 1
    expected_backward(twin, lambda m: half_squares(m(x)), samples, layers=[twin.first, twin.last])
    check_same_grads(model, twin)
    assert list(correction.plain) == ["around"]
    assert list(correction.corrected) == ["first", "last"]
    if by == "correction":
        optimizer.step()  # takes the gradients as the step by hand left them
    before = [p.detach() - 0.1 * p.grad for p in twin.parameters()]
    for parameter, expected in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-7, atol=1e-10)
    optimizer.zero_grad()
    half_squares(model(x)).backward()
    correction.step()  # it is not told again


@pytest.mark.parametrize("samples", [3, 30])
def test_in_the_backward_pass_a_layer_that_was_not_called_is_plain(samples):
    torch.manual_seed(0)
    model = PartlyCalled().double()
    twin = twin_of(model)
    x = torch.randn(samples, 6, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    correction = consequent.attach(optimizer, model, at="backward")
    half_squares(model(x)).backward()
    correction.step()
    expected_backward(twin, lambda m: half_squares(m(x)), samples, layers=[twin.first, twin.last])
    check_same_grads(model, twin)
    with pytest.warns(consequent.ConsequentWarning, match="'around' keeps its plain gradient") as caught:
        optimizer.step()
    assert len(caught) == 1
    assert list(correction.plain) == ["around"]
