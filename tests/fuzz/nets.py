"""Random networks from a seed, with all the ways in which a layer's call may look odd to someone who watches it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fuzz.sequence_blocks import SequenceBlock, Unrolled, attention_block, recurrent_block
from fuzz.units import JOINTS, units_of

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


# ---- blocks ---------------------------------------------------------------------------------------------------------


class Step(nn.Module):
    """A layer, and what is done to its output: often in place."""

    def __init__(self, layer, style):
        super().__init__()
        self.layer, self.style = layer, style
        self.relu, self.dropout = nn.ReLU(inplace=True), nn.Dropout(0.0, inplace=True)

    def forward(self, x):
        h = self.layer(x)
        if self.style == "tanh":
            return torch.tanh(h)
        if self.style == "relu_":
            return self.relu(h)
        if self.style == "drop_":
            return self.dropout(h)
        if self.style == "mul_":
            return h.mul_(0.7)
        if self.style == "mask_":
            return h.masked_fill_((torch.arange(h.numel()) % 3 == 1).view(h.shape), 0.3)
        if self.style == "add_":
            h += x
            return h
        assert self.style == "bare", self.style
        return h

    def extra_repr(self):
        return self.style


class Twice(nn.Module):
    """One layer called twice, and one of its outputs changed in place (or none)."""

    def __init__(self, layer, in_place, chained):
        super().__init__()
        self.layer, self.in_place, self.chained = layer, in_place, chained

    def forward(self, x):
        first = self.layer(x)
        if self.in_place == "first":
            first = first.relu_()
        second = self.layer(torch.tanh(first) if self.chained else 0.5 * x)
        if self.in_place == "second":
            second *= 0.7
        return torch.tanh(first) + second

    def extra_repr(self):
        return f"in_place={self.in_place}, chained={self.chained}"


class Pair(nn.Module):
    """Two layers one after the other; they may share a weight."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


class Morphing(nn.Module):
    """A convolution whose dilation and padding are changed between two calls."""

    def __init__(self, layer, chained):
        super().__init__()
        self.layer, self.chained, self.dilations = layer, chained, (1, 2)

    def forward(self, x):
        dims = len(self.layer.kernel_size)
        h = x
        total = 0
        for dilation in self.dilations:
            self.layer.dilation = (dilation,) * dims
            self.layer.padding = (dilation,) * dims
            z = self.layer(h)
            total = total + z
            h = torch.tanh(z) if self.chained else x
        return total

    def extra_repr(self):
        return f"chained={self.chained}"


