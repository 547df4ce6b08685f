"""Networks of the experiments."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

_Layer = TypeVar("_Layer", nn.Linear, nn.Conv2d)


def mlp(inputs: int, hidden: Sequence[int], outputs: int) -> nn.Sequential:
    """Returns the paper's multi-layer perceptron: ReLU after every layer but the last, Kaiming's initialisation.

    >>> mlp(64, [32], 10)
    Sequential(
      (0): Linear(in_features=64, out_features=32, bias=True)
      (1): ReLU()
      (2): Linear(in_features=32, out_features=10, bias=True)
    )
    """
    modules: list[nn.Module] = []
    for fan_in, fan_out in pairwise([inputs, *hidden, outputs]):
        modules += [_initialised(nn.Linear(fan_in, fan_out)), nn.ReLU()]
    return nn.Sequential(*modules[:-1])


def resnet20(batch_norm: bool) -> nn.Sequential:
    """Returns the ResNet-20 for CIFAR-10 of He et al. (2016), shortcuts without parameters (their option A)."""
    return residual_net((16, 32, 64), blocks=3, batch_norm=batch_norm)


def residual_net(
    widths: Sequence[int], blocks: int, batch_norm: bool = False, channels: int = 3, classes: int = 10
) -> nn.Sequential:
    """Returns a residual network for small images, with so many blocks of two convolutions in each stage.

    Every stage but the first halves the image. Without BatchNorm, convolutions have biases.
    """
    stem = _convolution(channels, widths[0], 1, batch_norm)
    body = [BasicBlock(widths[0], widths[0], 1, batch_norm) for _ in range(blocks)]
    for before, after in pairwise(widths):
        body.append(BasicBlock(before, after, 2, batch_norm))
        body += [BasicBlock(after, after, 1, batch_norm) for _ in range(blocks - 1)]
    head = _initialised(nn.Linear(widths[-1], classes))
    return nn.Sequential(stem, nn.ReLU(), *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)


class BasicBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut that skips pixels and pads channels with zeros."""

    def __init__(self, inputs: int, outputs: int, stride: int, batch_norm: bool) -> None:
        super().__init__()
        self.first = _convolution(inputs, outputs, stride, batch_norm)
        self.second = _convolution(outputs, outputs, 1, batch_norm)
        self.stride = stride
        self.new_channels = outputs - inputs

    def forward(self, images: Tensor) -> Tensor:
        """Returns the sum of both paths, rectified."""
        residual: Tensor = self.second(F.relu(self.first(images)))
        shortcut = images
        if self.stride > 1 or self.new_channels:
            shortcut = F.pad(images[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.new_channels))
        return F.relu(residual + shortcut)


def _convolution(inputs: int, outputs: int, stride: int, batch_norm: bool) -> nn.Module:
    layer = _initialised(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=not batch_norm))
    return nn.Sequential(layer, nn.BatchNorm2d(outputs)) if batch_norm else layer


def _initialised(layer: _Layer) -> _Layer:
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def resnet50(classes: int = 1000) -> nn.Sequential:
    """Returns the ResNet-50 for ImageNet, layer by layer the one of torchvision (stride in the 3×3 convolutions)."""
    modules: list[nn.Module] = [
        _normalised_convolution(3, 64, 7, 2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    channels = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 * 2**stage
        for block in range(blocks):
            modules.append(Bottleneck(channels, width, 2 if block == 0 and stage > 0 else 1))
            channels = 4 * width
    return nn.Sequential(*modules, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions with BatchNorm and a shortcut, which has a convolution where shapes change."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            _normalised_convolution(inputs, width, 1, 1),
            nn.ReLU(inplace=True),
            _normalised_convolution(width, width, 3, stride),
            nn.ReLU(inplace=True),
            _normalised_convolution(width, 4 * width, 1, 1),
        )
        same_shape = stride == 1 and inputs == 4 * width
        self.shortcut = nn.Identity() if same_shape else _normalised_convolution(inputs, 4 * width, 1, stride)

    def forward(self, images: Tensor) -> Tensor:
        """Returns the sum of both paths, rectified."""
        return F.relu(self.path(images) + self.shortcut(images), inplace=True)


def _normalised_convolution(inputs: int, outputs: int, kernel: int, stride: int) -> nn.Sequential:
    layer = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(layer, nn.BatchNorm2d(outputs))


class LanguageModel(nn.Module):
    """A transformer of the shape of GPT-2, by default the small one, without dropout; the head shares its weight."""

    def __init__(
        self, layers: int = 12, width: int = 768, heads: int = 12, context: int = 1024, vocabulary: int = 50257
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*[TransformerBlock(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.ndim == 2:
                ends_a_path = name.endswith("out.weight")
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if ends_a_path else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the logits of each next token."""
        places = torch.arange(tokens.shape[-1], device=tokens.device)
        stream = self.blocks(self.tokens(tokens) + self.positions(places))
        logits: Tensor = self.head(self.norm(stream))
        return logits


class TransformerBlock(nn.Module):
    """Causal self-attention and a perceptron, each behind a LayerNorm and beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.perceptron_norm = nn.LayerNorm(width)
        self.perceptron_in = nn.Linear(width, 4 * width)
        self.perceptron_out = nn.Linear(4 * width, width)

    def forward(self, stream: Tensor) -> Tensor:
        """Returns the stream with what this block adds."""
        projected: Tensor = self.attention_in(self.attention_norm(stream))
        query, key, value = projected.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        stream = stream + self.attention_out(mixed.transpose(1, 2).flatten(2))
        hidden = F.gelu(self.perceptron_in(self.perceptron_norm(stream)), approximate="tanh")
        added: Tensor = self.perceptron_out(hidden)
        return stream + added
