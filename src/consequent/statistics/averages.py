"""Second moments that are averaged over steps, and inverted only now and then: ``averaging=β, refresh=T``.

Every T-th step of a layer goes into its average, ``n ← β n + N`` and ``S ← S + (XXᵀ/N − S) N/n`` from ``n = 0`` on,
which is inverted anew. So S is the mean of xxᵀ over all rows so far, where those of a refresh weigh β times those of
the next: with batches of one size it becomes ``β S + (1 − β) XXᵀ/N``, and at first the plain mean, in which the first
batch counts no more than another. All steps solve with ``N S``, N being the rows of the step at hand. A relative λ is
that of ``N S``, with n for its rows. Between refreshes nothing is computed of a layer's inputs: only how many rows
there were is noted.

Layers that are solved for by samples are averaged as well, where β > 0: an average over batches has more rows than one
of them. With β = 0 the moment of another batch with fewer rows than columns would say nothing of most directions, and
with more than `WIDEST` columns a moment would be too large to keep: there the update is the exact one of each step.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from consequent.capture.use import Use
from consequent.maths.damping import Damping, Level
from consequent.statistics.average import WIDEST, Average, refreshed
from consequent.statistics.gradients import has_all_gradients
from consequent.statistics.kept_inverses import Kept, invert
from consequent.statistics.moment import Moment
from consequent.statistics.rows import Rows, moments_together
from consequent.statistics.solution import Solution
from consequent.statistics.statistic import Statistic, with_bias_of
from consequent.statistics.together import together

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


class Averages:
    """The averages of all weights, and when they are refreshed.

    Args:
        averaging: β, how much of the old average stays; 0: the last refreshed moment alone.
        refresh: T, in how many steps a weight's average is used.
    """

    def __init__(self, averaging: float, refresh: int) -> None:
        self.averaging = averaging
        self.refresh = refresh
        self._of: dict[Tensor, Average] = {}
        self._next: dict[Tensor, Average] = {}  # those of the step that is being solved for
        self._biases: dict[Tensor, list[Tensor]] = {}  # of all layers with each weight that is corrected

    @property
    def are_used(self) -> bool:
        """Otherwise each step's own moments are exact."""
        return self.averaging > 0 or self.refresh > 1

    def is_averaged(self, weight: Tensor) -> bool:
        """Whether there is an average of its inputs."""
        return weight in self._of

    def is_idle(self, use: Use) -> bool:
        """Whether a use's inputs need not be looked at in this step."""
        average = self._of.get(use.weight) if self._of else None
        if average is None or average.age >= self.refresh:
            return False
        return average.has(use.features, self._trained(use.weight, () if use.bias is None else (use.bias,)))

    def apply(self, records: Sequence["Record"], damping_of: Callable[["Record"], Damping]) -> None:
        """At the step: put what is to be solved with in the place of what the passes noted.

        The averages themselves change when the step is taken (:meth:`step_taken`).

        Args:
            records: of all weights, for all micro-batches and ranks.
            damping_of: λ.
        """
        self._next = {}
        seen = [record for record in records if record.statistic is not None and record.rows]
        averages = self._refreshed(seen, [self._known(record) for record in seen])
        solved = [
            one
            for record, average in zip(seen, averages, strict=True)
            if average is not None and (one := self._used(record, average, damping_of(record))) is not None
        ]
        _invert([one for one in solved if one.average.growth_for(one.rows, one.damping) is None])
        for record, average, rows, damping in solved:
            growth = average.growth_for(rows, damping)
            assert growth is not None
            assert average.inverses is not None
            known = record.captured
            of = (known.uses, known.features, known.biases, known.rows)
            record.statistic = Kept(*of, average.inverses, average.place, growth)

    def step_taken(self) -> None:
        """From now on the averages are those that the step was solved with."""
        self._of |= self._next
        self._next = {}

    def _known(self, record: "Record") -> Average | None:
        """The average so far, if what a record has seen goes with it."""
        statistic, average = record.captured, self._of.get(record.weight)
        if isinstance(statistic, Idle):
            if average is None:
                record.clear()  # another layer has taken the place of its layer since the backward pass
            return average
        if average is not None and not average.has(statistic.features, self._trained(record.weight, statistic.biases)):
            del self._of[record.weight]  # what is trained has changed: it begins anew
            return None
        return average

    def _refreshed(self, records: Sequence["Record"], averages: Sequence[Average | None]) -> list[Average | None]:
        """The averages with what the records have seen, if anything; None where there is none to solve with."""
        pairs = list(zip(records, averages, strict=True))
        few = [  # rows, but they go with others
            (record, rows)
            for record, average in pairs
            if isinstance(rows := record.statistic, Rows)
            and (average is not None or (self.averaging > 0 and record.columns <= WIDEST))
        ]
        for (record, _), summed in zip(few, moments_together([rows for _, rows in few]), strict=True):
            record.statistic = summed
        found = [average if isinstance(record.statistic, Moment | Idle) else None for record, average in pairs]
        numbers, moments = [], []
        for number, (record, _) in enumerate(pairs):
            if isinstance(moment := record.statistic, Moment) and record.weight in self._biases:
                numbers.append(number)
                moments.append(moment.with_biases(self._trained(record.weight, moment.biases)))
        new = refreshed([averages[number] for number in numbers], moments, self.averaging)
        for number, average in zip(numbers, new, strict=True):
            found[number] = average
        return found

    def _used(self, record: "Record", average: Average, damping: Damping) -> "_Averaged | None":
        """What a weight is solved with; None where it has been given its moment, to be solved with as it is."""
        average = self._next[record.weight] = replace(average, age=average.age + 1)
        statistic = record.captured
        rows, of = statistic.rows, (statistic.uses, statistic.features, statistic.biases, max(round(average.rows), 1))
        record.statistic = Idle(*of)
        if damping.value > 0 and average.is_ordered_as(statistic.biases) and has_all_gradients(record):
            return _Averaged(record, average, rows, damping)
        # Part of the matrix, or its pseudo-inverse.
        record.statistic = Moment(*of, average.moment_of(statistic.biases) * rows)
        return None

    def _trained(self, weight: Tensor, present: Sequence[Tensor] = ()) -> list[Tensor]:
        """The biases that an average has columns for: those that the step has, then those that it does without.

        Args:
            weight: whose.
            present: those that the step has; one that was frozen at first is known by this alone.
        """
        known = [bias for bias in self._biases.get(weight, ()) if bias.requires_grad]
        return [*present, *(bias for bias in known if not any(bias is one for one in present))]

    def average_only(self, biases: dict[Tensor, list[Tensor]]) -> None:
        """Only these weights are corrected from now on.

        Args:
            biases: of the layers with each weight, those that are corrected.
        """
        self._of = {weight: average for weight, average in self._of.items() if weight in biases}
        self._biases = biases

    def state_dict(self, weights: dict[str, tuple[Tensor, int, int]]) -> dict[str, Any]:
        """What a later run goes on from, by the names of the weights' layers; the biases in the model's order.

        An average begins anew where what is trained has changed since: it is left out.

        Args:
            weights: that of each layer by its name, its groups, and the columns of its inputs without those of biases.
        """
        names = {weight: name for name, (weight, *_) in reversed(weights.items())}  # the first of several
        kept = {}
        for weight, average in self._of.items():
            name = names.get(weight)
            still = [bias for bias in average.biases if bias.requires_grad]
            if name is not None and average.has(weights[name][2], self._trained(weight, still)):
                place = {bias: number for number, bias in enumerate(self._biases[weight])}
                in_order = sorted(average.biases, key=lambda bias: place.get(bias, len(place)))
                kept[name] = {"moment": average.moment_of(in_order), "rows": average.rows, "age": average.age}
        return kept

    def load_state_dict(self, state: dict[str, Any], weights: dict[str, tuple[Tensor, int, int]]) -> None:
        """Go on from a state.

        Args:
            state: of :meth:`state_dict`.
            weights: as there.
        """
        found: dict[Tensor, Average] = {}
        for name, saved in state.items():
            if name not in weights:
                raise ValueError(f"the state has an averaged moment of layer {name!r}, which is not corrected here")
            weight, groups, features = weights[name]
            biases = self._trained(weight)
            moment, columns = saved["moment"].to(weight.device), features + len(biases)
            if tuple(moment.shape) != (groups, columns, columns):
                raise ValueError(
                    f"the averaged moment of layer {name!r} is {list(moment.shape)}, but the layer's is "
                    f"{[groups, columns, columns]}: what is trained of it has changed"
                )
            found[weight] = Average(moment, float(saved["rows"]), features, tuple(biases), int(saved["age"]))
        self._of = found


class _Averaged(NamedTuple):
    """A weight that is solved for with its average.

    Attributes:
        record: of the weight.
        average: as it is in this step.
        rows: N.
        damping: λ.
    """

    record: "Record"
    average: Average
    rows: int
    damping: Damping


def _invert(averaged: Sequence[_Averaged]) -> None:
    """Invert ``N S + λI`` of these averages, those of one shape together."""

    def level_of(one: _Averaged) -> Level:
        return one.damping.level(max(round(one.average.rows), 1), one.average.moment.shape[-1])

    def kind(one: _Averaged) -> Hashable:
        moment = one.average.moment
        return moment.shape, moment.dtype, moment.device, level_of(one), one.rows

    # Weights of one shape follow each other.
    in_order = sorted(averaged, key=lambda one: tuple(one.record.weight.shape))
    for alike in together(in_order, kind, lambda one: one.average.moment.numel()):
        rows = alike[0].rows
        inverses = invert(torch.stack([one.average.moment for one in alike]).mul_(rows), level_of(alike[0]))
        for place, (_, average, _, damping) in enumerate(alike):
            average.inverses, average.place, average.of = inverses, place, (rows, damping)
