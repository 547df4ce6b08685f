"""Subclasses that override forward, and users' hooks: corrected where the weight meets inputs, plain otherwise."""

import warnings

import pytest
import torch
from torch import nn

import consequent
from models.expected import check_training, corrected_gradients, half_squares, twin_of, watching


class SameLinear(nn.Linear):
    def forward(self, input):  # noqa: A002
        return nn.functional.linear(weight=self.weight, input=input, bias=self.bias)


class SameConv(nn.Conv2d):
    def forward(self, input):  # noqa: A002
        return super().forward(input.contiguous()) + 0.0


class TanhLinear(nn.Linear):
    def forward(self, input):  # noqa: A002
        return torch.tanh(super().forward(input))


class ScaledLinear(nn.Linear):
    def forward(self, input):  # noqa: A002
        return 0.5 * nn.functional.linear(input, self.weight, self.bias)


class NoisyLinear(nn.Linear):
    def forward(self, input):  # noqa: A002
        return nn.functional.linear(input + 0.1 * torch.cos(input), self.weight, self.bias)


class NormalisedInputLinear(nn.Linear):
    def forward(self, input):  # noqa: A002
        return super().forward(normalised(input))


class BiasLater(nn.Linear):
    def forward(self, input):  # noqa: A002
        return nn.functional.linear(input, self.weight) + self.bias


class HalfWeightLinear(nn.Linear):
    def forward(self, input):  # noqa: A002
        return nn.functional.linear(input, 0.5 * self.weight, self.bias)


class StandardisedLinear(nn.Linear):
    def forward(self, input):  # noqa: A002
        return nn.functional.linear(input, self.weight - self.weight.mean(1, keepdim=True), self.bias)


class StandardisedConv(nn.Conv2d):
    def forward(self, input):  # noqa: A002
        weight = self.weight - self.weight.mean(dim=(1, 2, 3), keepdim=True)
        return self._conv_forward(input, weight, self.bias)


class MatmulLinear(nn.Linear):
    def forward(self, input):  # noqa: A002
        return input @ self.weight.T + self.bias


class TwoOutputs(nn.Linear):
    def forward(self, input):  # noqa: A002
        output = super().forward(input)
        return output.chunk(2, dim=-1)


def normalised(x):
    return x / x.norm(dim=-1, keepdim=True)


class Around(nn.Sequential):
    """What a subclass does besides the product, done outside of an ordinary first layer."""

    def __init__(self, *modules, before, after):
        super().__init__(*modules)
        self.before, self.after = before, after

    def forward(self, x):
        outputs = self.after(self[0](self.before(x)))
        for module in list(self)[1:]:
            outputs = module(outputs)
        return outputs


def same(x):
    return x


@pytest.mark.parametrize("samples", [3, 20])
def test_the_same_maths_is_corrected(samples):
    torch.manual_seed(0)
    model = nn.Sequential(SameConv(2, 3, 3), nn.Flatten(), nn.Tanh(), SameLinear(12, 3)).double()
    x = torch.randn(samples, 2, 4, 4, dtype=torch.float64)
    correction = check_training(model, lambda m: half_squares(m(x)), samples)
    assert list(correction.corrected) == ["0", "3"]


# name: (subclass, what it does to its inputs before the product, what to its outputs after it)
AROUND = {
    "tanh": (TanhLinear, same, torch.tanh),
    "scaled": (ScaledLinear, same, lambda z: 0.5 * z),
    "noisy": (NoisyLinear, lambda x: x + 0.1 * torch.cos(x), same),
    "normalised-input": (NormalisedInputLinear, normalised, same),
}


@pytest.mark.parametrize("at", ["step", "backward"])
@pytest.mark.parametrize("samples", [3, 30])
@pytest.mark.parametrize("name", AROUND)
def test_a_product_inside_of_a_forward_of_its_own_is_corrected(name, samples, at):
    """X and ΔZ are those at the product itself, whatever is done before and after it."""
    torch.manual_seed(0)
    kind, before, after = AROUND[name]
    model = nn.Sequential(kind(6, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    twin = Around(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2), before=before, after=after).double()
    twin.load_state_dict(model.state_dict())
    x = torch.randn(samples, 6, dtype=torch.float64)
    correction = check_training(model, lambda m: half_squares(m(x)), samples, twin=twin, steps=3, at=at)
    assert list(correction.corrected) == ["0", "2"]
    assert not correction.plain


DIFFERENT = {
    "half the weight": (lambda: HalfWeightLinear(6, 4), (6,)),
    "matmul": (lambda: MatmulLinear(6, 4), (6,)),
    "standardised": (lambda: nn.Sequential(StandardisedConv(2, 1, 3), nn.Flatten()), (2, 4, 4)),
}


@pytest.mark.parametrize("samples", [3, 30])
@pytest.mark.parametrize("name", DIFFERENT)
def test_other_maths_stays_plain_with_one_warning(name, samples):
    torch.manual_seed(0)
    make, shape = DIFFERENT[name]
    model = nn.Sequential(make(), nn.Tanh(), nn.Linear(4, 2)).double()
    different = next(n for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d))
    x = torch.randn(samples, *shape, dtype=torch.float64)
    with pytest.warns(consequent.ConsequentWarning, match=f"'{different}' keeps its plain gradient") as caught:
        correction = check_training(model, lambda m: half_squares(m(x)), samples, corrected=["2"], steps=3)
    assert len([w for w in caught if issubclass(w.category, consequent.ConsequentWarning)]) == 1
    assert correction.plain[different] == "its forward does not multiply inputs with its weight as it is"
    assert list(correction.corrected) == ["2"]
    assert f"{different}  " in repr(correction).split("plain (")[1]


