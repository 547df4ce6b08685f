"""Weights that a layer makes of its own before it multiplies: timm's standardised convolutions, written anew.

The gradient of the weight that acts is corrected, and goes on through what was done to the layer's own.
"""

import copy

import pytest
import reference
import torch
from models.expected import half_squares
from torch import nn
from torch.nn import functional

import consequent


class StdConv2d(nn.Conv2d):
    """Each filter less its mean, divided by its deviation."""

    def forward(self, x):
        weight = functional.batch_norm(
            self.weight.reshape(1, self.out_channels, -1), None, None, training=True, momentum=0.0, eps=1e-6
        ).reshape_as(self.weight)
        return functional.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class ScaledStdConv2d(nn.Conv2d):
    """The same with a gain for each filter."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.gain = nn.Parameter(torch.full((self.out_channels, 1, 1, 1), 1.3))
        self.scale = self.weight[0].numel() ** -0.5

    def made(self):
        return functional.batch_norm(
            self.weight.reshape(1, self.out_channels, -1),
            None,
            None,
            weight=(self.gain * self.scale).view(-1),
            training=True,
            momentum=0.0,
            eps=1e-6,
        ).reshape_as(self.weight)

    def forward(self, x):
        return functional.conv2d(x, self.made(), self.bias, self.stride, self.padding, self.dilation, self.groups)


class ScaledStdConv2dSame(ScaledStdConv2d):
    """Padded by itself, as TensorFlow does."""

    def forward(self, x):
        sizes = []
        for size, stride, taps in zip(x.shape[2:], self.stride, self.kernel_size, strict=True):
            sizes.append(max((-(-size // stride) - 1) * stride + taps - size, 0))
        x = functional.pad(x, [side for total in reversed(sizes) for side in (total // 2, total - total // 2)])
        return functional.conv2d(x, self.made(), self.bias, self.stride, 0, self.dilation, self.groups)


class StandardisedLinear(nn.Linear):
    def forward(self, x):
        return functional.linear(x, self.weight - self.weight.mean(1, keepdim=True), self.bias)


class Acting(nn.Module):
    """The same layer in two halves: what makes the weight, and an ordinary layer that has it."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.calls = []

    def forward(self, x):
        seen = {}

        def product(function):
            def run(x, weight, bias, *args):
                with torch.no_grad():
                    zero = torch.zeros_like(function(x, weight, bias, *args))
                stand_in, zero = weight.detach().requires_grad_(), zero.requires_grad_()
                self.calls.append((x.detach(), weight, stand_in, zero))
                return function(x, stand_in, bias, *args) + zero

            return run

        names = ("conv2d", "linear")
        for name in names:
            seen[name] = getattr(functional, name)
            setattr(functional, name, product(seen[name]))
        try:
            return self.layer(x)
        finally:
            for name in names:
                setattr(functional, name, seen[name])

    def correct(self, damping, scale):
        """Corrected for each call, then through what made the weight."""
        biases = []
        for x, weight, stand_in, zero in self.calls:
            layer = self.layer
            if isinstance(layer, ScaledStdConv2dSame):
                plain = nn.Conv2d(layer.in_channels, layer.out_channels, layer.kernel_size, layer.stride)
            elif isinstance(layer, nn.Conv2d):
                plain = nn.Conv2d(layer.in_channels, layer.out_channels, layer.kernel_size, layer.stride, layer.padding)
            else:
                plain = nn.Linear(layer.in_features, layer.out_features)
            X, dZ = reference.input_rows(plain, x)[0], reference.output_rows(plain, zero.grad)[0]
            if layer.bias is not None:
                X = torch.cat([torch.as_tensor(X), torch.ones(len(X), 1, dtype=torch.float64)], dim=1).numpy()
            new = torch.as_tensor(reference.consequential_gradient(X, dZ, damping)) * scale
            features = stand_in[0].numel()
            weight.backward(new[:, :features].reshape(weight.shape), retain_graph=True)
            biases.append(new[:, features:])
        if self.layer.bias is not None:
            self.layer.bias.grad = sum(biases)[:, 0]


LAYERS = {
    "standardised": (lambda: StdConv2d(2, 3, 3, padding=1), (2, 5, 5)),
    "standardised-no-bias": (lambda: StdConv2d(2, 3, 3, stride=2, bias=False), (2, 5, 5)),
    "scaled": (lambda: ScaledStdConv2d(2, 3, 3), (2, 5, 5)),
    "scaled-same": (lambda: ScaledStdConv2dSame(2, 3, 3, stride=2), (2, 5, 6)),
    "linear": (lambda: StandardisedLinear(6, 4), (6,)),
}


@pytest.mark.parametrize("damping", [0.1, ("relative", 0.2)], ids=str)
@pytest.mark.parametrize("samples", [1, 12])
@pytest.mark.parametrize("name", LAYERS)
def test_the_gradient_of_what_acts_is_corrected(name, samples, damping):
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    layer = make().double()
    twin = Acting(copy.deepcopy(layer))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    correction = consequent.attach(optimizer, layer, at="backward", **reference.damping_options(damping))
    x = torch.randn(samples, *shape, dtype=torch.float64)
    half_squares(layer(x)).backward()
    assert list(correction.corrected) == [""]
    half_squares(twin(x)).backward()
    twin.correct(damping, samples)
    for parameter_name, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.grad, twin.layer.get_parameter(parameter_name).grad, msg=parameter_name)


def test_each_call_by_itself():
    """Each makes a weight of its own, whose gradient is corrected with its own inputs."""
    torch.manual_seed(0)
    layer = ScaledStdConv2d(2, 2, 3, padding=1).double()
    twin = Acting(copy.deepcopy(layer))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    consequent.attach(optimizer, layer, at="backward", damping=0.1, loss_reduction="sum")
    x = torch.randn(3, 2, 5, 5, dtype=torch.float64)
    half_squares(layer(torch.tanh(layer(x)))).backward()
    half_squares(twin(torch.tanh(twin(x)))).backward()
    twin.correct(0.1, 1)
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.grad, twin.layer.get_parameter(name).grad, msg=name)


def test_a_weight_made_of_something_else_is_none():
    class Borrowed(nn.Linear):
        def forward(self, x):
            return functional.linear(x, self.other + 0, None)

    torch.manual_seed(0)
    layer = Borrowed(4, 3)
    layer.other = nn.Parameter(torch.randn(3, 4))
    twin = copy.deepcopy(layer)
    model = nn.Sequential(layer, nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    correction = consequent.attach(optimizer, model, at="backward")
    x = torch.randn(5, 4)
    layer(x).square().sum().backward()
    twin(x).square().sum().backward()
    torch.testing.assert_close(layer.other.grad, twin.other.grad)
    assert list(correction.corrected) == ["1"]
