"""A weight shared by several layers: corrected with the inputs of all its uses, or left plain with a reason."""

import pytest
import torch
from torch import nn

import consequent
from models.expected import check_training, corrected_gradients, half_squares, twin_of, watching


class Pair(nn.Module):
    """Two layers, one after the other."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def shared_pair(first, second, bias):
    second.weight = first.weight
    if bias == "shared":
        second.bias = first.bias
    return Pair(first, second).double()


@pytest.mark.parametrize("bias", ["shared", "own", "none", "one"])
@pytest.mark.parametrize("samples", [1, 12])
def test_two_linear_layers(samples, bias):
    torch.manual_seed(0)
    model = shared_pair(nn.Linear(4, 4, bias=bias != "none"), nn.Linear(4, 4, bias=bias in ("shared", "own")), bias)
    x = torch.randn(samples, 4, dtype=torch.float64)
    correction = check_training(model, lambda m: half_squares(m(x)), samples)
    assert list(correction.corrected) == ["first", "second"]


@pytest.mark.parametrize("bias", ["shared", "own", "none"])
@pytest.mark.parametrize("size", [5, 9])
def test_two_convolutions_with_different_stride(size, bias):
    torch.manual_seed(0)
    model = shared_pair(
        nn.Conv2d(3, 3, 3, bias=bias != "none"), nn.Conv2d(3, 3, 3, stride=2, padding=1, bias=bias != "none"), bias
    )
    x = torch.randn(2, 3, size, size, dtype=torch.float64)
    check_training(model, lambda m: half_squares(m(x)), 2)


@pytest.mark.parametrize("bias", ["own", "shared"])
def test_grouped_convolutions_with_different_dilation(bias):
    torch.manual_seed(0)
    model = shared_pair(
        nn.Conv1d(4, 4, 3, groups=2, padding=1), nn.Conv1d(4, 4, 3, groups=2, dilation=2, padding=2), bias
    )
    x = torch.randn(2, 4, 6, dtype=torch.float64)
    check_training(model, lambda m: half_squares(m(x)), 2)


def test_one_of_two_layers_with_a_shared_weight_is_frozen_in_its_bias():
    torch.manual_seed(0)
    model = shared_pair(nn.Linear(4, 4), nn.Linear(4, 4), "own")
    model.second.bias.requires_grad_(False)
    x = torch.randn(2, 4, dtype=torch.float64)
    check_training(model, lambda m: half_squares(m(x)), 2)


def test_only_one_of_the_layers_is_called():
    torch.manual_seed(0)
    model = shared_pair(nn.Linear(4, 4), nn.Linear(4, 4), "own")
    x = torch.randn(2, 4, dtype=torch.float64)
    check_training(model, lambda m: half_squares(m.first(x)), 2)


@pytest.mark.parametrize("samples", [2, 20])
def test_a_weight_tied_to_an_embedding_stays_plain(samples):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(7, 4)
            self.hidden = nn.Linear(4, 4)
            self.readout = nn.Linear(4, 7)
            self.readout.weight = self.embedding.weight

        def forward(self, x):
            return self.readout(torch.tanh(self.hidden(self.embedding(x))))

    torch.manual_seed(0)
    x = torch.arange(samples) % 7
    correction = check_training(Tied().double(), lambda m: half_squares(m(x)), samples, corrected=["hidden"])
    assert list(correction.corrected) == ["hidden"]
    assert correction.plain["readout"] == "its weight is shared with 'embedding', which is not corrected"
    assert "Embedding" in correction.plain["embedding"]


@pytest.mark.parametrize("samples", [2, 20])
def test_a_bias_shared_by_layers_with_different_weights_leaves_both_plain(samples):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    model[2].bias = model[0].bias
    x = torch.randn(samples, 4, dtype=torch.float64)
    correction = check_training(model, lambda m: half_squares(m(x)), samples, corrected=["4"])
    assert list(correction.corrected) == ["4"]
    assert "bias is shared" in correction.plain["0"]
    assert "bias is shared" in correction.plain["2"]


def test_a_weight_that_is_also_used_elsewhere_stays_plain():
    class Reused(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.other = nn.Linear(4, 3)
            self.matrix = self.layer.weight

        def forward(self, x):
            return self.other(self.layer(x) @ self.matrix)

    torch.manual_seed(0)
    x = torch.randn(3, 4, dtype=torch.float64)
    correction = check_training(Reused().double(), lambda m: half_squares(m(x)), 3, corrected=["other"])
    assert "shared" in correction.plain["layer"]


def test_excluding_one_of_two_layers_with_a_shared_weight_excludes_both():
    torch.manual_seed(0)
    model = nn.Sequential(shared_pair(nn.Linear(4, 4), nn.Linear(4, 4), "own"), nn.Linear(4, 2)).double()
    x = torch.randn(3, 4, dtype=torch.float64)
    correction = check_training(model, lambda m: half_squares(m(x)), 3, corrected=["1"], exclude="0.second")
    assert correction.plain == {
        "0.second": "excluded",
        "0.first": "its weight is shared with '0.second', which is not corrected",
    }


@pytest.mark.parametrize("samples", [2, 20])
@pytest.mark.parametrize("at", ["step", "backward"])
def test_a_second_use_of_the_weight_outside_of_the_layer_is_plain(samples, at):
    """Its inputs are not seen, and its part of the gradient is told apart: N times U, plus that part."""

    class Outside(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4, bias=False)

        def forward(self, x, weight=None):
            weight = self.layer.weight if weight is None else weight
            return nn.functional.linear(torch.tanh(self.layer(x)), weight)

    torch.manual_seed(0)
    model = Outside().double()
    twin = twin_of(model)
    x = torch.randn(samples, 4, dtype=torch.float64)
    optimizer = consequent.CSGD(model, lr=0.1, at=at)
    half_squares(model(x)).backward()
    optimizer.step()
    other = twin.layer.weight.detach().clone().requires_grad_()
    with watching(twin) as calls:
        half_squares(twin(x, other)).backward()
    expected = torch.as_tensor(samples * corrected_gradients(calls)[twin.layer.weight]) + other.grad
    torch.testing.assert_close(model.layer.weight.grad, expected, rtol=1e-9, atol=1e-12)
    assert optimizer.correction.counters.edited == 0
