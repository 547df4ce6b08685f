"""Random networks from a seed, with the many ways in which a layer may be called."""

from dataclasses import dataclass

import torch
from torch import nn

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
WIDTHS = [1, 2, 3, 4, 5, 6, 8, 14]
LAYERS = (nn.Linear, *CONVOLUTIONS.values(), *TRANSPOSED.values())

# What is done to a layer's output, mostly in place.
STYLES = {
    "tanh": lambda h, x: torch.tanh(h),
    "relu_": lambda h, x: h.relu_(),
    "mul_": lambda h, x: h.mul_(0.7),
    "mask_": lambda h, x: h.masked_fill_((torch.arange(h.numel()) % 3 == 1).view(h.shape), 0.3),
    "add_": lambda h, x: h.add_(x),
    "bare": lambda h, x: h,
}


class Block(nn.Module):
    """A layer, and how it is called."""

    def __init__(self, layer, **how):
        super().__init__()
        self.layer, self.how = layer, how

    def extra_repr(self):
        return str(self.how)


class Step(Block):
    def forward(self, x):
        return STYLES[self.how["style"]](self.layer(x), x)


class Twice(Block):
    """One layer called twice, and one of its outputs changed in place (or none)."""

    def forward(self, x):
        first = self.layer(x)
        if self.how["in_place"] == "first":
            first = first.relu_()
        second = self.layer(torch.tanh(first) if self.how["chained"] else 0.5 * x)
        if self.how["in_place"] == "second":
            second *= 0.7
        return torch.tanh(first) + second


class Morphing(Block):
    """A convolution whose dilation and padding are changed between two calls."""

    def forward(self, x):
        dims, h, total = len(self.layer.kernel_size), x, 0
        for dilation in (1, 2):
            self.layer.dilation = self.layer.padding = (dilation,) * dims
            z = self.layer(h)
            total, h = total + z, torch.tanh(z) if self.how["chained"] else x
        return total


class Mixing(Block):
    """A layer over the tokens: its inputs lie across memory."""

    def forward(self, x):
        return self.layer(x.transpose(1, 2)).transpose(1, 2)


class PooledHead(Block):
    """The mean over positions, then a layer."""

    def forward(self, x):
        return self.layer(x.flatten(-self.how["dims"]).mean(-1))


class Pair(nn.Module):
    """Two layers one after the other that have one weight, and perhaps one bias."""

    def __init__(self, first, second, with_bias):
        super().__init__()
        self.first, self.second = first, second
        second.weight = first.weight
        if with_bias and first.bias is not None and second.bias is not None:
            second.bias = first.bias

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


class Chain(nn.Module):
    """Blocks one after the other in two parts, which can be called by themselves or be checkpointed."""

    def __init__(self, blocks, cut):
        super().__init__()
        self.first, self.second = nn.Sequential(*blocks[:cut]), nn.Sequential(*blocks[cut:])
        self.checkpoint = None  # a function that calls a part

    def forward(self, x, factor=None):
        return self.decode(self.encode(x if factor is None else x * factor))

    def encode(self, x):
        return self.run(self.first, x)

    def decode(self, h):
        return self.run(self.second, h)

    def often(self, x):
        """A method that calls a part several times for the same samples."""
        return self.decode(sum(self.encode(factor * x) for factor in (1.0, -0.5, 2.0)))

    def one_by_one(self, x):
        for block in (*self.first, *self.second):
            x = block(x)
        return x

    def run(self, part, x):
        return part(x) if self.checkpoint is None else self.checkpoint(part, x)


class Recursive(Chain):
    """A model that calls itself."""

    depth = 2

    def forward(self, x, factor=None, depth=None):
        depth = self.depth if depth is None else depth
        h = self.encode(x if factor is None else x * factor)
        return self(torch.tanh(h), None, depth - 1) if depth > 0 else self.decode(h)


class Marked(Chain):
    """Numbers go in, one per sample; a learned vector goes through a layer without a batch dimension."""

    def __init__(self, blocks, cut, mark):
        super().__init__(blocks, cut)
        self.mark = mark
        self.vector = nn.Parameter(torch.randn(mark.in_features))
        self.row = nn.Parameter(torch.randn(mark.out_features))

    def encode(self, x):
        return super().encode(x.unsqueeze(1) * self.row + torch.tanh(self.mark(self.vector)))


