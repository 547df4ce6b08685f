"""``nn.LSTM``, ``nn.GRU``, ``nn.RNN`` and their cells.

Every layer and direction is a unit. Its gates are one product with ``[x_t; h_{t−1}; 1]``, over all time steps and
samples: the weights on inputs and on hidden states side by side, and the sum of both biases, each of which moves by
half. The new gate of a GRU is ``tanh(W x + b + r ⊙ (V h + c))``, whose two halves are products of their own.

Torch computes a stack of layers at once and does not say what the inner ones put out, so they are called one by one,
with the same dropout in between. ``weight_hr``, by which an LSTM with ``proj_size`` shortens its hidden state, meets
what torch does not show: it keeps its plain gradient.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from consequent.layers.joint import Enter, Joint, Part, Piece, Unit

_SEQUENCES = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
_CELLS = (torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell)


class Recurrent(Joint):
    """All of them."""

    module_types: ClassVar[tuple[type[nn.Module], ...]] = (
        *(nn.LSTM, nn.GRU, nn.RNN),
        *(nn.LSTMCell, nn.GRUCell, nn.RNNCell),
    )

    @classmethod
    def names(cls, layer: Any) -> list[tuple[str, ...]]:
        """Those of each layer and direction."""
        if isinstance(layer, nn.RNNCellBase):
            return [("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
        ends = [f"_l{n}{end}" for n in range(layer.num_layers) for end in ("", "_reverse")[: 1 + layer.bidirectional]]
        kinds = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        return [tuple(kind + end for kind in kinds) for end in ends]

    @classmethod
    def call(cls, layer: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], enter: Enter) -> Any:
        """Torch's own functions, one layer after the other."""
        if kwargs:
            return None
        own = {id(p) for p in layer._parameters.values() if p is not None}
        if function in _CELLS:
            return _cell(function, args, enter) if _are_in(args[2:], own) else None
        if function in _SEQUENCES:
            weights = args[3] if isinstance(args[3], list | tuple) else args[2]
            return _stack(function, args, enter) if _are_in(weights, own) else None
        return None


def _are_in(weights: Sequence[Tensor | None], own: set[int]) -> bool:
    return all(weight is None or id(weight) in own for weight in weights)


def _cell(function: Any, args: tuple[Any, ...], enter: Enter) -> Any:
    inputs, state, *weights = args
    hidden = state[0] if isinstance(state, tuple | list) else state
    entered = enter([inputs, hidden], [_unit(weights, _is_gru(function))], inputs.shape[0], True)
    x, h = entered.inputs
    parameters = entered.parameters[0]
    outputs = function(x, (h, *state[1:]) if isinstance(state, tuple | list) else h, *parameters)
    entered.met(0, lambda: [_side_by_side(inputs, hidden, _first(outputs).dtype)])
    return outputs


def _stack(function: Any, args: tuple[Any, ...], enter: Enter) -> Any:
    """The layers of ``torch.lstm`` and its like, each by the same function."""
    sizes = None  # of a packed sequence: how many samples there are at each time step
    if isinstance(args[3], list | tuple):
        inputs, sizes, state, weights, has_biases, layers, dropout, training, both_ways = args
        batch_first = False
        samples = int(sizes[0])
    else:
        inputs, state, weights, has_biases, layers, dropout, training, both_ways, batch_first = args
        samples = inputs.shape[0 if batch_first else 1]
    directions = 2 if both_ways else 1
    each = len(weights) // (layers * directions)
    states = list(state) if isinstance(state, tuple | list) else [state]
    finals: list[Sequence[Tensor]] = []
    for number in range(layers):
        of_layer = slice(number * directions, (number + 1) * directions)
        mine = [weights[place * each : (place + 1) * each] for place in range(layers * directions)][of_layer]
        first = [kept[of_layer] for kept in states]
        units = [_unit(its[: 4 if has_biases else 2], _is_gru(function)) for its in mine]
        entered = enter([inputs, first[0]], units, samples, batch_first and samples > 1)  # one may have had no batch
        x, hidden = entered.inputs
        used = [p for its, taken in zip(mine, entered.parameters, strict=True) for p in (*taken, *its[len(taken) :])]
        begin = (hidden, *first[1:]) if len(first) > 1 else hidden
        if sizes is None:
            outputs, *last = function(x, begin, used, has_biases, 1, 0.0, training, both_ways, batch_first)
        else:
            outputs, *last = function(x, sizes, begin, used, has_biases, 1, 0.0, training, both_ways)
        for direction in range(directions):

            def rows(
                before: Tensor = inputs, after: Tensor = outputs, h0: Tensor = first[0], direction: int = direction
            ) -> list[Tensor]:
                width = after.shape[-1] // directions
                own = after[..., direction * width : (direction + 1) * width]
                if sizes is not None:
                    shifted = _shifted_packed(own, h0[direction], sizes.tolist(), backwards=direction == 1)
                elif batch_first:
                    shifted = _shifted(own.transpose(0, 1), h0[direction], backwards=direction == 1).transpose(0, 1)
                else:
                    shifted = _shifted(own, h0[direction], backwards=direction == 1)
                return [_side_by_side(before, shifted, after.dtype)]

            entered.met(direction, rows)
        finals.append(last)
        inputs = outputs
        if dropout and training and number < layers - 1:
            inputs = torch.dropout(inputs, dropout, training)
    return (outputs, *(torch.cat(parts) if layers > 1 else parts[0] for parts in zip(*finals, strict=True)))


