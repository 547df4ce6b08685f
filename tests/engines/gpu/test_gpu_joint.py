"""On a GPU: recurrent layers and attention give the numbers of a CPU in float64."""

import pytest
import torch
from gpu.test_gpu import full_precision  # noqa: F401
from torch import nn

import consequent

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk"),
]


class Model(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.readout = inner, nn.LazyLinear(3)

    def forward(self, x):
        outputs = self.inner(x, x, x) if isinstance(self.inner, nn.MultiheadAttention) else self.inner(x)
        return self.readout(outputs[0])


INNER = {
    "lstm": lambda: nn.LSTM(8, 16, batch_first=True),
    "lstm-stacked": lambda: nn.LSTM(8, 16, num_layers=2, bidirectional=True, batch_first=True),
    "lstm-projected": lambda: nn.LSTM(8, 16, proj_size=5, batch_first=True),
    "gru": lambda: nn.GRU(8, 16, batch_first=True),
    "rnn": lambda: nn.RNN(8, 16, batch_first=True),
    "attention": lambda: nn.MultiheadAttention(8, 2, batch_first=True),
}


def gradients(name, shape, device, dtype, **options):
    torch.manual_seed(0)
    model = Model(INNER[name]())
    x = torch.randn(*shape, 8)
    model(x)
    model, x = model.to(device, dtype), x.to(device, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    correction = consequent.attach(optimizer, model, loss_reduction="sum", **options)
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    assert correction.plain == {}
    assert correction.counters.skipped == 0
    return {name: p.grad.double().cpu() for name, p in model.named_parameters()}


@pytest.mark.parametrize("at", ["step", "backward"])
@pytest.mark.parametrize("shape", [(2, 3), (16, 20)], ids=["few-rows", "many-rows"])
@pytest.mark.parametrize("name", INNER)
def test_as_on_a_cpu(name, shape, at):
    expected = gradients(name, shape, "cpu", torch.float64, at=at)
    actual = gradients(name, shape, "cuda", torch.float32, at=at)
    for parameter, grad in actual.items():
        error = (grad - expected[parameter]).norm() / expected[parameter].norm().clamp(min=1e-12)
        assert error < 1e-2, parameter
