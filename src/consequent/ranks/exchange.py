"""Between backward pass and correction: every rank's records become those of one process with all ranks' samples.

After :meth:`Exchange.complete` a record holds either the sum of all ranks' second moments, or the factor that one rank
made of it, or all ranks' rows, and the mathematics goes on as in one process. Each rank then comes to the same result,
as each optimiser does after ``DistributedDataParallel`` has averaged the gradients.

The hosts first tell each other how many rows they have for each layer; what is sent after that, and on which side each
layer is solved, follows from these numbers alone, so that all ranks do the same.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from consequent.capture.at_step import StepCorrector
from consequent.capture.capture import Capture
from consequent.capture.records import Record
from consequent.capture.torch_internals import version_of
from consequent.capture.use import Entry, Use
from consequent.layers import Operation, kind_of
from consequent.maths.damping import Damping
from consequent.maths.packed_triangle import packed, unpacked
from consequent.ranks.announcements import (
    IDLE,
    MISBEHAVES,
    MOMENT,
    NOTHING,
    ROWS,
    Block,
    Header,
    News,
    Shape,
    block_bytes,
    blocks_of,
    by_shape,
    difference,
    elements,
    key_of,
)
from consequent.ranks.factor_exchange import FactorExchange, Job
from consequent.ranks.ownership import Matrix, divided, rates_on
from consequent.ranks.process_group import Ranks
from consequent.ranks.traffic import (
    LayerTraffic,
    bytes_from_one,
    bytes_to_gather,
    bytes_to_sum,
    bytes_to_sum_at_one,
    in_buckets,
    packed_length,
)
from consequent.reports.reports import shown
from consequent.statistics.averages import Averages, Idle
from consequent.statistics.moment import Moment, moment_of
from consequent.statistics.rows import Rows


@dataclass
class _Plan:
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


class Exchange:
    """What the ranks of one correction tell each other at every step.

    Args:
        capture: this rank's layers.
        corrector: its records.
        ranks: all ranks.
        damping_of: λ for a parameter.
        averages: of moments, over steps.
        settings: what all ranks must agree on besides the layers, as text by name.
    """

    def __init__(
        self,
        capture: Capture,
        corrector: StepCorrector,
        ranks: Ranks,
        damping_of: Callable[[Tensor], Damping],
        averages: Averages,
        settings: Callable[[], dict[str, str]],
    ) -> None:
        self.ranks = ranks
        self._capture = capture
        self._corrector = corrector
        self._damping_of = damping_of
        self._averages = averages
        self._settings = settings
        self._agreed: int | None = None  # digest of what all ranks are attached to
        self._length = 0  # of the last header
        self._shapes: dict[int, tuple[Block, ...]] = {}  # that were told, by key
        self._headers: list[Header] = []

    # ---- what everyone has ------------------------------------------------------------------------------------------

    def open(self, failure: Exception | None) -> bool:
        """Tell the other ranks what was captured here, and hear from them.

        Args:
            failure: why this rank cannot take part, if it cannot.

        Returns:
            whether any rank has captured anything.
        """
        self.ranks.traffic.begin_step()
        digest, described = self._digest()
        if self._agreed is None:
            self._agree(digest, described, failure)
        header = self._header(digest, failure)
        numbers = header.numbers()
        if digest != self._agreed:  # of another length, perhaps: what the others expect is enough to say so
            numbers = (numbers + [0] * self._length)[: self._length]
        self._length = len(numbers)
        self._headers = [Header.read(theirs) for theirs in self.ranks.gather_numbers(numbers)]
        self._raise_failures(failure)
        if any(theirs.digest != self._agreed for theirs in self._headers):  # somebody's layers or settings changed
            self._agreed = None
            return self.open(None)
        self._learn_shapes(header)
        return any(news.form in (MOMENT, ROWS, IDLE) for theirs in self._headers for news in theirs.layers)

    @property
    def samples(self) -> int:
        """Samples that entered the model on all ranks together."""
        return sum(header.samples for header in self._headers)

    def _digest(self) -> tuple[int, dict[str, str]]:
        described = self._settings()
        for name, layer in self._capture.layers.items():
            weight, bias = self._capture.parameters_of(layer)
            trained = [
                f"{kind} {list(p.shape)}"
                for kind, p in (("weight", weight), ("bias", bias))
                if p is not None and self._is_trained(p)
            ]
            damping = self._damping_of(weight if weight.requires_grad or bias is None else bias)
            described[shown(name)] = f"{type(layer).__name__} ({', '.join(trained) or 'not trained'}), {damping}"
        return key_of(tuple(described.items())), described

    def _is_trained(self, parameter: Tensor) -> bool:
        return parameter.requires_grad and self._capture.wants(parameter)

    def _agree(self, digest: int, described: dict[str, str], failure: Exception | None) -> None:
        """All ranks must be attached to the same layers with the same settings; otherwise all of them raise."""
        answers = self.ranks.gather_numbers([digest, int(failure is not None)])
        if len({theirs for theirs, _ in answers}) > 1:
            everyones: list[dict[str, str]] = self.ranks.gather_objects(described)
            raise RuntimeError("the ranks disagree on what is corrected, and how: " + difference(everyones))
        self._agreed = digest
        self._headers = [Header(theirs, 0, failed, []) for theirs, failed in answers]
        self._raise_failures(failure)

    def _raise_failures(self, mine: Exception | None) -> None:
        if mine is not None:
            raise mine
        failed = [rank for rank, header in enumerate(self._headers) if header.failed]
        if failed:
            raise RuntimeError(f"rank {failed[0]} cannot correct this step, so no rank does; its own error says why")

    def _header(self, digest: int, failure: Exception | None) -> Header:
        count = len(self._capture.layers)
        if failure is not None:
            return Header(digest, 0, 1, [News(NOTHING, 0, 0, 0)] * count)
        news = []
        for layer in self._capture.layers.values():
            parameters = self._capture.parameters_of(layer)
            record = self._corrector.records.get(parameters[0])
            partial = int(any(p.grad is None for p in parameters if p is not None and self._is_trained(p)))
            if layer in self._capture.misbehaving:
                news.append(News(MISBEHAVES, 0, 0, 0))
                continue
            uses = [] if record is None else [use for use in record.uses if use.layer is layer]
            if record is None or not uses:
                news.append(News(NOTHING, 0, 0, 0, partial))
                continue
            rows, others = sum(use.rows for use in uses), int(bool(record.beside))
            if isinstance(record.statistic, Idle):
                news.append(News(IDLE, rows, 0, others, partial))
            elif isinstance(record.statistic, Moment):
                news.append(News(MOMENT, rows, 0, others, partial))
            else:
                news.append(News(ROWS, rows, key_of(blocks_of(uses)), others, partial))
        return Header(digest, self._capture.entries.count(self._corrector.passes()), 0, news)

    def _learn_shapes(self, mine: Header) -> None:
        """Ask for shapes that somebody has for the first time; everyone then knows the same ones."""
        keys = {news.shapes for header in self._headers for news in header.layers if news.has_rows}
        if keys <= self._shapes.keys():
            return
        told: dict[int, Any] = {}
        for layer, news in zip(self._capture.layers.values(), mine.layers, strict=True):
            if news.has_rows and news.shapes not in self._shapes:
                record = self._corrector.records[self._capture.parameters_of(layer)[0]]
                told[news.shapes] = blocks_of([use for use in record.uses if use.layer is layer])
        for theirs in self.ranks.gather_objects(told):
            self._shapes |= theirs

    # ---- completing -------------------------------------------------------------------------------------------------

    def complete(self, may_wait: Callable[[Tensor], bool]) -> list[Record]:
        """Make this rank's records those of all ranks.

        Args:
            may_wait: whether the host may wait for a tensor's device to look at a result.

        Returns:
            a record for each weight of which any rank has inputs.
        """
        self._share_misbehaving()
        plans = self._plans()
        self._share_out_factorisations(plans)
        for plan in plans:
            if plan.choice == "moment":
                self._prepare_moment(plan)
        jobs = [Job(plan.record, plan.owner, plan.damping, plan.rows) for plan in plans if plan.owner is not None]
        factors = FactorExchange(self.ranks, jobs, may_wait)
        moments = self._start_sums([plan for plan in plans if plan.is_summed])
        gathered = self._start_gathers([plan for plan in plans if plan.gathers])
        factors.factorise()
        for finish in (*moments, *gathered, factors.finish):
            finish()
        for plan in plans:
            known = replace(plan.record.captured, rows=plan.rows)
            if plan.choice == "nothing":  # also on a rank that had no rows
                known = Idle(known.uses, known.features, known.biases, plan.rows)
            plan.record.statistic = known
        return [plan.record for plan in plans]

    def _share_misbehaving(self) -> None:
        """A layer that is no matrix product on one rank stays plain on all."""
        for place, layer in enumerate(self._capture.layers.values()):
            if any(header.layers[place].form == MISBEHAVES for header in self._headers):
                self._capture.misbehaving.setdefault(layer, "on another rank, its forward is not what its class says")
                record = self._corrector.records.get(self._capture.parameters_of(layer)[0])
                if record is not None:
                    record.clear()

    def _plans(self) -> list[_Plan]:
        by_weight: dict[Tensor, list[int]] = {}
        names = list(self._capture.layers)
        for place, layer in enumerate(self._capture.layers.values()):
            if layer in self._capture.misbehaving or not any(h.layers[place].form for h in self._headers):
                continue
            by_weight.setdefault(self._capture.parameters_of(layer)[0], []).append(place)
        return [self._plan(weight, [names[place] for place in places], places) for weight, places in by_weight.items()]

    def _plan(self, weight: Tensor, names: list[str], places: list[int]) -> _Plan:
        record = self._whole_record(weight, [self._capture.layers[name] for name in names])
        news = [header.layers[place] for header in self._headers for place in places]
        rows, size = sum(one.rows for one in news), self.ranks.size
        damping = self._damping_of(record.first_use.key)
        all_have_rows = all(one.form != MOMENT for one in news)
        partial = any(one.partial for one in news)
        sizes: dict[str, int] = {}
        blocks: dict[str, list[list[Block]]] = {}
        if all_have_rows:
            for name, place in zip(names, places, strict=True):
                blocks[name] = [self._blocks(h.layers[place]) for h in self._headers]
        has_others = any(one.others for one in news)
        operation, columns = record.operation, record.columns
        item = torch.promote_types(weight.dtype, torch.float32).itemsize
        matrix = Matrix(operation.groups, columns, operation.groups * packed_length(columns) * item)
        if any(one.form == IDLE for one in news):
            side, choice, blocks = "features", "nothing", {}
        elif all_have_rows and (rows < columns or damping.value == 0):
            side, choice = "samples", "rows"
            sizes["rows"] = bytes_to_gather(size * self._longest(blocks, "inputs", "outputs"), size)
        else:
            side, choice = "features", "moment"
            sizes["moment"] = bytes_to_sum(matrix.bytes, size)
            if record.features:
                about = (
                    self._longest(blocks, "inputs") if all_have_rows else _about_inputs(operation, news, weight.dtype)
                )
                sizes["inputs"] = bytes_to_gather(size * about, size)
                record.keeps_inputs = sizes["inputs"] < sizes["moment"]  # from the next step on, if not now
                if all_have_rows and record.keeps_inputs:
                    choice = "inputs"
        traffic = LayerTraffic(" = ".join(map(shown, names)), side, rows, choice, sizes)
        self.ranks.traffic.layers.append(traffic)
        return _Plan(weight, names, record, rows, damping, matrix, traffic, has_others, partial, blocks)

    def _share_out_factorisations(self, plans: list[_Plan]) -> None:
        """Find an owner for every moment that one rank should factorise for all.

        Every rank needs the moment itself to solve with a part of it, with more on its diagonal, and without damping,
        and to average it.
        """
        plans = [
            plan
            for plan in plans
            if plan.choice == "moment"
            and not plan.has_others
            and not plan.partial
            and plan.damping.value > 0
            and not self._averages.are_used
        ]
        if not plans:
            return
        division = divided(tuple(plan.matrix for plan in plans), self.ranks.size, rates_on(plans[0].weight.device))
        self.ranks.traffic.seconds = {"shared": division.shared, "repeated": division.repeated}
        for plan, owner in zip(plans, division.owners, strict=True):
            plan.traffic.owner = owner
            if owner is not None:
                size, ranks = plan.matrix.bytes, self.ranks.size
                plan.traffic.bytes["moment"] = bytes_to_sum_at_one(size, ranks) + bytes_from_one(size, ranks)

    def _whole_record(self, weight: Tensor, used: list[nn.Module]) -> Record:
        """This rank's record, with columns for the biases that any rank has used, in an order common to all."""
        record = self._corrector.records.get(weight)
        if record is None:
            record = self._corrector.records[weight] = Record(weight)
        pairs = [self._capture.parameters_of(layer) for layer in used]
        biases = [bias for _, bias in pairs if bias is not None and self._is_trained(bias)]
        biases = list(dict.fromkeys(biases))
        trains_weight = self._is_trained(weight)
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

    def _blocks(self, news: News) -> list[Block]:
        if not news.has_rows:
            return []
        blocks = list(self._shapes[news.shapes])
        if len(blocks) == 1:  # how many is not in the key: it may change at every step
            blocks = [blocks[0]._replace(samples=blocks[0].shape.samples(news.rows))]
        return blocks

    def _longest(self, blocks: dict[str, list[list[Block]]], *kinds: str) -> int:
        """Bytes of the rank that has most: the others are filled up to it."""
        lengths = [0] * self.ranks.size
        for of_ranks in blocks.values():
            for rank, its_blocks in enumerate(of_ranks):
                lengths[rank] += sum(block_bytes(block, kind) for block in its_blocks for kind in kinds)
        return max(lengths)

    # ---- sums -------------------------------------------------------------------------------------------------------

    def _prepare_moment(self, plan: _Plan) -> None:
        """Reduce this rank's rows, for the sum of all ranks'."""
        record = plan.record
        if record.rows:
            record.reduce(keep_rows=False)
            return
        first, known = record.first_use, record.captured
        dtype, size = torch.promote_types(first.dtype, torch.float32), (record.columns, record.columns)
        matrix = torch.zeros(first.operation.groups, *size, dtype=dtype, device=record.weight.device)
        record.statistic = Moment(known.uses, known.features, known.biases, 0, matrix)

    def _start_sums(self, plans: list[_Plan]) -> list[Callable[[], None]]:
        """Start to add up moments (their triangles), and parts of gradients that do not come from the rows."""
        parts: list[_Part] = []
        for plan in plans:
            record = plan.record
            if plan.choice == "moment" and plan.owner is None:
                assert isinstance(record.statistic, Moment)
                parts.append(_Part(packed(record.statistic.matrix), _moment_taker(record)))
            if plan.has_others:
                parts += self._parts_of_others(record)
        buckets = in_buckets(
            parts, lambda part: part.tensor.nbytes, lambda part: (part.tensor.dtype, part.tensor.device)
        )
        return [self._start_sum(bucket) for bucket in buckets]

    def _parts_of_others(self, record: Record) -> "list[_Part]":
        """What came to the gradients otherwise, averaged over ranks as the gradients were, and as it is scaled now."""
        beside = record.beside
        scaled = beside.scaled_by(record.grads) if beside else None
        ratio = 1.0 if scaled is None else scaled[0]
        size = self.ranks.size

        def taker(parameter: Tensor) -> Callable[[Tensor], None]:
            def take(summed: Tensor) -> None:
                beside.others[parameter] = summed / size
                beside.note(record.grads)

            return take

        def take_transposed(summed: Tensor) -> None:
            beside.transposed = summed[0]

        def take_from_transposed(summed: Tensor) -> None:
            beside.from_transposed = summed / size

        parts = []
        for parameter in record.members:
            other = beside.others.get(parameter)
            parts.append(_Part(_numbers_of(parameter, other, ratio), taker(parameter)))
        parts.append(_Part(_numbers_of(record.weight, beside.from_transposed, ratio), take_from_transposed))
        transposed = torch.zeros((), device=record.weight.device) if beside.transposed is None else beside.transposed
        return [*parts, _Part(transposed.float().view(1), take_transposed)]

    def _start_sum(self, bucket: "list[_Part]") -> Callable[[], None]:
        flat = torch.cat([part.tensor.reshape(-1) for part in bucket])
        work = self.ranks.start_sum(flat)

        def finish() -> None:
            work.wait()
            for part, summed in zip(bucket, flat.split([part.tensor.numel() for part in bucket]), strict=True):
                part.take(summed.view(part.tensor.shape))

        return finish

    # ---- rows -------------------------------------------------------------------------------------------------------

    def _start_gathers(self, plans: list[_Plan]) -> list[Callable[[], None]]:
        """Start to gather all ranks' inputs, and on the sample side their output gradients, several weights at once."""
        buckets = in_buckets(
            plans,
            lambda plan: self._longest(plan.blocks, *plan.gathers),
            lambda plan: (plan.dtype, plan.weight.device),
        )
        return [self._start_gather(bucket) for bucket in buckets]

    def _start_gather(self, plans: list[_Plan]) -> Callable[[], None]:
        lengths = [
            sum(
                elements(b, kind)
                for plan in plans
                for its in plan.blocks.values()
                for b in its[rank]
                for kind in plan.gathers
            )
            for rank in range(self.ranks.size)
        ]
        mine = torch.zeros(max(lengths), dtype=plans[0].dtype, device=plans[0].weight.device)
        parts = [part for plan in plans for part in self._own_parts(plan)]
        if parts:
            torch.cat(parts, out=mine[: lengths[self.ranks.rank]])
        everyones = mine.new_empty(self.ranks.size * len(mine))
        work = self.ranks.start_gather(everyones, mine)

        def finish() -> None:
            work.wait()
            places = [0] * self.ranks.size
            for plan in plans:
                self._take_gathered(plan, everyones.view(self.ranks.size, -1), places)

        return finish

    def _own_parts(self, plan: _Plan) -> list[Tensor]:
        """What this rank sends, as the other ranks expect it by its shapes."""
        parts = []
        for name in plan.names:
            layer = self._capture.layers[name]
            uses = [use for use in plan.record.uses if use.layer is layer and use.output_grad is not None]
            for shape, same in by_shape(uses).items():
                parts += [_flat(same, shape, kind, plan.dtype) for kind in plan.gathers if getattr(shape, kind)]
        return parts

    def _take_gathered(self, plan: _Plan, everyones: Tensor, places: list[int]) -> None:
        """Let all ranks' rows be the record's.

        Args:
            plan: of the record.
            everyones: ``[ranks, numbers]``.
            places: where each rank's numbers for this record begin; moved on to where they end.
        """
        uses: list[Use] = []
        record, first = plan.record, plan.record.first_use
        for name in plan.names:
            layer = self._capture.layers[name]
            found: dict[Shape, dict[str, list[Tensor]]] = {}
            for rank, blocks in enumerate(plan.blocks[name]):
                for block in blocks:
                    parts = found.setdefault(block.shape, {kind: [] for kind in plan.gathers})
                    for kind in plan.gathers:
                        size, shape = elements(block, kind), getattr(block.shape, kind)
                        numbers = everyones[rank, places[rank] : places[rank] + size]
                        places[rank] += size
                        if shape:
                            parts[kind].append(numbers.view(block.samples, *shape))
            bias = self._capture.parameters_of(layer)[1]
            bias = bias if any(bias is one for one in record.biases) else None
            for shape, parts in found.items():
                tensors = {kind: _joined(parts[kind]) for kind in plan.gathers}
                uses.append(self._gathered_use(layer, shape.operation, record, bias, tensors))
        if plan.choice == "rows":
            record.statistic = replace(record.captured, uses=tuple(uses))
            return
        matrix = moment_of(uses, record.features, record.biases)
        record.statistic = Moment((first,), record.features, record.biases, plan.rows, matrix)

    def _gathered_use(
        self,
        layer: nn.Module,
        operation: Operation,
        record: Record,
        bias: Tensor | None,
        tensors: dict[str, Tensor | None],
    ) -> Use:
        inputs, output_grad = tensors["inputs"], tensors.get("outputs")
        dtype = next(tensor.dtype for tensor in tensors.values() if tensor is not None)
        rows = 0 if output_grad is None else operation.rows(output_grad)
        use = Use(layer, operation, record.weight, bias, record.features > 0, Entry(layer, 0, 0), rows, dtype)
        use.inputs, use.inputs_version = inputs, -1 if inputs is None else version_of(inputs)
        if output_grad is not None:
            # The wrapper averages gradients over ranks, and so divides them by their number. Any other factor is found
            # by comparing with the gradient, which costs more. So is this one in half precision, where it would round.
            use.output_grad = output_grad.mul_(1 / self.ranks.size) if dtype.itemsize >= 4 else output_grad
        return use


