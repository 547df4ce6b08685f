"""The kinds of layers: how each of them is the matrix product ``Z = W X``. One file a kind, one line in ``KINDS``."""

from torch import nn

from consequent.layers.convolution import Convolution
from consequent.layers.linear import Linear, TransposedLinear
from consequent.layers.operation import Operation
from consequent.layers.transposed_convolution import TransposedConvolution

__all__ = ["KINDS", "Linear", "Operation", "kind_of"]

KINDS: list[type[Operation]] = [Linear, TransposedLinear, Convolution, TransposedConvolution]


def kind_of(module: nn.Module) -> type[Operation] | None:
    """The kind of layer that the module is by its class; None if it is none of them."""
    return next((kind for kind in KINDS if kind.class_of(module) is not None), None)
