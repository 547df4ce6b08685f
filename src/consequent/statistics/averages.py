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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from consequent.capture.torch_internals import answers_at_once
from consequent.capture.use import Use
from consequent.maths.damping import Damping
from consequent.statistics.gradients import has_all_gradients, trace_of
from consequent.statistics.kept_inverses import Inverses, Kept, invert
from consequent.statistics.moment import Moment
from consequent.statistics.rows import Rows
from consequent.statistics.solution import Solution
from consequent.statistics.statistic import Statistic, with_bias_of

if TYPE_CHECKING:
    from consequent.capture.records import Record

WIDEST = 8192  # columns of a moment that is kept for a layer with fewer rows: 256 MiB in float32
AT_ONCE = WIDEST**2  # entries of moments that are inverted together, at most


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
        solved = [one for record in records if (one := self._averaged(record, damping_of(record))) is not None]
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

    def _averaged(self, record: "Record", damping: Damping) -> "_Averaged | None":
        """What a weight with an average is solved with; None where that is another thing, or no average."""
        statistic = record.statistic
        if statistic is None or not statistic.rows:
            return None
        average = self._of.get(record.weight)
        if isinstance(statistic, Idle) and average is None:
            record.clear()  # another layer has taken the place of its layer since the backward pass
            return None
        biases = self._trained(record.weight, statistic.biases)
        if average is not None and not isinstance(statistic, Idle) and not average.has(statistic.features, biases):
            average = None  # what is trained has changed: it begins anew
            del self._of[record.weight]
        if isinstance(statistic, Rows) and (average is not None or (self.averaging > 0 and record.columns <= WIDEST)):
            record.reduce(keep_rows=False)  # few rows, but they go with others
            statistic = record.captured
        if isinstance(statistic, Moment) and record.weight in self._biases:
            average = self._updated(average, statistic.with_biases(biases))
        if average is None or not isinstance(statistic, Moment | Idle):
            return None  # where a moment holds NaN or inf, the step is not taken
        average = self._next[record.weight] = replace(average, age=average.age + 1)
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

    def _updated(self, average: Average | None, moment: Moment) -> Average | None:
        """With the moment of a step; None where that holds NaN or inf.

        On a device that is not waited for, such a moment changes nothing; a first one is kept until the next refresh,
        and no step is taken then.
        """
        new = moment.matrix / moment.rows
        is_finite = _is_finite(new)
        if answers_at_once(new) and not is_finite:
            return None
        if average is None:
            return Average(new, moment.rows, moment.features, moment.biases)
        old = average.moment_of(moment.biases).to(new)  # the model may have another type by now
        rows = self.averaging * average.rows + moment.rows
        blended = torch.lerp(old, new, moment.rows / rows)
        blended = torch.where(_is_finite(old), torch.where(is_finite, blended, old), new)
        return Average(blended, rows, moment.features, moment.biases)

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
    kinds: dict[Any, list[_Averaged]] = {}
    for one in averaged:
        moment = one.average.moment
        level = one.damping.level(max(round(one.average.rows), 1), moment.shape[-1])
        most = max(1, AT_ONCE // moment.numel())
        kinds.setdefault((moment.shape, moment.dtype, moment.device, level, one.rows, most), []).append(one)
    for (*_, level, rows, most), alike in kinds.items():
        alike.sort(key=lambda one: tuple(one.record.weight.shape))  # weights of one shape follow each other
        for start in range(0, len(alike), most):
            members = alike[start : start + most]
            inverses = invert([one.average.moment * rows for one in members], level)
            for place, (_, average, _, damping) in enumerate(members):
                average.inverses, average.place, average.of = inverses, place, (rows, damping)


def _is_finite(moment: Tensor) -> Tensor:
    """Whether the moments hold neither NaN nor inf, all groups alike."""
    return trace_of(moment).sum().isfinite()
