"""Recurrent layers, their cells and attention as blocks ``[samples, tokens, in] -> [samples, tokens, out]``.

A block may also be given one sample without a leading dimension. ``directly`` calls the layer without the block around
it, so that the layer itself is what samples enter.
"""

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

CELLS = {nn.LSTM: nn.LSTMCell, nn.GRU: nn.GRUCell, nn.RNN: nn.RNNCell}


class SequenceBlock(nn.Module):
    """What all of them have."""

    is_time_first = False  # whether samples are in the second dimension of what it gets

    def forward(self, x):
        return self.directly(x)


class Recurrent(SequenceBlock):
    """``nn.LSTM`` and its like."""

    def __init__(self, layer, state, packed, uses_last):
        """The state to begin with is none, a learned one, or made of the data."""
        super().__init__()
        self.layer, self.state, self.packed, self.uses_last = layer, state, packed, uses_last
        if state == "learned":
            self.first = nn.ParameterList(nn.Parameter(0.5 * torch.randn(shape)) for shape in state_shapes(layer))

    def directly(self, x):
        is_moved = x.ndim == 3 and self.layer.batch_first == self.is_time_first
        x = x.transpose(0, 1) if is_moved else x
        state = self.first_state(x)
        if self.packed is not None and x.ndim == 3:
            h, last = self.layer(self.pack(x), state)
            length = x.shape[1 if self.layer.batch_first else 0]
            h, _ = pad_packed_sequence(h, batch_first=self.layer.batch_first, total_length=length)
        else:
            h, last = self.layer(x, state)
        for one in (last if isinstance(last, tuple) else (last,)) if self.uses_last else ():
            h = h + one.sum()
        return h.transpose(0, 1) if is_moved else h

    def first_state(self, x):
        """None, or ``[layers · directions, samples, size]``, of an LSTM a pair."""
        if self.state is None:
            return None
        samples = [] if x.ndim == 2 else [x.shape[0 if self.layer.batch_first else 1]]
        found = []
        for place, (number, size) in enumerate(state_shapes(self.layer)):
            of_data = torch.tanh(x.mean() * torch.linspace(-1, 2, number * size, dtype=x.dtype).view(number, size))
            one = self.first[place] if self.state == "learned" else of_data
            found.append(one[:, None].expand(number, *samples, size) if samples else one)
        return tuple(found) if len(found) > 1 else found[0]

    def pack(self, x):
        samples, tokens = x.shape[:2] if self.layer.batch_first else x.shape[1::-1]
        lengths = [(2 * number + 1) % tokens + 1 for number in range(samples)]
        if self.packed == "sorted":
            lengths.sort(reverse=True)
        return pack_padded_sequence(x, lengths, self.layer.batch_first, enforce_sorted=self.packed == "sorted")

    def extra_repr(self):
        return f"state={self.state}, packed={self.packed}, uses_last={self.uses_last}"


def state_shapes(layer):
    """Of h, and of the c of an LSTM, without samples."""
    number = layer.num_layers * (1 + layer.bidirectional)
    sizes = [layer.proj_size or layer.hidden_size, layer.hidden_size]
    return [(number, size) for size in sizes[: 1 + isinstance(layer, nn.LSTM)]]


class Unrolled(SequenceBlock):
    """A cell that is called for one token after the other."""

    def __init__(self, layer, cut, only_last):
        super().__init__()
        self.layer = layer
        self.cut = cut  # whether gradients do not go further back than half of the tokens
        self.only_last = only_last  # whether all outputs are the last one

    def directly(self, x):
        state, outputs = None, []
        time = 0 if self.is_time_first else -2
        tokens = x.unbind(time)
        for place, token in enumerate(tokens):
            if self.cut and state is not None and place == len(tokens) // 2:
                state = tuple(one.detach() for one in state) if isinstance(state, tuple) else state.detach()
            state = self.layer(token, state)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(outputs[-1:] * len(outputs) if self.only_last else outputs, dim=time)

    def extra_repr(self):
        return f"cut={self.cut}, only_last={self.only_last}"


class Attend(SequenceBlock):
    """``nn.MultiheadAttention``."""

    def __init__(self, layer, of, is_causal, weights):
        """The queries attend to themselves, to a memory, or to one whose values are others again."""
        super().__init__()
        self.layer, self.of, self.is_causal, self.weights = layer, of, is_causal, weights

    def directly(self, x):
        is_moved = x.ndim == 3 and self.layer.batch_first == self.is_time_first
        x = x.transpose(0, 1) if is_moved else x
        key = value = x
        if self.of != "self":
            key = self.memory(x, self.layer.kdim, 1.0)
            value = key if self.of == "memory" else self.memory(x, self.layer.vdim, -0.7)
        tokens = x.shape[-2 if self.layer.batch_first or x.ndim == 2 else 0]
        mask = torch.ones(tokens, tokens).triu(1).bool() if self.is_causal else None
        h, weights = self.layer(x, key, value, need_weights=self.weights is not None, attn_mask=mask)
        h = h.transpose(0, 1) if is_moved else h
        return h + weights.square().sum() if self.weights == "used" else h

    @staticmethod
    def memory(x, width, factor):
        return torch.sin(factor * x.mean(-1, keepdim=True) + torch.arange(width, dtype=x.dtype))

    def extra_repr(self):
        return f"of={self.of}, is_causal={self.is_causal}, weights={self.weights}"


def recurrent_block(rng, inputs, outputs, may_be_cell):
    """A block and how many outputs it has."""
    kind = rng.choice(list(CELLS))
    if may_be_cell and rng.random() < 0.3:
        cell = CELLS[kind](inputs, outputs, bias=rng.random() < 0.8)
        return Unrolled(cell, rng.random() < 0.3, rng.random() < 0.3), outputs
    options = {"nonlinearity": rng.choice(["tanh", "relu"])} if kind is nn.RNN else {}
    if kind is nn.LSTM and outputs > 1 and rng.random() < 0.3:
        options["proj_size"] = rng.randint(1, outputs - 1)
    both_ways = rng.random() < 0.3
    layer = kind(
        inputs,
        outputs,
        num_layers=rng.choice([1, 1, 2, 3]),
        bias=rng.random() < 0.8,
        batch_first=rng.random() < 0.5,
        bidirectional=both_ways,
        **options,
    )
    block = Recurrent(
        layer,
        rng.choice([None, None, "learned", "data"]),
        rng.choice([None, None, None, "sorted", "unsorted"]),
        rng.random() < 0.2,
    )
    return block, options.get("proj_size", outputs) * (1 + both_ways)


def attention_block(rng, size):
    """A block with as many outputs as inputs."""
    of = rng.choice(["self", "self", "memory", "others"])
    options = {}
    if of != "self" and rng.random() < 0.5:
        options = {"kdim": rng.randint(1, 5)}
        options["vdim"] = options["kdim"] if of == "memory" else rng.randint(1, 5)
    layer = nn.MultiheadAttention(
        size,
        rng.choice([heads for heads in range(1, size + 1) if size % heads == 0]),
        bias=rng.random() < 0.8,
        add_bias_kv=rng.random() < 0.2,
        add_zero_attn=rng.random() < 0.2,
        batch_first=rng.random() < 0.5,
        **options,
    )
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))  # biases are 0 at first
    return Attend(layer, of, rng.random() < 0.3, rng.choice([None, "given", "used"]))