# How samples go through a model. A part may see more of them than the whole.
TASKS = {
    "whole": lambda model, x, y: [model(x)],
    "two calls": lambda model, x, y: [model(x), model(y)],
    "keyword": lambda model, x, y: [model(x=x)],
    "number first": lambda model, x, y: [model(factor=torch.tensor(0.5, dtype=x.dtype), x=x)],
    "parts": lambda model, x, y: [model.decode(model.encode(x))],
    "whole and part": lambda model, x, y: [model(x), model.encode(y)],
    "one by one": lambda model, x, y: [model.one_by_one(x)],
    "often": lambda model, x, y: [model.often(x)],
}


@dataclass
class Net:
    """A network and what may be done with it."""

    model: nn.Module
    shape: list  # of a sample
    sizes: tuple  # batch sizes to choose from; 0 is one sample without a leading dimension
    tasks: tuple = tuple(TASKS)
    kind: str = ""

    def inputs(self, samples, seed):
        shape = [samples, *self.shape] if samples else self.shape
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    def __str__(self):
        frozen = [name for name, p in self.model.named_parameters() if not p.requires_grad]
        return f"{self.kind}, a sample is {self.shape}, frozen: {frozen}\n{self.model}"


def make_net(rng):
    """A network from a ``random.Random``. The global torch seed must have been set."""
    kinds = {
        "vectors": (8, lambda rng: dense(rng, None)),
        "sequences": (8, lambda rng: dense(rng, rng.randint(1, 4))),
        "signals": (8, lambda rng: convolutional(rng, 1)),
        "images": (8, lambda rng: convolutional(rng, 2)),
        "volumes": (1, lambda rng: convolutional(rng, 3)),
        "recursive": (4, recursive),
        "marked": (4, marked),
        "one layer": (2, one_layer),
    }
    kind = rng.choices(list(kinds), weights=[weight for weight, _ in kinds.values()])[0]
    net = kinds[kind][1](rng)
    net.kind, parameters = kind, list(net.model.double().parameters())
    if rng.random() < 0.3:
        for parameter in rng.sample(parameters, min(rng.randint(1, 3), len(parameters) - 1)):
            parameter.requires_grad_(False)
    return net


def linear(rng, inputs, outputs):
    return nn.Linear(inputs, outputs, bias=rng.random() < 0.8)


def twice(rng, layer):
    return Twice(layer, in_place=rng.choice(["first", "second", None]), chained=rng.random() < 0.5)


def dense_block(rng, inputs, outputs, tokens):
    """A block and its number of outputs, which is ``outputs`` unless the block is square."""
    roll = rng.random()
    if roll < 0.6:
        style = rng.choice(list(STYLES))
        outputs = inputs if style == "add_" else outputs
        return Step(linear(rng, inputs, outputs), style=style), outputs
    if roll < 0.72:
        return twice(rng, linear(rng, inputs, inputs)), inputs
    if roll < 0.82:
        return Pair(linear(rng, inputs, inputs), linear(rng, inputs, inputs), rng.random() < 0.5), inputs
    if roll < 0.88:
        return (nn.LayerNorm(inputs) if inputs > 2 else nn.PReLU()), inputs
    if roll < 0.94 and tokens is not None:
        return Mixing(linear(rng, tokens, tokens)), inputs
    return linear(rng, inputs, outputs), outputs


def dense_blocks(rng, inputs, tokens, most=3):
    """Blocks, of which the first and the last have a layer, and where to cut them."""
    blocks, size = (
        [Step(linear(rng, inputs, out := rng.choice(WIDTHS)), style=rng.choice(["tanh", "relu_", "bare"]))],
        out,
    )
    for _ in range(rng.randint(0, most)):
        block, size = dense_block(rng, size, rng.choice(WIDTHS), tokens)
        blocks.append(block)
    blocks.append(linear(rng, size, rng.randint(1, 4)))
    return blocks, rng.randint(1, len(blocks) - 1)


