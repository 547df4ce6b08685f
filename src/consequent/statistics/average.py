"""One averaged second moment, and how averages take in what a step has seen: those of one shape together."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from consequent.capture.torch_internals import answers_at_once
from consequent.maths.damping import Damping
from consequent.statistics.gradients import trace_of
from consequent.statistics.kept_inverses import Inverses
from consequent.statistics.moment import Moment
from consequent.statistics.together import together

WIDEST = 8192  # columns of a moment that is kept for a layer with fewer rows: 256 MiB in float32


@dataclass
class Average:
    """That of one weight.

    Attributes:
        moment: S, ``[groups, columns, columns]``.
        rows: n, how many have gone into it.
        features: how many of the columns are the weight's,
        biases: and whose the last ones are, in the order of the last refresh.
        age: in how many steps it has been used.
        inverses: of ``N S + λI`` and of others like it,
        place: where its own one is,
        of: for which N and λ.
    """

    moment: Tensor
    rows: float
    features: int
    biases: tuple[Tensor, ...]
    age: int = 0
    inverses: Inverses | None = None
    place: int = 0
    of: tuple[int, Damping] | None = None

    def has(self, features: int, biases: Sequence[Tensor]) -> bool:
        """Whether its columns are these features and biases, in any order."""
        return self.features == features and set(map(id, self.biases)) == set(map(id, biases))

    def moment_of(self, biases: Sequence[Tensor]) -> Tensor:
        """S with the columns of these biases, in this order."""
        if self.is_ordered_as(biases):
            return self.moment
        place = {bias: self.features + number for number, bias in enumerate(self.biases)}
        index = [*range(self.features), *(place[bias] for bias in biases)]
        columns = torch.tensor(index, device=self.moment.device)
        return self.moment[:, columns[:, None], columns]

    def is_ordered_as(self, biases: Sequence[Tensor]) -> bool:
        """Whether its last columns are those of these biases, in this order."""
        return list(map(id, self.biases)) == list(map(id, biases))

    def growth_for(self, rows: int, damping: Damping) -> float | None:
        """By how much ``N S + λI`` is larger than what was inverted; None if it is to be inverted anew.

        Args:
            rows: N.
            damping: λ.
        """
        if self.of is None or self.of[1] != damping:
            return None
        known, _ = self.of
        if damping.relative:  # all of it grows with N
            return rows / known
        return 1.0 if rows == known else None


def refreshed(old: Sequence[Average | None], moments: Sequence[Moment], averaging: float) -> list[Average | None]:
    """The averages with the moments of a step; None where a moment holds NaN or inf.

    On a device that is not waited for, such a moment changes nothing; a first one is kept until the next refresh, and
    no step is taken then.

    Args:
        old: the averages so far; None where there is none.
        moments: of the same weights in this step.
        averaging: β, how much of the old average stays.
    """
    found: list[Average | None] = [None] * len(moments)

    def kind(number: int) -> Hashable:
        matrix, average = moments[number].matrix, old[number]
        before = None if average is None else average.rows
        return matrix.shape, matrix.dtype, matrix.device, moments[number].rows, before

    for numbers in together(range(len(moments)), kind, lambda number: moments[number].matrix.numel()):
        its = [moments[number] for number in numbers]
        known = [average for number in numbers if (average := old[number]) is not None]
        rows = its[0].rows + (averaging * known[0].rows if known else 0)
        before = [average.moment_of(moment.biases) for average, moment in zip(known, its, strict=False)]
        matrices, are_finite = _blended(before, [moment.matrix for moment in its], its[0].rows, rows)
        for number, moment, matrix, is_finite in zip(numbers, its, matrices.unbind(), are_finite, strict=True):
            if is_finite:
                found[number] = Average(matrix, rows, moment.features, moment.biases)
    return found


def _blended(old: Sequence[Tensor], moments: Sequence[Tensor], new_rows: int, rows: float) -> tuple[Tensor, list[bool]]:
    """``S + (XXᵀ/N − S) N/n`` of several weights, and whether each ``XXᵀ`` is finite, as far as the host may ask.

    Args:
        old: S of each; none where all are the first.
        moments: ``XXᵀ`` of each.
        new_rows: N.
        rows: n, of old and new ones.
    """
    new = torch.stack(list(moments)).div_(new_rows)
    is_finite = _is_finite(new)
    told = is_finite.flatten().tolist() if answers_at_once(new) else [True] * len(new)
    if not old:
        return new, told
    before = torch.stack(list(old)).to(new)  # the model may have another type by now
    blended = torch.lerp(before, new, new_rows / rows)
    return torch.where(_is_finite(before), torch.where(is_finite, blended, before), new), told


def _is_finite(moments: Tensor) -> Tensor:
    """``[members, 1, 1, 1]``: whether they hold neither NaN nor inf, all groups of each alike."""
    return trace_of(moments).sum(-1).isfinite()[:, None, None, None]