class Mixing(nn.Module):
    """A layer over the tokens: its inputs lie across memory."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x.transpose(1, 2)).transpose(1, 2)


class PooledHead(nn.Module):
    """The mean over positions, then a layer."""

    def __init__(self, layer, dims):
        super().__init__()
        self.layer, self.dims = layer, dims

    def forward(self, x):
        return self.layer(x.flatten(-self.dims).mean(-1))


# ---- models ---------------------------------------------------------------------------------------------------------


class Chain(nn.Module):
    """Blocks one after the other in two parts, which can be called by themselves or be checkpointed."""

    def __init__(self, blocks, cut):
        super().__init__()
        self.first, self.second = nn.Sequential(*blocks[:cut]), nn.Sequential(*blocks[cut:])
        self.checkpoint = None

    def forward(self, x, factor=None):
        x = x if factor is None else x * factor
        return self.decode(self.encode(x))

    def encode(self, x):
        return self.run(self.first, x)

    def decode(self, h):
        return self.run(self.second, h)

    def often(self, x):
        """A method that calls a part several times for the same samples."""
        return self.decode(sum(self.encode(factor * x) for factor in (1.0, -0.5, 0.3, 2.0, 0.7)))

    def one_by_one(self, x):
        for block in (*self.first, *self.second):
            x = block.directly(x) if isinstance(block, SequenceBlock) else block(x)
        return x

    def run(self, part, x):
        if self.checkpoint is None:
            return part(x)
        return checkpoint(part, x, use_reentrant=self.checkpoint == "reentrant")


class Recursive(Chain):
    """A model that calls itself."""

    def __init__(self, blocks, cut, depth):
        super().__init__(blocks, cut)
        self.depth = depth

    def forward(self, x, factor=None, depth=None):
        depth = self.depth if depth is None else depth
        h = self.encode(x if factor is None else x * factor)
        return self(torch.tanh(h), None, depth - 1) if depth > 0 else self.decode(h)


class Marked(Chain):
    """Numbers go in, one per sample; a learned vector goes through a layer without a batch dimension."""

    def __init__(self, blocks, cut, mark, width, length):
        super().__init__(blocks, cut)
        self.mark = mark
        self.vector = nn.Parameter(torch.randn(length))
        self.row = nn.Parameter(torch.randn(width))

    def encode(self, x):
        return super().encode(x.unsqueeze(1) * self.row + torch.tanh(self.mark(self.vector)))


# ---- how samples go through a model ---------------------------------------------------------------------------------


def whole_and_part(model, x, y):
    """The part may see more samples than the whole."""
    return [model(x), model.encode(y)]


TASKS = {
    "whole": lambda model, x, y: [model(x)],
    "keyword": lambda model, x, y: [model(x=x)],
    "number first": lambda model, x, y: [model(factor=torch.tensor(0.5, dtype=x.dtype), x=x)],
    "two calls": lambda model, x, y: [model(x), model(y)],
    "parts": lambda model, x, y: [model.decode(model.encode(x))],
    "often": lambda model, x, y: [model.often(x)],
    "whole and part": whole_and_part,
    "one by one": lambda model, x, y: [model.one_by_one(x)],
}


@dataclass
class Net:
    """A network and what may be done with it."""

    model: nn.Module
    kind: str
    inputs: Callable  # (samples, generator) -> a float64 batch
    sizes: tuple  # batch sizes to choose from
    tasks: tuple
    is_unbatched: bool  # what enters is one sample without a leading dimension
    is_time_first: bool = False  # samples are in its second dimension

    def __str__(self):
        frozen = [name for name, p in self.model.named_parameters() if not p.requires_grad]
        names = {}
        for name, p in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(p, []).append(name)
        shared = [" = ".join(same) for same in names.values() if len(same) > 1]
        notes = [f"frozen: {frozen}"] * bool(frozen) + [f"shared: {shared}"] * bool(shared)
        shape = list(self.inputs(2, torch.Generator()).shape)
        return "\n".join([f"{self.kind}, two samples are {shape}", str(self.model), *notes])


def make_net(rng):
    """A network from a ``random.Random``. The global torch seed must have been set."""
    kind = rng.choices(
        ["vectors", "sequences", "signals", "images", "volumes", "recursive", "marked", "units"],
        weights=[8, 12, 8, 8, 1, 4, 4, 15],
    )[0]
    net = {
        "vectors": vectors,
        "sequences": sequences,
        "signals": lambda rng: convolutional(rng, 1),
        "images": lambda rng: convolutional(rng, 2),
        "volumes": lambda rng: convolutional(rng, 3),
        "recursive": recursive,
        "marked": marked,
        "units": of_units,
    }[kind](rng)
    net.kind = kind
    net.model.double()
    freeze_some(rng, net.model)
    return net


def freeze_some(rng, model):
    if rng.random() < 0.7:
        return
    parameters = list(model.parameters())
    for parameter in rng.sample(parameters, min(rng.randint(1, 2), len(parameters) - 1)):
        parameter.requires_grad_(False)
    if rng.random() < 0.3:
        for parameter in model.first[0].parameters():
            parameter.requires_grad_(False)
    if not any(p.requires_grad for m in layers_of(model) for p in m.parameters(recurse=False)):
        layers_of(model)[-1].requires_grad_(True)


def layers_of(model):
    """Those that are one product, and none that is a part of a module with several."""
    inner = {part for module in model.modules() if isinstance(module, JOINTS) for part in module.children()}
    kinds = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
    return [m for m in model.modules() if isinstance(m, kinds) and m not in inner]


def solved_together(model):
    """The parameters of each layer, and of each unit of a module with several products."""
    layers = [list(layer.parameters()) for layer in layers_of(model)]
    joints = [module for module in model.modules() if isinstance(module, JOINTS)]
    return layers + [list(unit) for module in joints for unit in units_of(module)]


def sees_the_sample(part):
    """Whether the first layer gets what enters the model, and is trained."""
    if not part or any(isinstance(module, PooledHead | Mixing | Unrolled) for module in part[0].modules()):
        return False
    first = solved_together(part[0])[:1]
    return any(p.requires_grad for parameters in first for p in parameters)


def width(rng):
    return rng.choice([1, 2, 3, 4, 5, 6, 8, 14])


def linear(rng, inputs, outputs):
    return nn.Linear(inputs, outputs, bias=rng.random() < 0.8)


def share(rng, first, second):
    """Let the second layer have the weight of the first, and perhaps its bias."""
    second.weight = first.weight
    if first.bias is not None and second.bias is not None and rng.random() < 0.5:
        second.bias = first.bias


def dense_block(rng, inputs, outputs, tokens=None):
    """A block and its number of outputs; ``outputs`` is kept unless the block is square."""
    styles = ["tanh", "relu_", "drop_", "mul_", "mask_", "add_", "bare"]
    roll = rng.random()
    if roll < 0.6:
        style = rng.choice(styles)
        outputs = inputs if style == "add_" else outputs
        return Step(linear(rng, inputs, outputs), style), outputs
    if roll < 0.72:
        return Twice(linear(rng, inputs, inputs), rng.choice(["first", "second", None]), rng.random() < 0.5), inputs
    if roll < 0.82:
        pair = Pair(linear(rng, inputs, inputs), linear(rng, inputs, inputs))
        share(rng, pair.first, pair.second)
        return pair, inputs
    if roll < 0.88:
        return (nn.LayerNorm(inputs) if inputs > 2 else nn.PReLU()), inputs
    if roll < 0.94 and tokens is not None:
        return Mixing(linear(rng, tokens, tokens)), inputs
    return linear(rng, inputs, outputs), outputs


def dense_blocks(rng, inputs, tokens=None, most=3):
    """Blocks, one of which at least has a layer."""
    blocks, size = [Step(linear(rng, inputs, out := width(rng)), rng.choice(["tanh", "relu_", "bare", "drop_"]))], out
    for _ in range(rng.randint(0, most)):
        block, size = dense_block(rng, size, width(rng), tokens)
        blocks.append(block)
    blocks.append(linear(rng, size, rng.randint(1, 4)))
    return blocks


def vectors(rng):
    inputs = width(rng)
    blocks = dense_blocks(rng, inputs)
    is_unbatched = rng.random() < 0.15
    return Net(
        Chain(blocks, rng.randint(1, len(blocks) - 1)),
        "",
        lambda n, generator: draw(generator, inputs) if is_unbatched else draw(generator, n, inputs),
        (1, 2, 3, 5, 8, 13),
        ("whole",) if is_unbatched else tuple(TASKS),
        is_unbatched,
    )


def sequences(rng):
    inputs, tokens = width(rng), rng.randint(1, 4)
    blocks = dense_blocks(rng, inputs, tokens)
    return Net(
        Chain(blocks, rng.randint(1, len(blocks) - 1)),
        "",
        lambda n, generator: draw(generator, n, tokens, inputs),
        (1, 2, 3, 5, 7),
        tuple(TASKS),
        False,
    )


def convolution(rng, dims, inputs, outputs, keeps_size):
    """A convolution with any geometry; one that keeps the size of its input if that is asked for."""
    groups = rng.choice([g for g in (1, 1, 2, 3) if inputs % g == 0 and outputs % g == 0])
    mode = rng.choice(["zeros", "zeros", "reflect", "replicate", "circular"])
    kernel = tuple(rng.choice([1, 2, 3]) for _ in range(dims))
    dilation = tuple(rng.choice([1, 1, 2]) for _ in range(dims))
    options = {"groups": groups, "padding_mode": mode, "bias": rng.random() < 0.8}
    if keeps_size or rng.random() < 0.3:
        return CONVOLUTIONS[dims](inputs, outputs, kernel, padding="same", dilation=dilation, **options)
    stride = tuple(rng.choice([1, 1, 2]) for _ in range(dims))
    padding = tuple(rng.choice([1, 2]) for _ in range(dims))
    return CONVOLUTIONS[dims](inputs, outputs, kernel, padding=padding, stride=stride, dilation=dilation, **options)


def convolutional(rng, dims):
    channels = inputs = rng.choice([1, 2, 4, 6])
    blocks = []
    for place in range(rng.randint(1, 3)):
        outputs = rng.choice([2, 3, 4, 6])
        roll = rng.random()
        if roll < 0.2:
            layer = CONVOLUTIONS[dims](channels, channels, 3, padding=1, bias=rng.random() < 0.8)
            blocks.append(Morphing(layer, rng.random() < 0.5))
        elif roll < 0.35:
            layer = convolution(rng, dims, channels, channels, keeps_size=True)
            blocks.append(Twice(layer, rng.choice(["first", "second", None]), rng.random() < 0.5))
        elif roll < 0.45:
            options = {"padding": 1, "bias": rng.random() < 0.8}
            pair = Pair(
                CONVOLUTIONS[dims](channels, channels, 3, **options),
                CONVOLUTIONS[dims](channels, channels, 3, stride=rng.choice([1, 2]), **options),
            )
            share(rng, pair.first, pair.second)
            blocks.append(pair)
        elif roll < 0.6:
            blocks.append(Step(convolution(rng, dims, channels, channels, keeps_size=True), "add_"))
        else:
            style = rng.choice(["tanh", "relu_", "drop_", "mask_", "bare"])
            # Only the first layer may shrink an image: the others' images might be too small for their padding.
            blocks.append(Step(convolution(rng, dims, channels, outputs, keeps_size=place > 0), style))
            channels = outputs
    blocks.append(PooledHead(linear(rng, channels, rng.randint(1, 3)), dims))
    is_unbatched = rng.random() < 0.1
    size = [rng.randint(5, 7) for _ in range(dims)]
    return Net(
        Chain(blocks, rng.randint(1, len(blocks) - 1)),
        "",
        lambda n, generator: draw(generator, *([] if is_unbatched else [n]), inputs, *size),
        (1, 2, 3, 4) if dims < 3 else (1, 2),
        ("whole",) if is_unbatched else tuple(TASKS),
        is_unbatched,
    )


def recursive(rng):
    inputs = width(rng)
    tokens = rng.choice([None, None, 2, 3])
    blocks = [Step(linear(rng, inputs, inputs), rng.choice(["tanh", "relu_", "add_"])), linear(rng, inputs, 2)]
    shape = [inputs] if tokens is None else [tokens, inputs]
    return Net(
        Recursive(blocks, 1, rng.randint(1, 3)),
        "",
        lambda n, generator: draw(generator, n, *shape),
        (1, 2, 3, 5, 8),
        ("whole", "keyword", "number first", "two calls", "parts"),
        False,
    )


def marked(rng):
    length, size = rng.choice([2, 3, 5]), width(rng)
    blocks = dense_blocks(rng, size, most=2)
    model = Marked(blocks, rng.randint(1, len(blocks) - 1), linear(rng, length, size), size, length)
    return Net(
        model,
        "",
        lambda n, generator: draw(generator, n),
        (length, length, length + 1),
        ("whole", "keyword", "two calls"),
        False,
    )


def of_units(rng):
    """Recurrent layers and attention between dense ones."""
    inputs = size = width(rng)
    tokens = rng.randint(1, 4)
    is_unbatched, is_time_first = rng.choices([(False, False), (True, False), (False, True)], weights=[8, 1, 1])[0]
    blocks = []
    for place in range(rng.randint(1, 3)):
        roll = rng.random()
        if roll < 0.5:
            block, size = recurrent_block(
                rng, size, rng.choice([1, 2, 3, 4]), may_be_cell=place > 0 or not is_time_first
            )
        elif roll < 0.8 or place == 0:
            block = attention_block(rng, size)
        else:
            block, size = dense_block(rng, size, width(rng))
        if isinstance(block, SequenceBlock):
            block.is_time_first = is_time_first
            if is_time_first and place == 0:
                block.layer.batch_first = False
                block.packed = None
            elif rng.random() < 0.2 and block_keeps_size(block, size):
                block = Twice(block, rng.choice(["second", None]), rng.random() < 0.5)
        blocks.append(block)
    blocks.append(linear(rng, size, rng.randint(1, 3)))
    shape = [tokens, inputs]
    tasks = ("whole",) if is_unbatched else ("whole", "keyword", "two calls") if is_time_first else tuple(TASKS)

    def batch(n, generator):
        x = draw(generator, *([] if is_unbatched else [n]), *shape)
        return x.transpose(0, 1).contiguous() if is_time_first else x

    return Net(
        Chain(blocks, rng.randint(1, len(blocks) - 1)), "", batch, (1, 2, 3, 5), tasks, is_unbatched, is_time_first
    )


def block_keeps_size(block, size):
    """Whether what comes out of it can go into it."""
    layer = block.layer
    return isinstance(layer, nn.MultiheadAttention) or layer.input_size == size


def draw(generator, *shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)
