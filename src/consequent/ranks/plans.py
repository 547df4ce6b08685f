"""What is going to be sent of each weight, and on which side it is solved: it follows from what everyone has told."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor, nn

from consequent.capture.at_step import StepCorrector
from consequent.capture.capture import Capture
from consequent.capture.records import Record
from consequent.capture.use import Entry, Use
from consequent.layers import Operation, kind_of
from consequent.maths.damping import Damping
from consequent.ranks.announcements import IDLE, MOMENT, Block, News, block_bytes
from consequent.ranks.opening import Opening
from consequent.ranks.ownership import Matrix, divided, rates_on
from consequent.ranks.process_group import Ranks
from consequent.ranks.traffic import (
    LayerTraffic,
    bytes_from_one,
    bytes_to_gather,
    bytes_to_sum,
    bytes_to_sum_at_one,
    packed_length,
)
from consequent.reports.reports import shown
from consequent.statistics.moment import Moment
from consequent.statistics.rows import Rows


@dataclass
class Plan:
    """One weight, what all ranks have of its inputs, and what is going to be sent."""

    weight: Tensor
    names: list[str]  # of the layers that use it and have rows on any rank, in the order of the model
    record: Record
    rows: int
    damping: Damping
    matrix: Matrix  # the moment
    traffic: LayerTraffic
    has_others: bool  # the gradient has parts that do not come from the rows, on some rank
    partial: bool  # a rank has no gradient for some of the moment's columns
    blocks: dict[str, list[list[Block]]]  # by layer and rank, where all ranks have rows

    @property
    def choice(self) -> str:
        """What is sent."""
        return self.traffic.choice

    @property
    def owner(self) -> int | None:
        """Which rank alone factorises the moment, if one does."""
        return self.traffic.owner

    @property
    def is_summed(self) -> bool:
        """Whether something of it is added up at every rank."""
        return self.has_others or (self.choice == "moment" and self.owner is None)

    @property
    def gathers(self) -> tuple[str, ...]:
        """What of each block is gathered."""
        return {"inputs": ("inputs",), "rows": ("inputs", "outputs")}.get(self.choice, ())

    @property
    def dtype(self) -> torch.dtype:
        """In which they are gathered: the ranks' own, or one that holds all of theirs."""
        dtypes = {block.shape.dtype for of_ranks in self.blocks.values() for its in of_ranks for block in its}
        return reduce(torch.promote_types, dtypes) if dtypes else self.weight.dtype


