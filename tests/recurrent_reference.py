"""Recurrent layers as loops over samples, layers, directions and time steps, with every gate's ΔZ seen.

Nothing of ``consequent`` is used here, and of torch neither the functions of recurrent layers nor packed sequences: a
sample is a tensor ``[time, in]``. A zero is added to whatever a gate's products come to, and the zero's gradient is ΔZ.
"""

import numpy as np
import reference
import torch
from torch import nn


class Unit:
    """One layer and direction: its parameters, and what they met."""

    def __init__(self, module, end):
        kinds = {"LSTM": (nn.LSTM, nn.LSTMCell), "GRU": (nn.GRU, nn.GRUCell), "RNN": (nn.RNN, nn.RNNCell)}
        self.kind = next(name for name, types in kinds.items() if isinstance(module, types))
        self.act = torch.relu if getattr(module, "nonlinearity", "tanh") == "relu" else torch.tanh
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
        self.w_ih, self.w_hh, self.b_ih, self.b_hh, self.w_hr = (getattr(module, name + end, None) for name in names)
        self.seen = []  # (x, h, zeros of the products)

    def products(self, x, h):
        """What the gates are made of; in a GRU, the halves of the new gate apart."""
        a, b = self.w_ih @ x, self.w_hh @ h
        if self.b_ih is not None:
            a, b = a + self.b_ih, b + self.b_hh
        size = len(a) // 3 * 2
        parts = [a[:size] + b[:size], a[size:], b[size:]] if self.kind == "GRU" else [a + b]
        zeros = [torch.zeros_like(part, requires_grad=True) for part in parts]
        self.seen.append((x.detach(), h.detach(), zeros))
        return [part + zero for part, zero in zip(parts, zeros, strict=True)]

    def step(self, x, h, c):
        """The hidden state, and the cell of an LSTM, after a time step."""
        if self.kind == "RNN":
            return self.act(self.products(x, h)[0]), c
        if self.kind == "GRU":
            rz, new_x, new_h = self.products(x, h)
            r, z = rz.sigmoid().chunk(2)
            return (1 - z) * torch.tanh(new_x + r * new_h) + z * h, c
        i, f, g, o = self.products(x, h)[0].chunk(4)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        return (h if self.w_hr is None else self.w_hr @ h), c

    def gradients(self, damping):
        """{parameter: its consequentialist gradient, as an array}: both biases get half of what their sum should."""
        x = np.array([reference.to_numpy(x) for x, _, _ in self.seen])
        h = np.array([reference.to_numpy(h) for _, h, _ in self.seen])
        dZ = [
            np.array([reference.to_numpy(zeros[part].grad) for _, _, zeros in self.seen])
            for part in range(len(self.seen[0][2]))
        ]
        ones = np.ones((len(x), 0 if self.b_ih is None else 1))

        def solved(X, dZ):
            return reference.consequential_gradient(np.concatenate([X, ones], axis=1), dZ, damping)

        joint, width = solved(np.concatenate([x, h], axis=1), dZ[0]), x.shape[1]
        found = {"w_ih": joint[:, :width], "w_hh": joint[:, width : width + h.shape[1]]}
        found["b_ih"] = found["b_hh"] = joint[:, -1] / 2
        if self.kind == "GRU":
            of_x, of_h = solved(x, dZ[1]), solved(h, dZ[2])
            found["w_ih"] = np.concatenate([found["w_ih"], of_x[:, :width]])
            found["w_hh"] = np.concatenate([found["w_hh"], of_h[:, : h.shape[1]]])
            found["b_ih"] = np.concatenate([found["b_ih"], of_x[:, -1]])
            found["b_hh"] = np.concatenate([found["b_hh"], of_h[:, -1]])
        parameters = {name: getattr(self, name) for name in found}
        return {p: found[name] for name, p in parameters.items() if p is not None}


class Loops:
    """A stack of recurrent layers."""

    def __init__(self, module):
        self.module = module
        self.last = []  # of the last call, for each sample: (h, c) that each layer and direction ends with
        self.is_cell = isinstance(module, nn.RNNCellBase)
        self.both_ways = not self.is_cell and module.bidirectional
        self.layers = 1 if self.is_cell else module.num_layers
        ends = ("", "_reverse")[: 1 + self.both_ways]
        self.units = [
            [Unit(module, "" if self.is_cell else f"_l{layer}{end}") for end in ends] for layer in range(self.layers)
        ]

    def __call__(self, samples, states=None, masks=()):
        """``[time, directions · out]`` for each sample.

        Args:
            samples: ``[time, in]`` each.
            states: (h, c), ``[layers · directions, samples, size]`` each; None is zeros.
            masks: of dropout, for each sample ``[layers − 1]`` of them.
        """
        outputs, self.last = [], []
        for number, sequence in enumerate(samples):
            ends = []
            for layer, directions in enumerate(self.units):
                sides = []
                for direction, unit in enumerate(directions):
                    place = layer * len(directions) + direction
                    size = unit.w_hh.shape[1]
                    cells = len(unit.w_ih) // 4
                    h, c = sequence.new_zeros(size), sequence.new_zeros(cells)
                    if states is not None:
                        h = states[0][place, number]
                        c = states[1][place, number] if states[1] is not None else c
                    times = range(len(sequence))
                    found = {}
                    for time in reversed(times) if direction else times:
                        h, c = unit.step(sequence[time], h, c)
                        found[time] = h
                    sides.append(torch.stack([found[time] for time in times]))
                    ends.append((h, c))
                sequence = torch.cat(sides, dim=-1)
                if masks and layer < self.layers - 1:
                    sequence = sequence * masks[number][layer]
            outputs.append(sequence)
            self.last.append(ends)
        return outputs

    def correct(self, damping, scale=1.0):
        """After the backward pass: put consequentialist gradients in the place of the plain ones."""
        for unit in [unit for directions in self.units for unit in directions]:
            for parameter, gradient in unit.gradients(damping).items():
                if parameter.requires_grad:
                    parameter.grad = torch.as_tensor(gradient * scale).to(parameter.dtype)
