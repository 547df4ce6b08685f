"""The second moment of a wide layer's inputs in blocks: ``largest_block=B``, a fraction of the exact update's cost.

Where a layer has more than B features and more than B rows, its features are cut into m blocks of at most B each. The
second moment ``XXᵀ`` is replaced by m times its block diagonal, whose blocks are computed and solved with one by one:

    ``U_J = 1/m · G_J (X_J X_Jᵀ + λ_J I)⁻¹``

Each block is the exact answer to an m-th of the wanted change. Without that share, m blocks would all make the same
change, and the outputs would move m times too far: ``XXᵀ`` is never above m times its block diagonal, and not always
below any less. So a block update overshoots no more than the exact one, and the bound on steps holds as it is.

A relative λ is that of the block, ``ρ · trace(X_J X_Jᵀ) / min(N, D_J)``. The columns of biases go with the last block.
All taps of a convolution's input channel stay together.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from consequent.capture.use import Use
from consequent.layers import Operation
from consequent.maths.damping import Damping
from consequent.maths.precision import in_full_precision
from consequent.statistics.gradients import apart_from_rows, columns_with_gradient, gradient_matrix, trace_of
from consequent.statistics.moment import Solved, joined, moment_of, solve_with_moment
from consequent.statistics.solution import Solution
from consequent.statistics.statistic import Statistic, with_bias_of

if TYPE_CHECKING:
    from consequent.capture.records import Record

Cuts = tuple[tuple[int, int], ...]  # the first channel of each block, and the one behind its last


def cuts_of(operation: Operation, features: int, rows: int, largest_block: int | None) -> Cuts:
    """How the channels of an operation's inputs are cut into blocks, as equal as they can be; () where they are not.

    Args:
        operation: the layer's.
        features: D; 0 where only biases are trained.
        rows: N, all uses together.
        largest_block: B, in features; None: nothing is cut.
    """
    if largest_block is None or features <= largest_block or rows <= largest_block:
        return ()
    channels = features // operation.taps
    blocks = -(-channels // max(1, largest_block // operation.taps))
    if blocks == 1:
        return ()
    ends = [channels * place // blocks for place in range(blocks + 1)]
    return tuple(pairwise(ends))


def block_moments(
    uses: Sequence[Use], cuts: Cuts, biases: Sequence[Tensor], moments: Sequence[Tensor | None] = ()
) -> tuple[Tensor, ...]:
    """The second moment of each block's columns, ``[groups, D_J, D_J]``, in float32 or better.

    Args:
        uses: calls of layers with one weight.
        cuts: of their channels.
        biases: whose columns are the last ones of the last block.
        moments: of other uses, which are added to (and may be overwritten).
    """
    found = []
    for (start, stop), moment in zip(cuts, moments or [None] * len(cuts), strict=True):
        is_last = stop == cuts[-1][1]
        parts = [_part_of(use, start, stop, with_bias=is_last) for use in uses]
        found.append(moment_of(parts, parts[0].features, biases if is_last else (), moment))
    return tuple(found)


def _part_of(use: Use, start: int, stop: int, *, with_bias: bool) -> Use:
    """The use, as if the layer had only these channels."""
    assert use.inputs is not None
    operation, inputs = use.operation.of_channels(use.inputs, start, stop)
    return replace(use, operation=operation, inputs=inputs, bias=use.bias if with_bias else None)


def solve_in_blocks(
    moments: Sequence[Tensor], gradient: Tensor, rows: int, damping: Damping, *, may_wait: bool
) -> Solved:
    """``1/m · G_J (X_J X_Jᵀ + λ_J I)⁻¹``, block after block. The moments may be overwritten.

    Args:
        moments: of the blocks.
        gradient: ``[groups, out_features, columns]``, those of all blocks.
        rows: of the inputs.
        damping: λ; 0 is the pseudo-inverse.
        may_wait: whether the host may wait for the device to look at a result.
    """
    parts = gradient.split([moment.shape[-1] for moment in moments], dim=-1)
    solved = [
        solve_with_moment(moment, part, rows, damping, may_wait=may_wait)
        for moment, part in zip(moments, parts, strict=True)
    ]
    if len(solved) == 1:
        return solved[0]
    finite, rescued, fallen_back = solved[0][1:]
    for one in solved[1:]:
        finite = finite & one.finite
        rescued, fallen_back = rescued + one.rescued, fallen_back + one.fallen_back
    return Solved(torch.cat([one.gradient for one in solved], dim=-1) / len(solved), finite, rescued, fallen_back)


@dataclass(frozen=True, eq=False)
class Blocks(Statistic):
    """The second moments of all uses' inputs, block by block.

    Attributes:
        cuts: of the channels.
        matrices: ``[groups, D_J, D_J]`` of each block.
    """

    cuts: Cuts
    matrices: tuple[Tensor, ...]

    @classmethod
    def of(cls, uses: Sequence[Use], features: int, biases: Sequence[Tensor], cuts: Cuts) -> "Blocks":
        """Those of uses whose inputs are known."""
        matrices = block_moments(uses, cuts, biases)
        return cls(tuple(uses), features, tuple(biases), sum(use.rows for use in uses), cuts, matrices)

    @in_full_precision
    def add(self, use: Use) -> "Blocks":
        """With one use more, whose inputs are not needed any longer. The matrices may be overwritten."""
        biases = with_bias_of(use, self.biases)
        matrices = block_moments([use], self.cuts, biases, self.matrices)
        return Blocks((*self.uses, use), self.features, biases, self.rows + use.rows, self.cuts, matrices)

    def solve(self, record: "Record", damping: Damping, *, may_wait: bool) -> Solution:
        """Block after block: takes the gradient as it is, scaled or clipped."""
        matrices = self._with_gradient(columns_with_gradient(record))
        gradient = gradient_matrix(record).to(matrices[0].dtype)
        trace = torch.stack([trace_of(matrix) for matrix in matrices]).sum(0)
        apart = apart_from_rows(record, damping, trace, may_wait=may_wait) if record.beside else None
        explained = gradient if apart is None else gradient - apart.all
        solved = solve_in_blocks(matrices, explained, self.rows, damping, may_wait=may_wait)
        return replace(joined(record, gradient, solved, apart, trace.sum()), side="blocks")

    def _with_gradient(self, columns: Sequence[int]) -> list[Tensor]:
        """The matrices of the columns that belong to a gradient."""
        if len(columns) == self.columns:
            return list(self.matrices)
        found, first = [], 0
        for matrix in self.matrices:
            behind = first + matrix.shape[-1]
            index = torch.tensor([c - first for c in columns if first <= c < behind], device=matrix.device)
            if len(index):
                found.append(matrix[:, index[:, None], index])
            first = behind
        return found
