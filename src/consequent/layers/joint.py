"""Modules with several matrix products inside of them, and parameters that are pieces of these.

Of a recurrent layer or an attention, torch computes all products at once and says nothing of ΔZ. The feature side does
not ask for it: ``G (XXᵀ + λI)⁻¹`` takes the plain gradient G, which autograd computes, and the inputs.

To add a kind, write a subclass of :class:`Joint` in a file of its own and name it in :data:`consequent.layers.JOINTS`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from consequent.ranks.sharded_tensors import is_sharded


class Piece(NamedTuple):
    """Rows of a parameter that meet some columns of the inputs.

    Attributes:
        parameter: its place among the unit's.
        start: the first of its rows,
        stop: and the one behind the last.
        first: the first column of the inputs that they meet; not asked of a bias,
        last: and the one behind the last.
    """

    parameter: int
    start: int
    stop: int
    first: int = 0
    last: int = 0


@dataclass(frozen=True)
class Part:
    """One matrix product ``Z = W X``.

    Attributes:
        weights: side by side, they are W.
        biases: of all of them together, that meet one constant 1: only their sum acts. Each moves by an equal share.
        inputs: which of the unit's inputs X is.
    """

    weights: tuple[Piece, ...]
    biases: tuple[Piece, ...] = ()
    inputs: int = 0

    @property
    def outputs(self) -> int:
        """Rows of W."""
        return self.weights[0].stop - self.weights[0].start

    def columns(self, gradients: Sequence[Tensor | None], ones: int) -> tuple[tuple[int, int], ...]:
        """The columns of the inputs that meet a parameter with a gradient: the first and the one behind the last.

        Args:
            gradients: of the unit's parameters.
            ones: which column is the constant 1.
        """
        found = [(piece.first, piece.last) for piece in self.weights if gradients[piece.parameter] is not None]
        has_bias = any(gradients[piece.parameter] is not None for piece in self.biases)
        return (*found, (ones, ones + 1)) if has_bias else tuple(found)

    def gradient(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """G, ``[out_features, columns]``: that of the sum of the biases is the same for all of them."""
        matrices = [_rows(gradients, piece) for piece in self.weights if gradients[piece.parameter] is not None]
        sums = [_rows(gradients, piece) for piece in self.biases if gradients[piece.parameter] is not None]
        if sums:
            matrices.append((sums[0] if len(sums) == 1 else torch.stack(sums).mean(0))[:, None])
        return matrices[0] if len(matrices) == 1 else torch.cat(matrices, dim=1)

    def put(self, new: Tensor, gradients: Sequence[Tensor | None], into: Sequence[Tensor | None]) -> None:
        """The inverse of :meth:`gradient`, for a new one.

        Args:
            new: ``[out_features, columns]``.
            gradients: the old ones of the unit's parameters.
            into: where the new ones are written to.
        """
        place = 0
        for piece in self.weights:
            if gradients[piece.parameter] is not None:
                width = piece.last - piece.first
                _rows(into, piece).copy_(new[:, place : place + width])
                place += width
        biases = [piece for piece in self.biases if gradients[piece.parameter] is not None]
        for piece in biases:
            _rows(into, piece).copy_(new[:, place] / len(biases))


def _rows(tensors: Sequence[Tensor | None], piece: Piece) -> Tensor:
    tensor = tensors[piece.parameter]
    assert tensor is not None
    return tensor[piece.start : piece.stop]


class Unit(NamedTuple):
    """Parameters that are solved for together.

    Attributes:
        parameters: all that the parts are pieces of; None where the module does without.
        parts: the products.
        features: columns of each of the unit's inputs, the constant 1 not counted.
    """

    parameters: tuple[Tensor | None, ...]
    parts: tuple[Part, ...]
    features: tuple[int, ...]


class Entered(Protocol):
    """Units whose parameters are about to be used.

    Attributes:
        inputs: what is to be used in place of the inputs,
        parameters: and in place of each unit's parameters.
    """

    inputs: tuple[Tensor, ...]
    parameters: list[tuple[Tensor | None, ...]]

    def met(self, unit: int, rows: Callable[[], Sequence[Tensor]]) -> None:
        """What the unit's parameters have met.

        Args:
            unit: its place among those that were entered.
            rows: of each of its inputs, ``[rows, features]``; asked only where somebody wants to know.
        """


# What is about to be done with some inputs, of so many samples, which may be in their leading dimension or not.
Enter = Callable[[Sequence[Tensor], Sequence[Unit], int, bool], Entered]


class Joint(ABC):
    """A kind of module with several matrix products inside."""

    corrected_by_default: ClassVar[bool] = True
    module_types: ClassVar[tuple[type[nn.Module], ...]] = ()

    @classmethod
    def is_of(cls, module: nn.Module) -> bool:
        """Whether the module is of the kind."""
        return isinstance(module, cls.module_types)

    @classmethod
    @abstractmethod
    def names(cls, layer: Any) -> list[tuple[str, ...]]:
        """The names of the parameters of each unit; of those that the module may do without, too."""

    @classmethod
    @abstractmethod
    def call(cls, layer: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], enter: Enter) -> Any:
        """What a call of torch inside of the module's ``forward`` computes; None if it is none of the kind's.

        Args:
            layer: the module.
            function: of torch.
            args: of the call.
            kwargs: likewise.
            enter: to be told of all parameters before they are used.
        """

    @classmethod
    def parameters(cls, layer: nn.Module) -> list[tuple[Tensor | None, ...]]:
        """Those of each unit, the weight that it is known by first."""
        return [tuple(_parameter(layer, name) for name in names) for names in cls.names(layer)]

    @classmethod
    def why_not(cls, layer: nn.Module) -> str | None:
        """Why this module, although of the kind, is not corrected; None if it is."""
        for names in cls.names(layer):
            for place, name in enumerate(names):
                parameter, is_missing = _parameter(layer, name), place == 0
                if parameter is None and (is_missing or _attribute(layer, name) is not None):
                    return f"its {name} is not a parameter of its own (parametrised, weight-normalised or pruned)"
                if parameter is None:
                    continue
                if isinstance(parameter, UninitializedParameter):
                    return f"its {name} has no numbers yet: run one forward pass before attaching"
                if not parameter.is_floating_point():
                    return f"its {name} is {parameter.dtype}"
                if is_sharded(parameter):
                    return f"its {name} is sharded"
        return None


def _parameter(layer: nn.Module, name: str) -> Tensor | None:
    owner, _, last = name.rpartition(".")
    return (layer.get_submodule(owner) if owner else layer)._parameters.get(last)


def _attribute(layer: nn.Module, name: str) -> Any:
    owner, _, last = name.rpartition(".")
    return getattr(layer.get_submodule(owner) if owner else layer, last, None)
