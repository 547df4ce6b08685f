"""What a rank says of its inputs before anything large is sent: how many rows it has of each layer, of which shapes.

From these numbers every rank works out what all of them are going to send.
"""

import hashlib
from collections.abc import Hashable
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch

from consequent.capture.use import Use
from consequent.layers import Operation

# What a rank has of a layer's inputs.
NOTHING, MOMENT, ROWS, MISBEHAVES, IDLE = range(5)


class Shape(NamedTuple):
    """What must be known of another rank's tensors: the operation, shapes without the samples, and the dtype."""

    operation: Operation
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    dtype: torch.dtype

    def samples(self, rows: int) -> int:
        """How many of this shape make so many rows."""
        return rows // prod(self.outputs[1:])


class Block(NamedTuple):
    """Samples of one shape."""

    shape: Shape
    samples: int


class News(NamedTuple):
    """What a rank says of one layer."""

    form: int
    rows: int
    shapes: int  # a key: of the shapes of its blocks
    others: int  # whether its gradient has parts that do not come from the rows
    partial: int = 0  # whether a parameter that is trained has no gradient here: then part of the moment is solved with

    @property
    def has_rows(self) -> bool:
        """Whether its inputs themselves can be sent."""
        return self.form == ROWS


class Header(NamedTuple):
    """What a rank says first."""

    digest: int
    samples: int
    failed: int
    layers: list[News]

    @classmethod
    def read(cls, numbers: list[int]) -> "Header":
        """What the numbers of another rank say."""
        width = len(News._fields)
        news = [News(*numbers[place : place + width]) for place in range(3, len(numbers), width)]
        digest, samples, failed = numbers[:3]
        return cls(digest, samples, failed, news)

    def numbers(self) -> list[int]:
        """As they are sent."""
        return [self.digest, self.samples, self.failed, *(number for news in self.layers for number in news)]


def shape_of(use: Use) -> Shape:
    """The shapes of a use's tensors, without the samples."""
    assert use.output_grad is not None
    inputs = () if use.inputs is None else tuple(use.inputs.shape[1:])
    return Shape(use.operation, inputs, tuple(use.output_grad.shape[1:]), use.dtype)


def by_shape(uses: list[Use]) -> dict[Shape, list[Use]]:
    """The uses, those of one shape together."""
    found: dict[Shape, list[Use]] = {}
    for use in uses:
        found.setdefault(shape_of(use), []).append(use)
    return found


def blocks_of(uses: list[Use]) -> tuple[Block, ...]:
    """The blocks of a layer's rows; where there is only one, its samples are left open: they follow from the rows."""
    found = by_shape(uses)
    if len(found) == 1:
        return (Block(next(iter(found)), -1),)
    return tuple(Block(shape, shape.samples(sum(use.rows for use in same))) for shape, same in found.items())


def elements(block: Block, kind: str) -> int:
    """How many numbers a block's ``inputs`` or ``outputs`` are."""
    shape = getattr(block.shape, kind)
    return block.samples * prod(shape) if shape else 0


def block_bytes(block: Block, kind: str) -> int:
    """How many bytes a block's ``inputs`` or ``outputs`` are."""
    return elements(block, kind) * block.shape.dtype.itemsize


@lru_cache(maxsize=4096)
def key_of(value: Hashable) -> int:
    """A number that stands for the value on every rank."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7], "big")


def difference(everyones: list[dict[str, str]]) -> str:
    """In words, what some ranks have and others do not."""
    differences = []
    for name in dict.fromkeys(name for described in everyones for name in described):
        values: dict[str, list[int]] = {}
        for rank, described in enumerate(everyones):
            values.setdefault(described.get(name, "not corrected"), []).append(rank)
        if len(values) > 1:
            said = "; ".join(f"{value} on rank {', '.join(map(str, ranks))}" for value, ranks in values.items())
            differences.append(f"{name}: {said}")
    if not differences:
        return "their layers come in another order. Build the model in the same way on every rank."
    more = f" (and {len(differences) - 5} more)" if len(differences) > 5 else ""
    return ". ".join(differences[:5]) + more + ". Attach in the same way on every rank."
