"""Second moments that are averaged over steps, and factorised only now and then: ``averaging=β, refresh=T``.

Every T-th step ``S ← β S + (1 − β) XXᵀ / N``, started with the first one, is factorised anew; all steps solve with
``N S``, N being the rows of the step at hand. A relative λ is that of ``N S``, with ``n ← β n + N`` for its rows.
Between refreshes nothing is computed of a layer's inputs: only how many rows there were is noted.

Layers that are solved for by samples have no average, as they have no moment: theirs is the exact update of each step.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from consequent.capture.use import Use
from consequent.engines.inverse_factor import InverseFactor, inverse_factor
from consequent.maths.damping import Damping
from consequent.statistics.gradients import columns_with_gradient, trace_of
from consequent.statistics.moment import Factor, Moment
from consequent.statistics.rows import Rows
from consequent.statistics.solution import Solution
from consequent.statistics.statistic import Statistic, with_bias_of

if TYPE_CHECKING:
    from consequent.capture.records import Record


@dataclass(frozen=True, eq=False)
class Idle(Statistic):
    """How many rows there were, and nothing else: an average stands for them."""

    @classmethod
    def of(cls, use: Use) -> "Idle":
        """Those of one use."""
        return cls((use,), use.features, () if use.bias is None else (use.bias,), use.rows)

    def add(self, use: Use) -> "Idle":
        """With one use more."""
        biases = with_bias_of(use, self.biases)
        return replace(self, uses=(*self.uses, use), biases=biases, rows=self.rows + use.rows)

    def solve(self, record: "Record", damping: Damping, *, may_wait: bool) -> Solution:
        """Does not happen: :meth:`Averages.apply` puts the average in its place."""
        raise NotImplementedError


@dataclass
class Average:
    """That of one weight.

    Attributes:
        moment: S, ``[groups, columns, columns]``.
        rows: n, how many have gone into it.
        biases: whose columns are the last ones.
        factor: of ``N S + λI``,
        of: for this N and λ.
    """

    moment: Tensor
    rows: float
    biases: tuple[Tensor, ...]
    factor: InverseFactor | None = None
    of: tuple[int, Damping] | None = None

    def factor_for(self, rows: int, damping: Damping) -> InverseFactor:
        """The factor of ``N S + λI``, made anew only if it must be.

        Args:
            rows: N.
            damping: λ.
        """
        if self.factor is not None and self.of is not None and self.of[1] == damping:
            known = self.of[0]
            if known == rows:
                return self.factor
            if damping.relative:  # all of N S + λI grows with N
                ratio = rows / known
                sizes, rest = self.factor.status.split(2, dim=-1)  # trace and λ, how it went
                return InverseFactor(self.factor.inverse * ratio**-0.5, torch.cat([sizes * ratio, rest], -1))
        level = damping.level(max(round(self.rows), 1), self.moment.shape[-1])
        self.factor, self.of = inverse_factor(self.moment * rows, level, overwrite=True), (rows, damping)
        return self.factor


class Averages:
    """The averages of all weights, and when they are refreshed.

    Args:
        averaging: β, how much of the old average stays; 0: the last refreshed moment alone.
        refresh: T, every how many steps.
    """

    def __init__(self, averaging: float, refresh: int) -> None:
        self.averaging = averaging
        self.refresh = refresh
        self.steps = 0  # taken so far
        self._of: dict[Tensor, Average] = {}
        self._biases: dict[Tensor, list[Tensor]] = {}  # of all layers with each weight that is corrected

    @property
    def are_used(self) -> bool:
        """Otherwise each step's own moments are exact."""
        return self.averaging > 0 or self.refresh > 1

    def is_idle(self, weight: Tensor) -> bool:
        """Whether the inputs of a weight need not be looked at in this step."""
        return self.steps % self.refresh != 0 and weight in self._of

    def apply(self, record: "Record", damping: Damping) -> None:
        """At the step: put what is to be solved with in the place of what the passes noted.

        Args:
            record: of one weight, for all micro-batches and ranks.
            damping: λ.
        """
        average = self._of.get(record.weight)
        statistic = record.statistic
        if isinstance(statistic, Rows) and average is not None and statistic.rows:
            record.reduce(keep_rows=False)  # few rows for once: they go with the others
            statistic = record.statistic
        if isinstance(statistic, Moment) and statistic.rows and record.weight in self._biases:
            whole = statistic.with_biases(self._biases[record.weight])  # also of those that this step did without
            average = self._of[record.weight] = self._updated(average, whole)
        if average is None or statistic is None or not statistic.rows or not isinstance(statistic, Moment | Idle):
            return
        of = (statistic.uses, statistic.features, average.biases, max(round(average.rows), 1))
        record.statistic = Idle(*of)
        if damping.value > 0 and len(columns_with_gradient(record)) == record.columns:
            record.statistic = Factor(*of, inverse=(damping, average.factor_for(statistic.rows, damping)))
        else:  # part of the matrix, or its pseudo-inverse
            record.statistic = Moment(*of, average.moment * statistic.rows)

    def _updated(self, average: Average | None, moment: Moment) -> Average:
        """With the moment of a step; one that holds NaN or inf changes nothing."""
        new = moment.matrix / moment.rows
        if average is None:
            return Average(torch.where(_is_finite(new), new, 1), moment.rows, moment.biases)
        beta = self.averaging
        blended = torch.where(_is_finite(new), torch.lerp(new, average.moment, beta), average.moment)
        return Average(blended, beta * average.rows + moment.rows, moment.biases)

    def average_only(self, biases: dict[Tensor, list[Tensor]]) -> None:
        """Only these weights are corrected from now on; averages with other biases than before begin anew.

        Args:
            biases: of the layers with each weight, those that are corrected.
        """
        self._of = {
            weight: average
            for weight, average in self._of.items()
            if weight in biases and list(map(id, average.biases)) == list(map(id, biases[weight]))
        }
        self._biases = biases

    def state_dict(self, names: dict[Tensor, str]) -> dict[str, Any]:
        """What a later run goes on from, by the names of the weights' layers."""
        of = {
            names[weight]: {"moment": average.moment, "rows": average.rows}
            for weight, average in self._of.items()
            if weight in names
        }
        return {"steps": self.steps, "of": of}

    def load_state_dict(self, state: dict[str, Any], weights: dict[str, tuple[Tensor, int]]) -> None:
        """Go on from a state.

        Args:
            state: of :meth:`state_dict`.
            weights: that of each layer by its name, and how many columns its inputs have without those of biases.
        """
        found: dict[Tensor, Average] = {}
        for name, saved in state["of"].items():
            if name not in weights:
                raise ValueError(f"the state has an averaged moment of layer {name!r}, which is not corrected here")
            weight, features = weights[name]
            biases, moment = self._biases.get(weight, []), saved["moment"].to(weight.device)
            if moment.shape[-1] != features + len(biases):
                raise ValueError(
                    f"the averaged moment of layer {name!r} has {moment.shape[-1]} columns, but the layer has "
                    f"{features + len(biases)}: what is trained of it has changed"
                )
            found[weight] = Average(moment, float(saved["rows"]), tuple(biases))
        self.steps, self._of = int(state["steps"]), found


def _is_finite(moment: Tensor) -> Tensor:
    """Whether the moments hold neither NaN nor inf, all groups alike."""
    return trace_of(moment).sum().isfinite()
