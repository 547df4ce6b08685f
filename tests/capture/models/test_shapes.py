"""Inputs of all shapes, and models of all shapes: bare layers, containers that are never called."""

import pytest
import torch
from torch import nn

import consequent
from models.expected import check_training, half_squares, twin_of


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


def test_two_calls_of_the_model_in_one_loss_count_the_larger_batch():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)
    check_training(model, lambda m: half_squares(m(x)) + half_squares(m(y)), 5)


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


def outcome(model, x):
    """What a forward and a backward pass come to: the outputs and the gradients, or the error."""
    try:
        outputs = model(x)
        (outputs.values() if outputs.is_nested else outputs).square().sum().backward()
    except Exception as error:
        return type(error), str(error).splitlines()[0]
    values = outputs.values() if outputs.is_nested else outputs
    return values.detach(), [None if p.grad is None else p.grad.to_dense() for p in model.parameters()]


ODD_INPUTS = {
    "coo": lambda: torch.randn(5, 6, dtype=torch.float64).relu().to_sparse(),
    "csr": lambda: torch.randn(5, 6, dtype=torch.float64).relu().to_sparse_csr(),
    "jagged": lambda: torch.nested.nested_tensor(
        [torch.randn(n, 6, dtype=torch.float64) for n in (2, 4)], layout=torch.jagged
    ),
    "nested": lambda: torch.nested.nested_tensor([torch.randn(n, 6, dtype=torch.float64) for n in (2, 4)]),
    "complex": lambda: torch.randn(5, 6, dtype=torch.complex128),
    "integers": lambda: torch.ones(5, 6, dtype=torch.long),
    "another dtype": lambda: torch.randn(5, 6),
    "another width": lambda: torch.randn(5, 7, dtype=torch.float64),
    "no dimension": lambda: torch.tensor(1.0, dtype=torch.float64),
}


@pytest.mark.parametrize("at", ["step", "backward"])
@pytest.mark.parametrize("kind", ODD_INPUTS)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR tensor support")
def test_odd_inputs_do_what_torch_does(kind, at):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 3)).double()
    x, twin = ODD_INPUTS[kind](), twin_of(model)
    consequent.Consequentialism(model, at=at)
    ours, theirs = outcome(model, x), outcome(twin, x)
    assert type(ours[0]) is type(theirs[0]), (ours, theirs)
    if isinstance(theirs[0], torch.Tensor):
        torch.testing.assert_close(ours, theirs)
    else:
        assert ours == theirs


@pytest.mark.parametrize("at", ["step", "backward"])
@pytest.mark.parametrize("shape", [(0, 3), (4, 0)], ids=["no inputs", "no outputs"])
@pytest.mark.parametrize("samples", [1, 5])
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_layer_of_no_width(shape, samples, at):
    """Without inputs only the bias is left to solve for; without outputs nothing is. Its neighbours do not mind."""
    torch.manual_seed(0)
    inner, outer = shape
    model = nn.Sequential(nn.Linear(3, inner), nn.Linear(inner, outer), nn.Linear(outer, 2)).double()
    x = torch.randn(samples, 3, dtype=torch.float64)
    check_training(model, lambda m: half_squares(m(x)), samples, at=at)


@pytest.mark.parametrize("at", ["step", "backward"])
@pytest.mark.parametrize("kind", ["coo", "jagged"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore::consequent.ConsequentWarning")
def test_layers_that_see_only_odd_inputs_are_trained_as_torch_does(kind, at):
    """Our product does not take them: such a layer has its plain gradient, and no error comes of it at the step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 3)).double()
    x, twin = ODD_INPUTS[kind](), twin_of(model)
    optimizer, plain = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(twin.parameters(), lr=0.1)
    consequent.attach(optimizer, model, at=at)
    for _ in range(2):
        for network, stepper in ((model, optimizer), (twin, plain)):
            stepper.zero_grad()
            outputs = network(x)
            (outputs.values() if outputs.is_nested else outputs).square().mean().backward()
            stepper.step()
    for parameter, expected in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(parameter, expected)
