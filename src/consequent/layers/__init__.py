"""The kinds of layers: how each of them is the matrix product ``Z = W X``. One file a kind, one line in ``KINDS``.

Modules with several such products inside are in ``JOINTS``.
"""

from torch import nn

from consequent.layers.attention import Attention
from consequent.layers.convolution import Convolution
from consequent.layers.embedding import Embedding
from consequent.layers.embedding_bag import EmbeddingBag
from consequent.layers.joint import Joint
from consequent.layers.linear import Linear, TransposedLinear
from consequent.layers.operation import Operation
from consequent.layers.recurrent import Recurrent
from consequent.layers.transposed_convolution import TransposedConvolution

__all__ = ["JOINTS", "KINDS", "Joint", "Operation", "class_of", "joint_of", "kind_of"]

KINDS: tuple[type[Operation], ...] = (
    Linear,
    TransposedLinear,
    Convolution,
    TransposedConvolution,
    Embedding,
    EmbeddingBag,
)

JOINTS: tuple[type[Joint], ...] = (Recurrent, Attention)


def joint_of(module: nn.Module) -> type[Joint] | None:
    """The kind of module with several products that the module is by its class; None if it is none of them."""
    return next((kind for kind in JOINTS if kind.is_of(module)), None)


def kind_of(module: nn.Module) -> type[Operation] | None:
    """The kind of layer that the module is by its class; None if it is none of them."""
    return next((kind for kind in KINDS if kind.kind_of(module) is not None), None)


def class_of(module: nn.Module) -> type[nn.Module]:
    """The class of torch whose ``forward`` is the operation of this layer."""
    return next(cls for kind in KINDS if (cls := kind.kind_of(module)) is not None)
