"""A kind of layer is one class and a line in ``KINDS``: both mechanisms, compilation and listing follow from it."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

import consequent
from consequent.layers import KINDS, Operation


class Scale(nn.Module):
    """``z[n, c] = w[c] x[n, c]``: each channel is a product of its own with one feature."""

    def __init__(self, channels):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(channels))

    def forward(self, inputs):
        return inputs * self.weight


@dataclass(frozen=True)
class ScaleKind(Operation):
    module_types = (Scale,)

    @classmethod
    def of(cls, layer):
        channels = len(layer.weight)
        return cls(groups=channels, features=1, outputs=channels, weight_shape=(channels,))

    def accepts(self, inputs):
        return inputs.ndim > 1 and inputs.shape[-1] == self.groups

    def apply(self, inputs, weight, bias):
        return inputs * weight

    def input_gradient(self, output_grad, weight, inputs):
        return output_grad * weight

    def input_rows(self, inputs):
        return inputs.reshape(-1, self.groups).T[..., None]

    def output_rows(self, outputs):
        return outputs.reshape(-1, self.groups).T[..., None]


@pytest.fixture(autouse=True)
def _registered():
    KINDS.append(ScaleKind)
    yield
    KINDS.remove(ScaleKind)


@pytest.mark.parametrize("rows", [(6,), (4, 3)], ids=str)
@pytest.mark.parametrize("averaging", [0.0, 0.95])
def test_it_is_corrected(averaging, rows):
    torch.manual_seed(0)
    model = nn.Sequential(Scale(5), nn.Linear(5, 2)).double()
    x = torch.randn(*rows, 5, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    correction = consequent.attach(optimizer, model, 0.5, averaging=averaging, bound=None, loss_reduction="sum")
    assert list(correction.corrected) == ["0", "1"]
    model(x).square().sum().backward()
    optimizer.step()
    grad = model[0].weight.grad.clone()

    plain = nn.Sequential(Scale(5), nn.Linear(5, 2)).double()
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            p.add_(0.1 * q.grad)  # back to where it was
    plain(x).square().sum().backward()
    torch.testing.assert_close(grad, plain[0].weight.grad / (x.square().flatten(0, -2).sum(0) + 0.5))


def test_it_compiles():
    torch.manual_seed(0)
    model, x = nn.Sequential(Scale(5), nn.Linear(5, 2)), torch.randn(6, 5)
    consequent.attach(torch.optim.Adam(model.parameters()), model)
    model(x).square().mean().backward()
    eager = model[0].weight.grad.clone()
    model.zero_grad()
    torch.compile(model, backend="aot_eager", fullgraph=True)(x).square().mean().backward()
    torch.testing.assert_close(model[0].weight.grad, eager)
