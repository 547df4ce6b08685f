"""Modules as they occur in timm and torchvision, small look-alikes of them: each layer is corrected, or listed with
the reason, and where it is corrected the gradients are those of the reference.
"""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import consequent
from models.expected import check_training, half_squares


class StandardisedConv2d(nn.Conv2d):
    """The weight of BiT's and NFNet's convolutions is standardised in the forward pass (timm: StdConv2d)."""

    def forward(self, x):
        weight = F.batch_norm(self.weight.reshape(1, self.out_channels, -1), None, None, training=True, eps=1e-6)
        return F.conv2d(x, weight.reshape_as(self.weight), self.bias, self.stride, self.padding, self.dilation)


class SamePaddedConv2d(nn.Conv2d):
    """TensorFlow's padding depends on the image's size when there is a stride (timm: Conv2dSame)."""

    def forward(self, x):
        return F.conv2d(same_padded(x, self), self.weight, self.bias, self.stride, 0, self.dilation, self.groups)


class PaddedOutside(nn.Sequential):
    """The images are padded before an ordinary first convolution."""

    def forward(self, x):
        return super().forward(same_padded(x, self[0]))


def same_padded(x, convolution):
    geometry = (convolution.kernel_size, convolution.stride, convolution.dilation)
    total = [
        max((-(-size // s) - 1) * s + (k - 1) * d + 1 - size, 0)
        for size, k, s, d in zip(x.shape[-2:], *geometry, strict=True)
    ]
    sides = [side for t in reversed(total) for side in (t // 2, t - t // 2)]
    return F.pad(x, sides)


class SqueezeExcite(nn.Module):
    """The channels' means decide on the channels' weights (torchvision: SqueezeExcitation, with 1×1 convolutions)."""

    def __init__(self, channels, squeezed):
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(channels, squeezed, 1), nn.Conv2d(squeezed, channels, 1)

    def forward(self, x):
        return x * self.expand(F.silu(self.reduce(x.mean((2, 3), keepdim=True)))).sigmoid()


class StochasticDepth(nn.Module):
    """A sample goes around the block now and then (timm: DropPath)."""

    def __init__(self, rate=0.4):
        super().__init__()
        self.rate = rate

    def forward(self, x):
        if not self.training:
            return x
        keeps = torch.rand(len(x), *[1] * (x.ndim - 1), dtype=x.dtype) >= self.rate
        return x * keeps / (1 - self.rate)


class LayerScale(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.gamma = nn.Parameter(torch.full((channels,), 0.3))

    def forward(self, x):
        return x * self.gamma


class InvertedResidual(nn.Module):
    """MobileNet and EfficientNet: widen, depthwise, squeeze-excite, narrow; without bias, with BatchNorm."""

    def __init__(self, channels=3, wide=6):
        super().__init__()
        self.widen, self.norm1 = nn.Conv2d(channels, wide, 1, bias=False), nn.BatchNorm2d(wide)
        self.depthwise = nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False)
        self.squeeze_excite = SqueezeExcite(wide, 2)
        self.narrow, self.norm2 = nn.Conv2d(wide, channels, 1, bias=False), nn.BatchNorm2d(channels)
        self.drop = StochasticDepth()

    def forward(self, x):
        z = F.silu(self.norm1(self.widen(x)), inplace=True)
        return x + self.drop(self.norm2(self.narrow(self.squeeze_excite(F.silu(self.depthwise(z), inplace=True)))))


class ResNeXtBlock(nn.Module):
    """Grouped convolutions between 1×1 ones, and a strided shortcut."""

    def __init__(self, channels=3, wide=6, groups=2):
        super().__init__()
        self.conv1, self.conv3 = nn.Conv2d(channels, wide, 1), nn.Conv2d(wide, wide, 1)
        self.conv2 = nn.Conv2d(wide, wide, 3, stride=2, padding=1, groups=groups)
        self.shortcut = nn.Conv2d(channels, wide, 1, stride=2)

    def forward(self, x):
        return (self.conv3(self.conv2(self.conv1(x).relu_()).relu_()) + self.shortcut(x)).relu()


class ConvNeXtBlock(nn.Module):
    """Depthwise 7×7, then dense layers on channels-last tensors, a LayerScale held by the block itself."""

    def __init__(self, channels=3):
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.mlp = nn.Sequential(nn.Linear(channels, 2 * channels), nn.GELU(), nn.Linear(2 * channels, channels))
        self.gamma = nn.Parameter(torch.full((channels,), 0.3))
        self.drop = StochasticDepth()

    def forward(self, x):
        z = self.gamma * self.mlp(self.norm(self.depthwise(x).permute(0, 2, 3, 1)))
        return x + self.drop(z.permute(0, 3, 1, 2))


class Attention(nn.Module):
    """Queries, keys and values from one layer (timm's and torchvision's fused QKV)."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        queries, keys, values = self.qkv(x).unflatten(-1, (3, self.heads, -1)).movedim(-3, 0).movedim(-2, 2)
        attended = F.scaled_dot_product_attention(queries, keys, values)
        return self.project(attended.transpose(1, 2).flatten(2))


class VisionTransformer(nn.Module):
    """Patches, a class token, positions, one block with LayerScale and stochastic depth, a gated MLP."""

    def __init__(self, width=6, patches=4):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 3, stride=3)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, patches + 1, width))
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, 2)
        self.norm2, self.gated, self.out = nn.LayerNorm(width), nn.Linear(width, 8), nn.Linear(4, width)
        self.scale1, self.scale2 = LayerScale(width), LayerScale(width)
        self.drop = StochasticDepth()
        self.head = nn.Linear(width, 2)

    def forward(self, x):
        tokens = self.patches(x).flatten(2).mT
        z = torch.cat([self.token.expand(len(x), -1, -1), tokens], dim=1) + self.positions
        z = z + self.drop(self.scale1(self.attention(self.norm1(z))))
        gate, value = self.gated(self.norm2(z)).chunk(2, dim=-1)
        z = z + self.drop(self.scale2(self.out(F.silu(gate) * value)))
        return self.head(z[:, 0])


class WindowAttention(nn.Module):
    """Swin: a window is a sample for the attention, and none for the mean of the loss."""

    def __init__(self, channels=4):
        super().__init__()
        self.attention, self.head = Attention(channels, 2), nn.Linear(channels, 2)

    def forward(self, x):
        windows = x.unflatten(2, (2, 3)).unflatten(4, (2, 3)).permute(0, 2, 4, 3, 5, 1)  # [N, 2, 2, 3, 3, C]
        attended = self.attention(windows.flatten(3, 4).flatten(0, 2))
        return self.head(attended.mean(1).unflatten(0, (len(x), -1)).mean(1))


class TiedLanguageModel(nn.Module):
    """The readout is the embedding."""

    def __init__(self, words=7, width=4):
        super().__init__()
        self.embedding, self.hidden = nn.Embedding(words, width), nn.Linear(width, width)
        self.readout = nn.Linear(width, words, bias=False)
        self.readout.weight = self.embedding.weight

    def forward(self, tokens):
        return self.readout(torch.tanh(self.hidden(self.embedding(tokens))))


def images(samples=4, channels=3, side=6):
    return torch.randn(samples, channels, side, side, dtype=torch.float64)


def train(model, x, corrected):
    """The same samples go around a block each time."""

    def loss(m):
        torch.manual_seed(2)  # of four samples one goes around the first block
        return half_squares(m(x))

    return check_training(model.double(), loss, len(x), corrected=corrected)


# name: (model, inputs, what is corrected, what is plain)
ZOO = {
    "inverted-residual": (
        InvertedResidual,
        images,
        ["widen", "depthwise", "squeeze_excite.reduce", "squeeze_excite.expand", "narrow"],
        ["norm1", "norm2"],
    ),
    "resnext": (ResNeXtBlock, images, ["conv1", "conv3", "conv2", "shortcut"], []),
    "convnext": (ConvNeXtBlock, images, ["depthwise", "mlp.0", "mlp.2"], ["", "norm"]),
    "vit": (
        VisionTransformer,
        images,
        ["patches", "attention.qkv", "attention.project", "gated", "out", "head"],
        ["", "norm1", "norm2", "scale1", "scale2"],
    ),
    "swin": (WindowAttention, lambda: images(channels=4), ["attention.qkv", "attention.project", "head"], []),
    "tied": (TiedLanguageModel, lambda: torch.randint(0, 7, (3, 5)), ["hidden"], ["embedding", "readout"]),
    "same-padding": (
        lambda: nn.Sequential(nn.Conv2d(3, 2, 4, padding="same"), nn.Tanh(), nn.Conv2d(2, 2, 3, padding="same")),
        images,
        ["0", "2"],
        [],
    ),
}


@pytest.mark.parametrize("name", ZOO)
def test_gradients_are_those_of_the_reference(name):
    torch.manual_seed(0)
    make, inputs, corrected, plain = ZOO[name]
    correction = train(make(), inputs(), corrected)
    assert list(correction.corrected) == corrected
    assert sorted(correction.plain) == sorted(plain)
    assert all(correction.plain.values())


def test_a_convolution_with_standardised_weights_is_listed():
    """It multiplies with another weight than its own: plain, told once, and the rest is corrected."""
    torch.manual_seed(0)
    model = nn.Sequential(StandardisedConv2d(3, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.LazyLinear(2))
    model(images().float())
    model = model.double()
    with pytest.warns(consequent.ConsequentWarning, match="'0' keeps its plain gradient"):
        correction = train(model, images(), ["3"])
    assert list(correction.corrected) == ["3"]
    assert correction.plain["0"] == "its forward does not multiply inputs with its weight as it is"


@pytest.mark.parametrize(("kernel_size", "stride"), [(3, 2), (2, 2), (4, 1)])
@pytest.mark.parametrize("at", ["step", "backward"])
def test_a_same_padded_convolution_is_corrected(kernel_size, stride, at):
    """It pads by itself, then convolves with its own weight: the padded images are the inputs."""
    torch.manual_seed(0)
    own = nn.Sequential(SamePaddedConv2d(3, 2, kernel_size, stride=stride), nn.Tanh(), nn.Conv2d(2, 2, 3)).double()
    twin = PaddedOutside(nn.Conv2d(3, 2, kernel_size, stride=stride), nn.Tanh(), nn.Conv2d(2, 2, 3)).double()
    twin.load_state_dict(own.state_dict())
    x = images()
    correction = check_training(own, lambda m: half_squares(m(x)), len(x), twin=twin, at=at)
    assert list(correction.corrected) == ["0", "2"]
