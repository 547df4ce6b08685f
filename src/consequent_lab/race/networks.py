"""Networks over coordinates: SIREN, and ReLU behind Fourier features."""

import math
from itertools import pairwise

import torch
from torch import Tensor, nn

from consequent_lab.models import mlp

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
