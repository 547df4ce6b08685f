"""Only the weight or only the bias is trained: the solve is over what is trained."""

import pytest
import torch
from torch import nn

import consequent
from models.expected import check_same, check_training, expected_backward, half_squares, twin_of

LAYERS = {
    "linear-few-samples": (lambda: nn.Linear(12, 3), (4, 12)),
    "linear-many-samples": (lambda: nn.Linear(2, 3), (9, 2)),
    "conv": (lambda: nn.Conv2d(2, 3, 3, padding=1), (3, 2, 4, 4)),
    "conv-one-position": (lambda: nn.Conv2d(4, 3, 3), (3, 4, 3, 3)),
    "grouped": (lambda: nn.Conv1d(4, 6, 3, groups=2), (3, 4, 6)),
    "depthwise": (lambda: nn.Conv2d(3, 3, 2, groups=3), (2, 3, 4, 4)),
}


@pytest.mark.parametrize("frozen", ["weight", "bias"])
@pytest.mark.parametrize("name", LAYERS)
def test_only_one_of_them_is_trained(name, frozen):
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    model = nn.Sequential(make(), nn.Tanh()).double()
    getattr(model[0], frozen).requires_grad_(False)
    x = torch.randn(*shape, dtype=torch.float64)
    check_training(model, lambda m: half_squares(m(x)), shape[0])


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("first", ["weight", "bias", "both"])
@pytest.mark.parametrize("name", LAYERS)
def test_unfreezing_and_freezing_between_steps(name, first, set_to_none):
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    model = nn.Sequential(make(), nn.Flatten(), nn.Tanh(), nn.LazyLinear(2)).double()
    x = torch.randn(*shape, dtype=torch.float64)
    model(x)
    twin = twin_of(model)
    optimizer, plain = consequent.CSGD(model, lr=0.1), torch.optim.SGD(twin.parameters(), lr=0.1)
    for step in range(3):
        for network in (model, twin):
            for kind in ("weight", "bias"):
                getattr(network[0], kind).requires_grad_((first in (kind, "both")) == (step == 1))
        optimizer.zero_grad(set_to_none=set_to_none)
        half_squares(model(x)).backward()
        optimizer.step()
        plain.zero_grad()
        expected_backward(twin, lambda m: half_squares(m(x)), shape[0])
        plain.step()
        check_same(model, twin)


def test_changing_requires_grad_in_the_middle_of_a_step_is_refused():
    model = nn.Sequential(nn.Linear(12, 3)).double()
    x = torch.randn(4, 12, dtype=torch.float64)
    optimizer = consequent.CSGD(model, lr=0.1)
    before = model[0].bias.detach().clone()
    model[0].weight.requires_grad_(False)
    half_squares(model(x)).backward()
    model[0].weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match="requires_grad"):
        half_squares(model(x)).backward()
    assert torch.equal(model[0].bias, before)
    optimizer.zero_grad()
    twin = twin_of(model)
    half_squares(model(x)).backward()
    optimizer.step()
    expected_backward(twin, lambda m: half_squares(m(x)), 4)
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    check_same(model, twin)


def test_parameters_that_the_optimizer_does_not_hold_are_as_good_as_frozen():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    x = torch.randn(4, 12, dtype=torch.float64)
    twin = twin_of(model)
    optimizer = torch.optim.SGD([model[0].weight], lr=0.1)
    consequent.attach(optimizer, model)
    half_squares(model(x)).backward()
    with pytest.warns(consequent.ConsequentWarning, match="layer '0': SGD holds its weight and not its bias"):
        optimizer.step()
    expected_backward(twin, lambda m: half_squares(m(x)), 4, trains=lambda p: p is twin[0].weight)
    torch.optim.SGD([twin[0].weight], lr=0.1).step()
    check_same(model, twin)
    assert torch.equal(model[0].bias.grad, twin[0].bias.grad)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("samples", [2, 20])
def test_a_layer_that_is_not_called_in_every_pass(samples, set_to_none):
    """Stochastic depth: its gradient is None or zero in between, and it is corrected when it is called again."""

    class Skipping(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.is_on = nn.Linear(6, 4), nn.Linear(4, 4), True

        def forward(self, x):
            h = self.first(x)
            return h + self.second(torch.tanh(h)) if self.is_on else h

    torch.manual_seed(0)
    model = Skipping().double()
    twin = twin_of(model)
    x = torch.randn(samples, 6, dtype=torch.float64)
    optimizer, plain = consequent.CSGD(model, lr=0.1), torch.optim.SGD(twin.parameters(), lr=0.1)
    for is_on in (True, False, True):
        model.is_on = twin.is_on = is_on
        optimizer.zero_grad(set_to_none=set_to_none)
        half_squares(model(x)).backward()
        optimizer.step()
        plain.zero_grad()
        expected_backward(twin, lambda m: half_squares(m(x)), samples)
        plain.step()
        check_same(model, twin)
    assert list(optimizer.correction.corrected) == ["first", "second"]
