"""Inputs of all shapes, and models of all shapes: bare layers, containers that are never called."""

import pytest
import torch
from torch import nn

import consequent
from models.expected import check_training, half_squares


@pytest.mark.parametrize("features", [2, 60])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (3, 5), (3, 1, 4)], ids=str)
@pytest.mark.parametrize("wrap", [lambda layer: layer, nn.Sequential], ids=["bare", "sequential"])
def test_linear_on_inputs_of_any_leading_shape(wrap, shape, features):
    """N is the leading dimension; a lone vector is one sample."""
    torch.manual_seed(0)
    model = wrap(nn.Linear(features, 3)).double()
    x = torch.randn(*shape, features, dtype=torch.float64)
    check_training(model, lambda m: half_squares(m(x)), shape[0] if shape else 1)


CONVOLUTIONS = {
    "groups": (lambda: nn.Conv2d(4, 6, 3, groups=2), (3, 4, 5, 5)),
    "depthwise": (lambda: nn.Conv2d(3, 3, 3, groups=3, padding=1, bias=False), (2, 3, 4, 4)),
    "depthwise-multiplier": (lambda: nn.Conv1d(3, 6, 2, groups=3), (2, 3, 6)),
    "same-even": (lambda: nn.Conv2d(2, 3, (2, 4), padding="same"), (2, 2, 5, 4)),
    "same-even-circular-dilated": (
        lambda: nn.Conv1d(2, 3, 4, padding="same", padding_mode="circular", dilation=2),
        (2, 2, 7),
    ),
    "same-even-3d": (lambda: nn.Conv3d(1, 2, 2, padding="same"), (1, 1, 3, 2, 3)),
    "unbatched": (lambda: nn.Conv2d(2, 3, 3), (2, 5, 4)),
    "unbatched-groups": (lambda: nn.Conv1d(4, 4, 2, groups=2), (4, 5)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name):
    torch.manual_seed(0)
    make, shape = CONVOLUTIONS[name]
    layer = make()
    unbatched = len(shape) == len(layer.kernel_size) + 1
    model = nn.Sequential(layer, nn.Tanh()).double()
    x = torch.randn(*shape, dtype=torch.float64)
    samples = 1 if unbatched else shape[0]
    check_training(model, lambda m: half_squares(m(x)) * (shape[0] / samples if unbatched else 1), samples)


@pytest.mark.parametrize("make", [nn.ModuleList, lambda layers: nn.ModuleDict({"0": layers[0], "1": layers[1]})])
def test_a_container_that_is_never_called(make):
    """Its layers are called one by one: N is what the one with most samples saw."""

    def compute_loss(model):
        first, second = model.children()
        return half_squares(second(torch.tanh(first(x))))

    torch.manual_seed(0)
    x = torch.randn(5, 3, dtype=torch.float64)
    correction = check_training(make([nn.Linear(3, 8), nn.Linear(8, 2)]).double(), compute_loss, 5)
    assert list(correction.corrected) == ["0", "1"]


def test_methods_instead_of_forward():
    class AutoEncoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(6, 4), nn.Tanh())
            self.decoder = nn.Linear(4, 6)

        def encode(self, x):
            return self.encoder(x)

        def decode(self, code):
            return self.decoder(code)

    torch.manual_seed(0)
    x = torch.randn(5, 6, dtype=torch.float64)
    check_training(AutoEncoder().double(), lambda m: half_squares(m.decode(m.encode(x))), 5)


def test_the_input_as_a_keyword():
    torch.manual_seed(0)
    x = torch.randn(5, 3, dtype=torch.float64)
    check_training(nn.Linear(3, 2).double(), lambda m: half_squares(m(input=x)), 5)


def test_a_deep_nest_of_containers_counts_samples_once():
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Sequential(nn.Linear(3, 4), nn.ReLU()), nn.Sequential(nn.Linear(4, 4)))
    model = nn.Sequential(inner, nn.Sequential(nn.Sequential(nn.Linear(4, 2)))).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    check_training(model, lambda m: half_squares(m(x)), 5)


def test_two_calls_of_the_model_before_one_step_add_up():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)
    check_training(model, lambda m: (5 * half_squares(m(x)) + 2 * half_squares(m(y))) / 7, 7)


def test_a_vector_of_constants_beside_a_batch_of_labels_does_not_change_the_number_of_samples():
    """The model's input is a batch of N labels; one of its layers is fed with a single vector."""

    class Styled(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(5, 4)
            self.style = nn.Linear(3, 4)
            self.readout = nn.Linear(4, 2)
            self.register_buffer("latent", torch.randn(3))

        def forward(self, labels):
            return self.readout(self.embedding(labels) + self.style(self.latent))

    torch.manual_seed(0)
    labels = torch.arange(6) % 5
    check_training(Styled().double(), lambda m: half_squares(m(labels)), 6)


def test_attaching_to_a_part_of_the_model_only():
    """What is outside keeps its plain gradient, the part's samples count."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    plain = torch.autograd.grad(half_squares(model(x)), list(model[2].parameters()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    correction = consequent.attach(optimizer, model[0])
    half_squares(model(x)).backward()
    optimizer.step()
    assert list(correction.corrected) == [""]
    assert all(torch.equal(p.grad, g) for p, g in zip(model[2].parameters(), plain, strict=True))
