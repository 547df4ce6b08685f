"""Modules with several products inside, for the reference: their calls as loops, with a zero added to every product."""

from dataclasses import dataclass

import torch
from attention_reference import Naive
from recurrent_reference import Loops
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

JOINTS = (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)


def units_of(module):
    """The parameters that are solved for together, of each unit; those that stay plain are in none."""
    if isinstance(module, nn.MultiheadAttention):
        names = ["in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias"]
        units = [[getattr(module, name) for name in names], [module.out_proj.weight, module.out_proj.bias]]
    else:
        units = [
            [unit.w_ih, unit.w_hh, unit.b_ih, unit.b_hh] for directions in Loops(module).units for unit in directions
        ]
    return [tuple(p for p in unit if p is not None) for unit in units]


@dataclass(eq=False)
class Part:
    """One product: which rows of which parameters met what."""

    weights: list  # (parameter, its rows), side by side
    X: list  # for each of them, ``[rows, features]``
    biases: list  # (parameter, its rows), of which only the sum acts
    probes: list  # zeros that were added to what came out


@dataclass(eq=False)
class UnitCall:
    """What a call of a module was for one of its units."""

    parameters: tuple
    parts: list
    entry: object
    output_grads: list | None = None  # a matrix per part, of all backward passes that are in .grad

    @property
    def key(self):
        """Calls with the same are solved for together."""
        return self.parameters[0]

    @property
    def probes(self):
        return [probe for part in self.parts for probe in part.probes]

    def rows(self, grads):
        """The gradients of the probes as one matrix per part."""
        found = []
        for part in self.parts:
            mine, grads = grads[: len(part.probes)], grads[len(part.probes) :]
            found.append(torch.cat([grad.reshape(-1, grad.shape[-1]) for grad in mine]))
        return found


def call_of_units(module, args, kwargs):
    """What the module's forward computes, and for each of its units its parameters and parts."""
    if isinstance(module, nn.MultiheadAttention):
        return attention(module, *args, **kwargs)
    return cell(module, *args) if isinstance(module, nn.RNNCellBase) else recurrent(module, *args)


def attention(module, query, key, value, need_weights=True, attn_mask=None):
    streams = [x[None] if x.ndim == 2 else x if module.batch_first else x.transpose(0, 1) for x in (query, key, value)]
    naive = Naive(module)
    outputs = naive(*streams, attn_mask)
    weights = naive.weights
    if query.ndim == 2:
        outputs, weights = outputs[0], weights[0]
    elif not module.batch_first:
        outputs = outputs.transpose(0, 1)
    ins, outs = units_of(module)
    found = [(ins, [part_of(one) for one in naive.ins]), (outs, [part_of(naive.out)])]
    return (outputs, weights if need_weights else None), found


def part_of(projection):
    x, zero = projection.seen[0]
    biases = [] if projection.bias is None else [(projection.bias, projection.bias_rows)]
    return Part([(projection.weight, projection.rows)], [x.reshape(-1, x.shape[-1])], biases, [zero])


def recurrent(module, inputs, state=None):
    state = (state, None) if isinstance(state, torch.Tensor) else state
    is_unbatched = not isinstance(inputs, PackedSequence) and inputs.ndim == 2
    if isinstance(inputs, PackedSequence):
        padded, lengths = pad_packed_sequence(inputs, batch_first=True)
        samples = [x[:length] for x, length in zip(padded, lengths.tolist(), strict=True)]
    else:
        samples = [inputs] if is_unbatched else list(inputs.unbind(0 if module.batch_first else 1))
    if is_unbatched and state is not None:
        state = tuple(None if one is None else one[:, None] for one in state)
    loops = Loops(module)
    outputs = loops(samples, state)
    last = [
        torch.stack([torch.stack([end[which] for end in ends]) for ends in loops.last], dim=1) for which in range(2)
    ]
    if is_unbatched:
        outputs, last = outputs[0], [one[:, 0] for one in last]
    elif isinstance(inputs, PackedSequence):
        outputs = pack_sequence(outputs, enforce_sorted=inputs.sorted_indices is None)
    else:
        outputs = torch.stack(outputs, dim=0 if module.batch_first else 1)
    last = tuple(last) if isinstance(module, nn.LSTM) else last[0]
    return (outputs, last), [(its, parts_of(unit)) for its, unit in units_with_loops(module, loops)]


def cell(module, inputs, state=None):
    is_unbatched = inputs.ndim == 1
    if state is not None:
        state = (state, None) if isinstance(state, torch.Tensor) else state
        state = tuple(None if one is None else (one[None, None] if is_unbatched else one[None]) for one in state)
    loops = Loops(module)
    loops([x[None] for x in (inputs[None] if is_unbatched else inputs)], state)
    h, c = (torch.stack([ends[0][which] for ends in loops.last]) for which in range(2))
    if is_unbatched:
        h, c = h[0], c[0]
    found = [(its, parts_of(unit)) for its, unit in units_with_loops(module, loops)]
    return ((h, c) if isinstance(module, nn.LSTMCell) else h), found


def units_with_loops(module, loops):
    return zip(units_of(module), [unit for directions in loops.units for unit in directions], strict=True)


def parts_of(unit):
    """The products of one layer and direction; the halves of a GRU's new gate are products of their own."""
    x, h = (torch.stack([seen[which] for seen in unit.seen]) for which in range(2))
    probes = [[zeros[part] for _, _, zeros in unit.seen] for part in range(len(unit.seen[0][2]))]
    size = len(unit.w_ih)
    rows, new = (slice(size // 3 * 2), slice(size // 3 * 2, size)) if unit.kind == "GRU" else (slice(size), None)

    def part(which, rows, probes):
        given = [(unit.w_ih, x, unit.b_ih), (unit.w_hh, h, unit.b_hh)]
        given = [given[place] for place in which]
        biases = [(bias, rows) for *_, bias in given if bias is not None]
        return Part([(weight, rows) for weight, *_ in given], [X for _, X, _ in given], biases, probes)

    parts = [part((0, 1), rows, probes[0])]
    return parts if new is None else [*parts, part((0,), new, probes[1]), part((1,), new, probes[2])]