def _is_gru(function: Any) -> bool:
    return function in (torch.gru, torch.gru_cell)


def _first(outputs: Any) -> Tensor:
    first: Tensor = outputs[0] if isinstance(outputs, tuple | list) else outputs
    return first


def _unit(parameters: Sequence[Tensor | None], is_gru: bool) -> Unit:
    """Weights on inputs and on hidden states, and two biases, as products.

    Args:
        parameters: ``[gates · hidden, in]``, ``[gates · hidden, out]``, and ``[gates · hidden]`` twice, if there are
            biases.
        is_gru: whether the last of three gates multiplies what comes from the hidden state.
    """
    on_inputs, on_hidden = parameters[:2]
    assert on_inputs is not None
    assert on_hidden is not None
    rows, width = on_inputs.shape
    features = width + on_hidden.shape[1]
    has_biases = len(parameters) == 4 and parameters[2] is not None

    def part(start: int, stop: int, which: tuple[int, ...]) -> Part:
        columns = ((0, width), (width, features))
        weights = tuple(Piece(place, start, stop, *columns[place]) for place in which)
        return Part(weights, tuple(Piece(2 + place, start, stop) for place in which) if has_biases else ())

    parts = [part(0, rows, (0, 1))]
    if is_gru:
        kept = rows // 3 * 2
        parts = [part(0, kept, (0, 1)), part(kept, rows, (0,)), part(kept, rows, (1,))]
    return Unit(tuple(parameters), tuple(parts), (features,))


def _side_by_side(inputs: Tensor, hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """``[rows, in + out]``: the inputs and the hidden states before them, in the dtype in which they met weights."""
    return torch.cat([inputs.to(dtype), hidden.to(dtype)], dim=-1).flatten(0, -2)


def _shifted(outputs: Tensor, first: Tensor, *, backwards: bool) -> Tensor:
    """The hidden state before each time step.

    Args:
        outputs: ``[time, samples, out]``, the hidden state after it.
        first: ``[samples, out]``, the one to begin with.
        backwards: whether time runs from the end.
    """
    begin = first[None].to(outputs.dtype)
    return torch.cat([outputs[1:], begin] if backwards else [begin, outputs[:-1]])


def _shifted_packed(outputs: Tensor, first: Tensor, sizes: list[int], *, backwards: bool) -> Tensor:
    """The same for a packed sequence: ``[all steps, out]``, time after time, the longest samples first."""
    steps, begin = outputs.split(sizes), first.to(outputs.dtype)
    shifted = []
    for time, size in enumerate(sizes):
        if not backwards:
            shifted.append(steps[time - 1][:size] if time else begin[:size])
        else:
            known = sizes[time + 1] if time + 1 < len(sizes) else 0  # the others end here: they begin here
            shifted += [steps[time + 1], begin[known:size]] if known else [begin[:size]]
    return torch.cat(shifted)
