"""The inputs of units of several parameters (:mod:`consequent.layers.joint`), solved for by their plain gradients."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from consequent.capture.edits import rounding
from consequent.capture.use import JointUse, Use
from consequent.layers.joint import Part
from consequent.layers.linear import Linear
from consequent.maths.bound import Change
from consequent.maths.damping import Damping
from consequent.maths.few_rows import solve_in_span
from consequent.maths.precision import in_full_precision
from consequent.statistics.gradients import dot, factor_since
from consequent.statistics.moment import solve_with_moment
from consequent.statistics.solution import Solution
from consequent.statistics.statistic import Statistic

if TYPE_CHECKING:
    from consequent.capture.records import Record


@dataclass(frozen=True, eq=False)
class Inputs:
    """One of a unit's inputs, of all uses: the rows, or their second moment.

    Attributes:
        features: columns, without the constant 1.
        rows: how many there are.
        tensors: ``[rows, features]`` each, where they are kept;
        copied: how many of them are copies, which nobody else writes to.
        moment: ``[features + 1, features + 1]``, that of rows with a last entry 1, where it stands for them.
    """

    features: int
    rows: int
    tensors: tuple[Tensor, ...] = ()
    copied: int = 0
    moment: Tensor | None = None

    @classmethod
    def of(cls, tensor: Tensor) -> "Inputs":
        """Those of one use."""
        return cls(tensor.shape[1], tensor.shape[0], (tensor,))

    def add(self, other: "Inputs") -> "Inputs":
        """With more rows."""
        moment = self.moment
        if moment is not None:
            moment = moment + _moment(other.tensors)
            return replace(self, rows=self.rows + other.rows, moment=moment)
        return replace(self, rows=self.rows + other.rows, tensors=(*self.tensors, *other.tensors))

    def reduced(self) -> "Inputs":
        """Their moment stands for them, where that is smaller."""
        if self.moment is not None:
            return self
        if self.rows <= self.features:
            return self.kept()
        return replace(self, tensors=(), moment=_moment(self.tensors))

    def kept(self) -> "Inputs":
        """Copies of them, which may be written to before the step comes."""
        copies = tuple(tensor.clone() for tensor in self.tensors[self.copied :])
        return replace(self, tensors=(*self.tensors[: self.copied], *copies), copied=len(self.tensors))

    def moment_of(self, columns: "Columns", *, exact: bool) -> Tensor:
        """``[columns, columns]``, in float32 or better; in float64 where it is to be exact and rows are kept."""
        moment = self.moment
        if moment is None:
            moment = _moment([tensor.double() for tensor in self.tensors] if exact else self.tensors)
        return _cut(_cut(moment, columns).mT, columns)

    def rows_of(self, columns: "Columns") -> Tensor:
        """``[rows, columns]``, of rows that are kept."""
        whole = torch.cat(self.tensors)
        return _cut(torch.cat([whole, whole.new_ones(len(whole), 1)], dim=1), columns)


Columns = tuple[tuple[int, int], ...]  # the first and the one behind the last, of several intervals


def _cut(matrix: Tensor, columns: Columns) -> Tensor:
    """Some columns of it, copied."""
    return torch.cat([matrix[:, first:last] for first, last in columns], dim=1)


def _number(columns: Columns) -> int:
    return sum(last - first for first, last in columns)


def _moment(tensors: Sequence[Tensor]) -> Tensor:
    rows = torch.cat(tuple(tensors))
    features = rows.shape[1]
    return Linear(1, features, 0, (0, features)).second_moment(rows, ones=True)[0]


@dataclass(frozen=True, eq=False)
class JointInputs(Statistic):
    """All inputs of a unit.

    Attributes:
        inputs: each of them once; where the module was given one tensor for several, they are one.
        places: for each of the unit's inputs, which of these it is.
    """

    inputs: tuple[Inputs, ...] = ()
    places: tuple[int, ...] = ()

    @classmethod
    def of(cls, use: Use) -> "JointInputs":
        """Those of one use."""
        assert isinstance(use, JointUse)
        different = list({id(tensor): tensor for tensor in use.met}.values())
        places = tuple(next(n for n, one in enumerate(different) if one is tensor) for tensor in use.met)
        return cls((use,), use.features, (), use.rows, tuple(map(Inputs.of, different)), places)

    def add(self, use: Use) -> "JointInputs":
        """With one use more."""
        more = JointInputs.of(use)
        pairs = list(dict.fromkeys(zip(self.places, more.places, strict=True)))
        inputs = tuple(self.inputs[mine].add(more.inputs[theirs]) for mine, theirs in pairs)
        places = tuple(pairs.index(pair) for pair in zip(self.places, more.places, strict=True))
        return replace(self, uses=(*self.uses, use), rows=self.rows + use.rows, inputs=inputs, places=places)

    @in_full_precision
    def reduced(self, damping: Damping) -> "JointInputs":
        """Moments stand for rows where these are many; not without damping, which asks for all digits."""
        return replace(self, inputs=tuple(one.reduced() if damping.value else one.kept() for one in self.inputs))

    @property
    def use(self) -> JointUse:
        """One of them; all have the same parameters and parts."""
        use = self.uses[0]
        assert isinstance(use, JointUse)
        return use

    @property
    def members(self) -> list[Tensor]:
        """The parameters that are solved for together."""
        return [parameter for parameter in self.use.parameters if parameter is not None]

    def solve(self, record: "Record", damping: Damping, *, may_wait: bool) -> Solution:
        """``G (XXᵀ + λI)⁻¹`` of each part: takes the gradients as they are, scaled, clipped or averaged.

        With fewer rows than columns, what rows do not explain is only shortened, and counts as edited.
        """
        gradients = [None if parameter is None else parameter.grad for parameter in self.use.parameters]
        others: dict[Tensor, Tensor] = {}
        factor = factor_since(record, may_wait=may_wait) if record.beside.others else None
        if factor is not None:
            others = {p: other * factor.to(other.dtype) for p, other in record.beside.others.items()}
        explained = [
            gradient - others[parameter] if gradient is not None and parameter in others else gradient
            for parameter, gradient in zip(self.use.parameters, gradients, strict=True)
        ]
        solved = self.solve_for(explained, damping, may_wait=may_wait)
        edited: bool | Tensor = False
        if solved.outside is not None:
            edited = solved.outside > rounding(record)
            edited = bool(edited) if may_wait else edited.long()
        return JointSolution(
            record,
            solved.side,
            solved.finite,
            rescued=solved.rescued,
            fallen_back=solved.fallen_back,
            change=solved.change,
            edited=edited,
            new={p: new for p, new in zip(self.use.parameters, solved.gradients, strict=True) if p is not None},
            left=others,
        )

    def solve_for(self, gradients: Sequence[Tensor | None], damping: Damping, *, may_wait: bool) -> "JointSolved":
        """New gradients of the unit's parameters.

        Args:
            gradients: the plain ones; None where there is none.
            damping: λ, of each part by itself.
            may_wait: whether the host may wait for the device to look at a result.
        """
        new = [None if gradient is None else torch.zeros_like(gradient) for gradient in gradients]
        alike: dict[tuple[int, Columns], list[Part]] = {}  # they have a matrix in common
        for part in self.use.parts:
            place = self.places[part.inputs]
            columns = part.columns(gradients, self.inputs[place].features)
            if columns:
                alike.setdefault((place, columns), []).append(part)
        results = []
        for (place, columns), parts in alike.items():
            G = torch.cat([part.gradient(gradients) for part in parts])
            one = _solved(self.inputs[place], columns, G, damping, may_wait=may_wait)
            results.append(one)
            for part, rows in zip(parts, one.gradient.split([part.outputs for part in parts]), strict=True):
                part.put(rows, gradients, new)
        return _joined(new, results)


class _Solved(NamedTuple):
    """That of parts with a matrix in common."""

    gradient: Tensor
    side: str
    finite: bool | Tensor
    rescued: int | Tensor
    fallen_back: int | Tensor
    excess: Tensor  # energy, in units of the trace and of outputs per column
    outside: Tensor | None = None  # how much of the gradient the rows do not explain; None where nobody looked


class JointSolved(NamedTuple):
    """What was found for a unit; attributes as those of :class:`consequent.statistics.solution.Solution`."""

    gradients: list[Tensor | None]
    side: str
    finite: bool | Tensor
    rescued: int | Tensor
    fallen_back: int | Tensor
    change: Change | None
    outside: Tensor | None  # how much of the gradients the rows do not explain; None where nobody looked


def _solved(inputs: Inputs, columns: Columns, G: Tensor, damping: Damping, *, may_wait: bool) -> _Solved:
    number = _number(columns)
    if inputs.moment is None and inputs.rows < number:
        found = solve_in_span(inputs.rows_of(columns), G, damping.level(inputs.rows, number))
        finite: bool | Tensor = found.gradient.sum().isfinite()
        excess = _excess(found.gradient, G, found.trace)
        finite = bool(finite) if may_wait else finite
        return _Solved(found.gradient, "samples", finite, 0, 0, excess, found.outside)
    moment = inputs.moment_of(columns, exact=damping.value == 0)
    G = G.to(moment.dtype)
    trace = moment.diagonal().sum()
    solved = solve_with_moment(moment[None], G[None], inputs.rows, damping, may_wait=may_wait)
    new = solved.gradient[0]
    return _Solved(new, "features", solved.finite, solved.rescued, solved.fallen_back, _excess(new, G, trace))


def _excess(new: Tensor, gradient: Tensor, trace: Tensor) -> Tensor:
    outputs, columns = new.shape
    return dot(new, gradient) / (trace * (outputs / columns)).clamp(min=torch.finfo(new.dtype).tiny)


def _joined(new: list[Tensor | None], results: list[_Solved]) -> JointSolved:
    """What the parts came to; the one that changes its outputs most speaks for all."""
    sides = {result.side for result in results}
    finite: bool | Tensor = True
    for result in results:
        finite = result.finite if finite is True else finite & result.finite
    rescued, fallen_back = sum(r.rescued for r in results), sum(r.fallen_back for r in results)
    change = None
    if results:
        excess = torch.stack([result.excess.double() for result in results]).amax()
        change = Change(excess, torch.ones_like(excess), 1.0)
    side = "samples" if sides == {"samples"} else "features"
    outsides = [result.outside for result in results if result.outside is not None]
    outside = torch.stack(outsides).amax() if outsides else None
    return JointSolved(new, side, finite, rescued, fallen_back, change, outside)


@dataclass
class JointSolution(Solution):
    """New gradients of a unit.

    Attributes:
        new: by parameter.
        left: by parameter, what stays as it is.
    """

    new: dict[Tensor, Tensor | None] = field(default_factory=dict)
    left: dict[Tensor, Tensor] = field(default_factory=dict)

    def write(self, finite: bool | Tensor) -> None:
        """Put them in the place of the old ones; zeros unless finite."""
        for parameter, gradient in self.new.items():
            if gradient is None or parameter.grad is None:
                continue
            gradient = gradient * self.scale
            if parameter in self.left:
                gradient = gradient + self.left[parameter]
            if finite is not True:
                assert isinstance(finite, Tensor)
                gradient = torch.where(finite.to(gradient.device), gradient, 0)
            parameter.grad.copy_(gradient)
