"""Networks of the race: over coordinates (SIREN, ReLU behind Fourier features), and residual ones."""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from consequent_lab.models import BasicBlock, mlp, residual_net

FREQUENCY = 30.0  # ω₀ in SIREN


class Sine(nn.Module):
    """`sin(ω₀ z)`."""

    def forward(self, values: Tensor) -> Tensor:
        """Returns the sine, element by element."""
        return torch.sin(FREQUENCY * values)


def siren(inputs: int, hidden: tuple[int, ...], outputs: int) -> nn.Sequential:
    """Returns hidden layers `sin(ω₀ (W x + b))` with the first weights of Sitzmann et al. (2020)."""
    modules: list[nn.Module] = []
    for number, (fan_in, fan_out) in enumerate(pairwise([inputs, *hidden, outputs])):
        layer = nn.Linear(fan_in, fan_out)
        bound = 1 / fan_in if number == 0 else math.sqrt(6 / fan_in) / FREQUENCY
        nn.init.uniform_(layer.weight, -bound, bound)
        modules += [layer, Sine()]
    return nn.Sequential(*modules[:-1])


class FourierFeatures(nn.Module):
    """Sines and cosines of random waves (Tancik et al., 2020), which are not trained."""

    def __init__(self, inputs: int, waves: int, deviation: float = 10.0) -> None:
        super().__init__()
        self.waves: Tensor
        self.register_buffer("waves", 2 * math.pi * deviation * torch.randn(inputs, waves))

    def forward(self, places: Tensor) -> Tensor:
        """Returns `[N, 2 waves]` for places `[N, inputs]`."""
        phases = places @ self.waves
        return torch.cat([phases.sin(), phases.cos()], 1)


def fourier(inputs: int, hidden: tuple[int, ...], outputs: int) -> nn.Sequential:
    """Returns a ReLU network on as many Fourier features as its first hidden layer is wide."""
    return nn.Sequential(FourierFeatures(inputs, hidden[0] // 2), *mlp(hidden[0], hidden, outputs))


def residual(widths: Sequence[int], blocks: int, batch_norm: bool) -> nn.Sequential:
    """Returns a residual network for small images; without BatchNorm its blocks nearly begin as their shortcuts.

    The last convolution of a block then begins with a tenth of the usual weights. With zeros, as is common, the
    channels that a block adds would be dead: its shortcut has zeros there, too, and a ReLU at zero lets no gradient
    through.
    """
    model = residual_net(widths, blocks, batch_norm=batch_norm)
    for block in model.modules():
        if isinstance(block, BasicBlock) and not batch_norm:
            block.second.weight.data.mul_(0.1)  # type: ignore[operator]
    return model


class InBfloat16(nn.Module):
    """A network whose products are computed in bfloat16 on a GPU, as such networks are trained; outputs are float32."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns the outputs in float32."""
        with torch.autocast("cuda", torch.bfloat16, enabled=inputs.is_cuda):
            outputs: Tensor = self.network(inputs)
        return outputs.float()
