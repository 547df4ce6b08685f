"""``nn.MultiheadAttention``: its projections of query, key and value, and of what comes out.

The packed ``in_proj_weight`` is three blocks of rows, which meet query, key and value; where these are one tensor, as
in self-attention, they are one product. ``bias_k`` and ``bias_v`` come after it and keep their plain gradient.

``out_proj`` is a Linear layer that torch never calls. What it meets is known inside of torch's own function alone,
which is therefore run with another ``linear`` in it.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from consequent.capture.torch_internals import autocast_dtype, with_globals
from consequent.layers.joint import Enter, Joint, Part, Piece, Unit

_PACKED = ("in_proj_weight", "in_proj_bias")
_APART = ("q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias")
_OUT = ("out_proj_weight", "out_proj_bias")

# The arguments of torch's function that are given by their places.
_ARGUMENTS = (
    *("query", "key", "value", "embed_dim_to_check", "num_heads", "in_proj_weight", "in_proj_bias", "bias_k", "bias_v"),
    *("add_zero_attn", "dropout_p", "out_proj_weight", "out_proj_bias"),
)


class Attention(Joint):
    """All of its projections: a unit for those that go in, and one for what comes out."""

    module_types: ClassVar[tuple[type[nn.Module], ...]] = (nn.MultiheadAttention,)

    @classmethod
    def names(cls, layer: Any) -> list[tuple[str, ...]]:
        """Of what goes in, packed or apart, and of what comes out."""
        return [_PACKED if layer._qkv_same_embed_dim else _APART, ("out_proj.weight", "out_proj.bias")]

    @classmethod
    def call(cls, layer: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], enter: Enter) -> Any:
        """``F.multi_head_attention_forward``."""
        if function is not F.multi_head_attention_forward or len(args) != len(_ARGUMENTS):
            return None
        given = {**dict(zip(_ARGUMENTS, args, strict=True)), **kwargs}
        ins, outs = cls.parameters(layer)
        names = (*(_PACKED if layer._qkv_same_embed_dim else _APART), *_OUT)
        are_own = all(given.get(name) is own for name, own in zip(names, (*ins, *outs), strict=True))
        if not are_own or given.get("static_k") is not None or given.get("static_v") is not None:
            return None
        streams = [given[name] for name in ("query", "key", "value")]
        different = list({id(stream): stream for stream in streams}.values())
        places = [next(at for at, one in enumerate(different) if one is stream) for stream in streams]
        samples = streams[0].shape[1] if streams[0].ndim == 3 else 1
        entered = enter(different, [_unit_in(ins), _unit_out(outs)], samples, False)
        given |= dict(zip(names, (*entered.parameters[0], *entered.parameters[1]), strict=True))
        given |= dict(zip(("query", "key", "value"), [entered.inputs[place] for place in places], strict=True))

        def rows_in() -> list[Tensor]:
            rows = [_rows(one) for one in different]
            return [rows[place] for place in places]

        def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            if weight is given["out_proj_weight"]:
                entered.met(1, lambda: [_rows(inputs)])
            return F.linear(inputs, weight, bias)

        entered.met(0, rows_in)
        return with_globals(function, linear=linear, has_torch_function=lambda _: False)(**given)


def _rows(inputs: Tensor) -> Tensor:
    """``[rows, features]``, in the dtype in which they meet the weights."""
    cast = autocast_dtype(inputs.device)
    rows = inputs.detach().flatten(0, -2)
    return rows if cast is None or rows.dtype.itemsize > 4 else rows.to(cast)


def _unit_in(parameters: Sequence[Tensor | None]) -> Unit:
    """Query, key and value: rows of one weight, or three weights, and of one bias."""
    *weights, bias = parameters
    first = weights[0]
    assert first is not None
    size = first.shape[0] // 3 if len(weights) == 1 else first.shape[0]
    parts, features = [], []
    for place in range(3):
        weight, start = (0, place * size) if len(weights) == 1 else (place, 0)
        its = weights[weight]
        assert its is not None
        piece = Piece(weight, start, start + size, 0, its.shape[1])
        biases = () if bias is None else (Piece(len(weights), place * size, (place + 1) * size),)
        parts.append(Part((piece,), biases, place))
        features.append(its.shape[1])
    return Unit(tuple(parameters), tuple(parts), tuple(features))


def _unit_out(parameters: Sequence[Tensor | None]) -> Unit:
    weight, bias = parameters
    assert weight is not None
    outputs, features = weight.shape
    part = Part((Piece(0, 0, outputs, 0, features),), () if bias is None else (Piece(1, 0, outputs),))
    return Unit(tuple(parameters), (part,), (features,))