@pytest.mark.parametrize("at", ["step", "backward"])
@pytest.mark.parametrize("samples", [3, 30])
def test_a_bias_that_is_added_after_the_product_is_plain_and_the_weight_is_corrected(samples, at):
    torch.manual_seed(0)
    model = nn.Sequential(BiasLater(6, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x = torch.randn(samples, 6, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    consequent.attach(optimizer, model, at=at)
    twin = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    twin.load_state_dict(model.state_dict())
    with watching(twin) as calls:
        half_squares(twin(x)).backward()
    expected = corrected_gradients(calls, trains=lambda parameter: parameter is not twin[0].bias)
    half_squares(model(x)).backward()
    optimizer.step()
    for parameter, its in zip(model.parameters(), twin.parameters(), strict=True):
        wanted = torch.as_tensor(samples * expected[its]) if its in expected else its.grad
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-9, atol=1e-12)


def check_plain_training(model, compute_loss, steps=2):
    """Every gradient is the plain one; returns the correction and its warnings."""
    twin = twin_of(model)
    optimizer, plain = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(twin.parameters(), lr=0.1)
    correction = consequent.attach(optimizer, model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            for network, stepper in ((model, optimizer), (twin, plain)):
                stepper.zero_grad()
                compute_loss(network).backward()
                stepper.step()
    for parameter, expected in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(parameter, expected)
    return correction, [w for w in caught if issubclass(w.category, consequent.ConsequentWarning)]


@pytest.mark.parametrize("samples", [3, 30])
def test_a_model_in_which_nothing_turns_out_to_be_correctable_warns_too(samples):
    """Plain gradients at the learning rate of a corrected optimiser: nobody must find out by a diverging loss."""
    torch.manual_seed(0)
    model = nn.Sequential(StandardisedLinear(6, 4), nn.Flatten()).double()
    x = torch.randn(samples, 6, dtype=torch.float64)
    correction, caught = check_plain_training(model, lambda m: half_squares(m(x)))
    assert list(correction.corrected) == []
    assert len(caught) == 1


class Gated(nn.Module):
    """A layer whose outputs are taken in two parts."""

    def __init__(self, split):
        super().__init__()
        self.split, self.readout = split, nn.Linear(2, 2)

    def forward(self, x):
        parts = self.split(x)
        a, b = parts if isinstance(parts, tuple) else parts.chunk(2, dim=-1)
        return self.readout(torch.tanh(a) * b)


@pytest.mark.parametrize("at", ["step", "backward"])
@pytest.mark.parametrize("samples", [3, 30])
def test_a_layer_that_returns_several_tensors_is_corrected(samples, at):
    torch.manual_seed(0)
    model, twin = Gated(TwoOutputs(6, 4)).double(), Gated(nn.Linear(6, 4)).double()
    twin.load_state_dict(model.state_dict())
    x = torch.randn(samples, 6, dtype=torch.float64)
    correction = check_training(model, lambda m: half_squares(m(x)), samples, twin=twin, steps=3, at=at)
    assert list(correction.corrected) == ["split", "readout"]


@pytest.mark.parametrize("samples", [3, 30])
def test_a_zero_initialised_layer_with_other_maths_stays_plain(samples):
    """All outputs are 0 at first, which says nothing about what the forward computes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), StandardisedLinear(4, 3)).double()
    nn.init.zeros_(model[2].weight)
    nn.init.zeros_(model[2].bias)
    x = torch.randn(samples, 6, dtype=torch.float64)
    twin = twin_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    correction = consequent.attach(optimizer, model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            twin.load_state_dict(model.state_dict())
            optimizer.zero_grad()
            half_squares(model(x)).backward()
            optimizer.step()
    twin.zero_grad()
    half_squares(twin(x)).backward()
    assert torch.equal(model[2].weight.grad, twin[2].weight.grad)
    assert "2" in correction.plain
    assert len(caught) == 1


@pytest.mark.parametrize("samples", [3, 30])
@pytest.mark.parametrize("first", ["hook", "attach"])
@pytest.mark.parametrize("at", ["step", "backward"])
def test_a_user_hook_that_changes_the_output(samples, first, at):
    """The layer's own output is seen, and its ΔZ is that before the user's hook: it is corrected."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    other = nn.Sequential(nn.Linear(6, 4), Sine(), nn.Tanh(), nn.Linear(4, 2)).double()
    other.load_state_dict({f"{0 if n[0] == '0' else 3}{n[1:]}": p for n, p in model.state_dict().items()})
    x = torch.randn(samples, 6, dtype=torch.float64)
    if first == "hook":
        model[0].register_forward_hook(lambda layer, args, output: output.sin())
    optimizer = consequent.CSGD(model, lr=0.05, at=at)
    if first == "attach":
        model[0].register_forward_hook(lambda layer, args, output: output.sin())
    half_squares(model(x)).backward()
    optimizer.step()
    check_training(other, lambda m: half_squares(m(x)), samples, steps=1)
    for parameter, expected in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-12, atol=1e-12)


class Sine(nn.Module):
    def forward(self, x):
        return x.sin()


@pytest.mark.parametrize("samples", [3, 30])
def test_a_user_pre_hook_that_changes_the_input(samples):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    model[0].register_forward_pre_hook(lambda layer, args: (args[0].cos(),))
    x = torch.randn(samples, 6, dtype=torch.float64)
    check_training(model, lambda m: half_squares(m(x)), samples)