# ---- tensors --------------------------------------------------------------------------------------------------------


def _flat(uses: list[Use], shape: Shape, kind: str, dtype: torch.dtype) -> Tensor:
    tensors = [use.inputs if kind == "inputs" else use.output_grad for use in uses]
    like = getattr(shape, kind)
    return torch.cat([tensor.reshape(-1, *like).to(dtype) for tensor in tensors if tensor is not None]).flatten()


def _joined(parts: list[Tensor]) -> Tensor | None:
    return torch.cat(parts) if parts else None


def _about_inputs(operation: Operation, news: list[News], dtype: torch.dtype) -> int:
    """Bytes of the largest rank's inputs, about: what is reduced already has no shape any more."""
    rows = max(one.rows for one in news)
    return rows * operation.inputs_per_row * dtype.itemsize


def _numbers_of(parameter: Tensor, part: Tensor | None, ratio: Tensor | float) -> Tensor:
    """A part of a parameter's gradient, in float32 or better, as it is scaled now; zeros where there is none."""
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    if part is None:
        return torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
    return part.to(dtype) * ratio


class _Part(NamedTuple):
    """A tensor that is added up, and who takes the sum."""

    tensor: Tensor
    take: Callable[[Tensor], None]


def _moment_taker(record: Record) -> Callable[[Tensor], None]:
    size = record.columns

    def take(summed: Tensor) -> None:
        known = record.captured
        record.statistic = Moment(known.uses, known.features, known.biases, known.rows, unpacked(summed, size))

    return take