def convolution(rng, dims, inputs, outputs, keeps_size):
    """A convolution with any geometry, at times a transposed one; it keeps the size of images if that is asked for."""
    groups = rng.choice([g for g in (1, 1, 2, 3) if inputs % g == 0 and outputs % g == 0])
    kernel, dilation, stride = ([rng.choice(of) for _ in range(dims)] for of in ((1, 2, 3), (1, 1, 2), (1, 1, 2)))
    options = {"groups": groups, "bias": rng.random() < 0.8}
    if rng.random() < 0.2:
        if keeps_size:
            kernel, stride, dilation = [rng.choice([1, 3]) for _ in range(dims)], [1] * dims, [1] * dims
        padding = [k // 2 if keeps_size else rng.choice([0, 1]) for k in kernel]
        more = [rng.randrange(s) for s in stride]
        return TRANSPOSED[dims](inputs, outputs, kernel, stride, padding, more, dilation=dilation, **options)
    options["padding_mode"] = rng.choice(["zeros", "zeros", "reflect", "replicate", "circular"])
    if keeps_size or rng.random() < 0.3:
        return CONVOLUTIONS[dims](inputs, outputs, kernel, padding="same", dilation=dilation, **options)
    padding = [rng.choice([1, 2]) for _ in range(dims)]
    return CONVOLUTIONS[dims](inputs, outputs, kernel, stride, padding, dilation, **options)


def convolution_block(rng, dims, channels, may_shrink):
    """A block and its number of outputs."""
    roll, bias = rng.random(), rng.random() < 0.8
    if roll < 0.2:
        return Morphing(CONVOLUTIONS[dims](channels, channels, 3, bias=bias), chained=rng.random() < 0.5), channels
    if roll < 0.3:
        strides = (1, rng.choice([1, 2]))
        pair = [CONVOLUTIONS[dims](channels, channels, 3, stride, padding=1, bias=bias) for stride in strides]
        return Pair(*pair, rng.random() < 0.5), channels
    if roll < 0.6:
        layer = convolution(rng, dims, channels, channels, keeps_size=True)
        return (twice(rng, layer) if roll < 0.45 else Step(layer, style="add_")), channels
    outputs, style = rng.choice([2, 3, 4, 6]), rng.choice(["tanh", "relu_", "mask_", "bare"])
    return Step(convolution(rng, dims, channels, outputs, keeps_size=not may_shrink), style=style), outputs


# ---- kinds of networks ----------------------------------------------------------------------------------------------


def dense(rng, tokens):
    inputs = rng.choice(WIDTHS)
    model = Chain(*dense_blocks(rng, inputs, tokens))
    if tokens is None and rng.random() < 0.15:
        return Net(model, [inputs], (0,), ("whole",))
    return Net(model, [inputs] if tokens is None else [tokens, inputs], (1, 2, 3, 5, 8))


def convolutional(rng, dims):
    channels = inputs = rng.choice([1, 2, 4, 6])
    blocks = []
    for place in range(rng.randint(1, 3)):  # the images of later layers might be too small for their padding
        block, channels = convolution_block(rng, dims, channels, may_shrink=place == 0)
        blocks.append(block)
    blocks.append(PooledHead(linear(rng, channels, rng.randint(1, 3)), dims=dims))
    model, shape = Chain(blocks, rng.randint(1, len(blocks) - 1)), [inputs, *(rng.randint(5, 7) for _ in range(dims))]
    if rng.random() < 0.1:
        return Net(model, shape, (0,), ("whole",))
    return Net(model, shape, (1, 2, 3, 4) if dims < 3 else (1, 2))


def recursive(rng):
    inputs = rng.choice(WIDTHS)
    blocks = [Step(linear(rng, inputs, inputs), style=rng.choice(["tanh", "relu_", "add_"])), linear(rng, inputs, 2)]
    return Net(Recursive(blocks, 1), rng.choice([[inputs], [2, inputs]]), (1, 2, 3, 5, 8), tuple(TASKS)[:5])


def marked(rng):
    length, size = rng.choice([2, 3, 5]), rng.choice(WIDTHS)
    model = Marked(*dense_blocks(rng, size, None, most=2), linear(rng, length, size))
    return Net(model, [], (length, length + 1), tuple(TASKS)[:3])


def one_layer(rng):
    if rng.random() < 0.5:
        return Net(linear(rng, 4, 3), [4], (1, 3, 8), tuple(TASKS)[:2])
    return Net(convolution(rng, 2, 2, 4, keeps_size=False), [2, 5, 6], (1, 3), tuple(TASKS)[:2])
