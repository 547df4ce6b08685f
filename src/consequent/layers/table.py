"""What ``nn.Embedding`` and ``nn.EmbeddingBag`` have in common: products with a matrix X that has few entries."""

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from consequent.layers.operation import Operation


@dataclass(frozen=True)
class Table(Operation):
    """What both kinds of embeddings have in common: a weight ``[features, out_features]`` whose rows are looked up.

    Attributes:
        padding_idx: of the row that is no parameter, as it gets no gradient; -1 if there is none.
        max_norm: what rows that are looked up are shortened to first, if they are longer.
        norm_type: the p of that norm.
        sparse: whether the weight's gradient is a sparse tensor.
    """

    padding_idx: int = -1
    max_norm: float | None = None
    norm_type: float = 2.0
    sparse: bool = False

    corrected_by_default: ClassVar[bool] = False
    is_transposed: ClassVar[bool] = True
    has_rows_of_outputs: ClassVar[bool] = False
    is_sparse: ClassVar[bool] = True
    follows_autocast: ClassVar[bool] = False

    @classmethod
    def of(cls, layer: Any) -> Self:
        """The operation that the layer would do now."""
        features, outputs = layer.weight.shape
        return cls(
            groups=1,
            features=features,
            outputs=outputs,
            weight_shape=(features, outputs),
            padding_idx=_padding_index(layer.padding_idx, features),
            max_norm=layer.max_norm,
            norm_type=layer.norm_type,
            sparse=layer.sparse,
            **cls._own_settings(layer),
        )

    @classmethod
    @abstractmethod
    def _own_settings(cls, layer: Any) -> dict[str, Any]:
        """Those of the layer's settings that only this kind has."""

    def _with_arguments(self, given: dict[str, Any], **own: Any) -> Self:
        """With the settings that a call of torch's function gives, and those that only this kind has."""
        return replace(
            self,
            padding_idx=_padding_index(given.get("padding_idx"), self.features),
            max_norm=given.get("max_norm"),
            norm_type=given.get("norm_type", 2.0),
            sparse=given.get("sparse", False),
            **own,
        )

    def is_current(self, layer: Any) -> bool:
        """Whether the layer has the same settings still."""
        return self == type(self).of(layer)

    @property
    def inputs_per_row(self) -> int:
        """An index; in bags there are as many as they are long."""
        return 1

    @abstractmethod
    def _indices_in(self, inputs: Tensor) -> Tensor:
        """Those of the rows that canonical inputs look up."""

    def prepare(self, weight: Tensor, inputs: Tensor) -> None:
        """Shorten the rows that are looked up to ``max_norm``, in place, as torch's function does.

        To be called before the product and outside of its autograd function: it writes to the weight and is no part of
        the graph.
        """
        if self.max_norm is not None:
            with torch.no_grad():
                torch.embedding_renorm_(weight.detach(), self._indices_in(inputs), self.max_norm, self.norm_type)

    def input_gradient(self, output_grad: Tensor, weight: Tensor, inputs: Tensor) -> Tensor:
        """There is none: indices have no gradient."""
        raise TypeError(f"the inputs of {type(self).__name__} are indices: they have no gradient")

    def output_rows(self, outputs: Tensor) -> Tensor:
        """``[1, rows, out_features]``."""
        return outputs[None]

    def weight_matrix(self, weight: Tensor) -> Tensor:
        """``[1, out_features, features]``."""
        return weight.mT[None]

    def shaped_like_weight(self, matrix: Tensor) -> Tensor:
        """``[features, out_features]``."""
        return matrix.squeeze(0).mT


def _padding_index(index: int | None, size: int) -> int:
    """The index counted from the beginning; -1 if there is none."""
    return -1 if index is None else index % size