class Planner:
    """Makes the plans of a step.

    Args:
        capture: this rank's layers.
        corrector: its records.
        ranks: all ranks.
        opening: what everyone has.
        damping_of: λ for a parameter.
    """

    def __init__(
        self,
        capture: Capture,
        corrector: StepCorrector,
        ranks: Ranks,
        opening: Opening,
        damping_of: Callable[[Tensor], Damping],
    ) -> None:
        self._capture = capture
        self._corrector = corrector
        self._ranks = ranks
        self._opening = opening
        self._damping_of = damping_of

    def plans(self) -> list[Plan]:
        """One for each weight of which any rank has inputs."""
        by_weight: dict[Tensor, list[int]] = {}
        names = list(self._capture.layers)
        for place, layer in enumerate(self._capture.layers.values()):
            if layer in self._capture.misbehaving or not any(h.layers[place].form for h in self._opening.headers):
                continue
            by_weight.setdefault(self._capture.parameters_of(layer)[0], []).append(place)
        return [self._plan(weight, [names[place] for place in places], places) for weight, places in by_weight.items()]

    def _plan(self, weight: Tensor, names: list[str], places: list[int]) -> Plan:
        record = self._whole_record(weight, [self._capture.layers[name] for name in names])
        news = [header.layers[place] for header in self._opening.headers for place in places]
        rows, size = sum(one.rows for one in news), self._ranks.size
        damping = self._damping_of(record.first_use.key)
        all_have_rows = all(one.form != MOMENT for one in news)
        partial = any(one.partial for one in news)
        sizes: dict[str, int] = {}
        blocks: dict[str, list[list[Block]]] = {}
        if all_have_rows:
            for name, place in zip(names, places, strict=True):
                blocks[name] = [self._opening.blocks(h.layers[place]) for h in self._opening.headers]
        has_others = any(one.others for one in news)
        operation, columns = record.operation, record.columns
        item = torch.promote_types(weight.dtype, torch.float32).itemsize
        matrix = Matrix(operation.groups, columns, operation.groups * packed_length(columns) * item)
        if any(one.form == IDLE for one in news):
            side, choice, blocks = "features", "nothing", {}
        elif all_have_rows and (rows < columns or damping.value == 0):
            side, choice = "samples", "rows"
            sizes["rows"] = bytes_to_gather(size * longest(blocks, size, "inputs", "outputs"), size)
        else:
            side, choice = "features", "moment"
            sizes["moment"] = bytes_to_sum(matrix.bytes, size)
            if record.features:
                about = (
                    longest(blocks, size, "inputs") if all_have_rows else _about_inputs(operation, news, weight.dtype)
                )
                sizes["inputs"] = bytes_to_gather(size * about, size)
                record.keeps_inputs = sizes["inputs"] < sizes["moment"]  # from the next step on, if not now
                if all_have_rows and record.keeps_inputs:
                    choice = "inputs"
        traffic = LayerTraffic(" = ".join(map(shown, names)), side, rows, choice, sizes)
        self._ranks.traffic.layers.append(traffic)
        return Plan(weight, names, record, rows, damping, matrix, traffic, has_others, partial, blocks)

    def _whole_record(self, weight: Tensor, used: list[nn.Module]) -> Record:
        """This rank's record, with columns for the biases that any rank has used, in an order common to all."""
        record = self._corrector.records.get(weight)
        if record is None:
            record = self._corrector.records[weight] = Record(weight)
        pairs = [self._capture.parameters_of(layer) for layer in used]
        biases = [bias for _, bias in pairs if bias is not None and self._opening.is_trained(bias)]
        biases = list(dict.fromkeys(biases))
        trains_weight = self._opening.is_trained(weight)
        if record.is_empty:
            bias = pairs[0][1] if any(pairs[0][1] is bias for bias in biases) else None
            record.statistic = Rows.of(self._use_of_nothing(used[0], weight, bias, trains_weight=trains_weight))
        if isinstance(record.statistic, Moment):
            record.statistic = record.statistic.with_biases(biases)
        else:
            record.statistic = replace(record.captured, biases=tuple(biases))
        return record

    def _use_of_nothing(self, layer: nn.Module, weight: Tensor, bias: Tensor | None, *, trains_weight: bool) -> Use:
        kind = kind_of(layer)
        assert kind is not None
        operation = kind.of(layer).canonical_form
        return Use(layer, operation, weight, bias, trains_weight, Entry(layer, 0, 0), 0, weight.dtype)


def share_out_factorisations(plans: list[Plan], ranks: Ranks) -> None:
    """Find an owner for every moment that one rank should factorise for all.

    Every rank needs the moment itself to solve with a part of it, with more on its diagonal, and without damping,
    and to average it.
    """
    plans = [
        plan
        for plan in plans
        if plan.choice == "moment" and not plan.has_others and not plan.partial and plan.damping.value > 0
    ]
    if not plans:
        return
    division = divided(tuple(plan.matrix for plan in plans), ranks.size, rates_on(plans[0].weight.device))
    ranks.traffic.seconds = {"shared": division.shared, "repeated": division.repeated}
    for plan, owner in zip(plans, division.owners, strict=True):
        plan.traffic.owner = owner
        if owner is not None:
            size = plan.matrix.bytes
            plan.traffic.bytes["moment"] = bytes_to_sum_at_one(size, ranks.size) + bytes_from_one(size, ranks.size)


def longest(blocks: dict[str, list[list[Block]]], ranks: int, *kinds: str) -> int:
    """Bytes of the rank that has most: the others are filled up to it."""
    lengths = [0] * ranks
    for of_ranks in blocks.values():
        for rank, its_blocks in enumerate(of_ranks):
            lengths[rank] += sum(block_bytes(block, kind) for block in its_blocks for kind in kinds)
    return max(lengths)


def _about_inputs(operation: Operation, news: list[News], dtype: torch.dtype) -> int:
    """Bytes of the largest rank's inputs, about: what is reduced already has no shape any more."""
    rows = max(one.rows for one in news)
    return rows * operation.inputs_per_row * dtype.itemsize
