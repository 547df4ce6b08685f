"""Factorising ahead: on a GPU, second moments and their factors are computed beside the rest of the backward pass.

What a layer's factorisation needs, its inputs, is known when the backward pass reaches the layer; the gradient that it
is applied to is final only at the step. In between, backpropagation through the layers before it keeps the GPU partly
busy at best. Layers of one shape go together, as many as a little memory has room for: the host launches once for all
of them, and from their third step on by a recording of the launches (:mod:`consequent.engines.gpu.recordings`). Large
matrices, each of which is a long chain of small steps for a few multiprocessors, wait for others of their size,
whatever their inputs; so do those of dense layers.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from consequent.capture.torch_internals import graph_is_being_captured
from consequent.engines.gpu import kernels
from consequent.engines.gpu.batches import Batches
from consequent.engines.gpu.recordings import GraphRecorder, Replays, Work
from consequent.engines.gpu.streams import side_stream, switched_to
from consequent.engines.inverse_factor import InverseFactor, inverse_factor
from consequent.maths.damping import Damping
from consequent.maths.precision import in_full_precision
from consequent.statistics.moment import Moment
from consequent.statistics.rows import Rows

if TYPE_CHECKING:
    from consequent.capture.records import Record

MOST_TOGETHER = 8  # layers in a batch


@dataclass(frozen=True)
class Room:
    """Bytes that what waits may hold on to: a share of what a pass is given in all, within limits.

    Large batches cost the host less, and memory more. In a CUDA graph, where nothing is launched late, larger ones
    leave the backward pass more of the device.
    """

    least: int
    most: int
    share: int  # what is given is divided by this,
    share_in_graph: int  # or by this in a CUDA graph

    def within(self, given: int, *, in_graph: bool) -> int:
        """The bytes that may be held on to, of so many that are given."""
        share = self.share_in_graph if in_graph else self.share
        return min(max(given // share, self.least), self.most)


FOR_INPUTS = Room(11 * 2**20, 64 * 2**20, 64, 4)  # and what it takes to factorise their moments, unless these wait
FOR_LARGE_MOMENTS = Room(64 * 2**20, 2**30, 8, 4)  # and what it takes to factorise them

LARGE = 640  # features from which on a moment waits for others of its size; that of a dense layer always does

# Bytes of inputs, and for factors, that are recorded: more keeps the GPU busy for longer than the host.
MOST_INPUTS_RECORDED, MOST_FACTORS_RECORDED = 2**28, 2**30
SHARE_OF_RESULTS = 32  # recordings may keep the device's memory divided by this for what they compute


@dataclass(slots=True)
class _Task:
    """A layer's inputs, and what is to become of them."""

    record: "Record"
    inputs: Tensor | None  # None once there is a moment
    ready: torch.cuda.Event  # when the inputs are there
    damping: Damping
    is_factorised: bool  # not where moments of other uses or of other ranks are still to be added
    kind: Hashable  # what tasks must have in common for their moments to be computed together,
    kind_of_moment: Hashable  # and to be factorised together
    bytes_of_factor: int  # about, with what it takes to compute it

    @property
    def is_done_in_one_go(self) -> bool:
        """Whether the moment is factorised together with those that were computed together: small ones of images.

        Dense layers gain nothing from being summed up together.
        """
        return self.record.columns <= LARGE and not self.record.operation.is_dense

    def become(self, moment: Tensor, factor: tuple[Damping, InverseFactor] | None) -> None:
        """Let this moment, and its factor if there is one, stand for the layer's rows."""
        known = self.record.captured
        for use in known.uses:
            use.let_go()
        self.record.statistic = Moment(known.uses, known.features, known.biases, known.rows, moment, factor)


class Ahead:
    """Records whose moments are computed, and factorised, beside the backward pass.

    Args:
        factorises: not where the moments of other ranks or of other steps are still to be added.
    """

    def __init__(self, *, factorises: bool = True) -> None:
        self.factorises = factorises
        self._devices: dict[torch.device, _Beside] = {}

    def takes(self, record: "Record") -> bool:
        """Whether the record's moment can wait and be computed with others: one use, on a GPU with kernels."""
        if len(record.uses) != 1 or not isinstance(record.statistic, Rows):
            return False
        inputs = record.uses[0].inputs
        return inputs is not None and inputs.numel() > 0 and kernels.run_on(inputs.device)

    def add(self, record: "Record", damping: Damping) -> None:
        """Reduce the record soon, with others of its kind.

        Args:
            record: one that :meth:`takes` approves of.
            damping: λ, to factorise the moment with.
        """
        inputs = record.uses[0].inputs
        assert inputs is not None
        beside = self._devices.get(inputs.device)
        if beside is None:
            beside = self._devices[inputs.device] = _Beside(inputs.device)
        beside.add(record, inputs, damping, is_factorised=self.factorises and record.usual_uses == 1)

    def join(self) -> None:
        """The backward pass is over: let the current streams wait for all that was added; the host does not wait."""
        for beside in self._devices.values():
            beside.join(ends_pass=True)

    def join_on(self, device: torch.device) -> None:
        """The same on one device, and the backward pass goes on."""
        if device in self._devices:
            self._devices[device].join(ends_pass=False)

    def forget(self) -> None:
        """Drop what waits: its gradients are gone."""
        for beside in self._devices.values():
            beside.forget()


class _Beside:
    """What is done beside the backward pass on one device.

    There are two streams, one for moments and one for factors, so that the next batch's moments need not wait for this
    one's factors. Factors are one after the other, as their programs wait for each other: two such launches might each
    have half of the device. So recordings that have both are replayed on the second.

    Recordings put their results where they were the last time. By then everybody is done with those: the step, which
    reads them, is launched behind :meth:`join`, the next forward pass behind the step, and all of this behind that.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._inputs: Batches[_Task] = Batches(MOST_TOGETHER)
        self._moments: Batches[_Task] = Batches(MOST_TOGETHER)  # large ones, to be factorised
        self._began: torch.cuda.Event | None = None  # the backward pass: when the forward pass was over
        self._in_graph = False  # the backward pass is captured in a CUDA graph of the user's
        self._busy: set[torch.cuda.Stream] = set()  # side streams that have been given something
        self._fresh: list[Tensor] = []  # results whose memory is given back after the step
        self._given = 0  # bytes that it took for all that was added,
        self._given_before = 0  # and in the last pass

    def add(self, record: "Record", inputs: Tensor, damping: Damping, *, is_factorised: bool) -> None:
        if self._began is None:
            self._began = torch.cuda.current_stream(self._device.index).record_event()
            self._in_graph = graph_is_being_captured()
        # The inputs wait since the forward pass, unless they were recomputed or brought back now. So a CUDA graph, in
        # which the host's order means nothing, can do all of this in the shadow of the whole backward pass.
        stayed = record.uses[0].inputs_stayed
        ready = self._began if stayed else torch.cuda.current_stream(self._device.index).record_event()
        groups, dtype = record.operation.groups, inputs.dtype
        kind = (
            record.operation,
            record.uses[0].bias is not None,
            inputs.shape,
            inputs.stride(),
            dtype,
            damping,
            is_factorised,
        )
        kind_of_moment = (groups, record.columns, dtype, damping, record.rows if damping.relative else None)
        bytes_of_factor = 20 * groups * record.columns**2
        task = _Task(record, inputs, ready, damping, is_factorised, kind, kind_of_moment, bytes_of_factor)
        self._given += inputs.nbytes + bytes_of_factor
        room = FOR_INPUTS.within(self._given_before, in_graph=self._in_graph)
        size = inputs.nbytes + (bytes_of_factor if task.is_done_in_one_go else 0)
        for batch in self._inputs.add(kind, task, size, room):
            self._sum_up(batch)

    def join(self, *, ends_pass: bool) -> None:
        if self._began is None:
            return
        for batch in self._inputs.end_round() if ends_pass else self._inputs.flush():
            self._sum_up(batch)
        for batch in self._moments.end_round() if ends_pass else self._moments.flush():
            self._factorise(batch)
        current = torch.cuda.current_stream(self._device.index)
        for stream in self._busy:
            current.wait_stream(stream)
        for tensor in self._fresh:
            tensor.record_stream(current)
        self._busy, self._fresh = set(), []
        if ends_pass:
            self._began, self._given_before, self._given = None, self._given, 0
            for replays in self._replays:
                replays.end_round()

    def forget(self) -> None:
        self._inputs.forget()
        self._moments.forget()
        self._busy, self._fresh = set(), []
        self._began, self._given = None, 0

    @cached_property
    def _streams(self) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        return side_stream(self._device, "moments"), side_stream(self._device, "factors")

    @cached_property
    def _replays(self) -> tuple[Replays, Replays]:
        """Of moments, and of factors (and of moments with their factors): for each stream its own."""
        most = torch.cuda.get_device_properties(self._device).total_memory // SHARE_OF_RESULTS
        return Replays(GraphRecorder(), most // 2), Replays(GraphRecorder(), most // 2)

    def _sum_up(self, batch: list[_Task]) -> None:
        """Reduce the inputs of one kind to moments, and factorise these unless they are large."""
        first = batch[0]
        inputs = [tensor for task in batch if (tensor := task.inputs) is not None]
        factorises = first.is_factorised and first.is_done_in_one_go
        summing, factorising = self._streams
        is_recorded = self._may_record(first) and sum([tensor.nbytes for tensor in inputs]) < MOST_INPUTS_RECORDED
        stream = factorising if factorises and is_recorded else summing
        self._busy |= {stream, factorising} if factorises else {stream}
        for ready in {task.ready for task in batch}:
            stream.wait_event(ready)
        with switched_to(stream):
            if is_recorded:
                piece, key = _piece_of(batch), (first.kind, *[tensor.data_ptr() for tensor in inputs])
                work = partial(_reduced, first, inputs, factorises, None)
                results = self._recorded(self._replays[factorises], piece, key, work)
            else:
                results = self._not_recorded(_reduced(first, inputs, factorises, factorising))
        for tensor in inputs:
            tensor.record_stream(stream)  # its memory is not used again before that is over
        for task, moment, *factor in zip(batch, *[iter(results)] * (3 if factorises else 1), strict=True):
            task.become(moment, (task.damping, InverseFactor(*factor)) if factor else None)
            task.inputs = None
            if task.is_factorised and not factorises:
                self._factorise_soon(task)

    def _factorise_soon(self, task: _Task) -> None:
        room = FOR_LARGE_MOMENTS.within(self._given_before, in_graph=self._in_graph)
        for batch in self._moments.add(task.kind_of_moment, task, task.bytes_of_factor, room):
            self._factorise(batch)

    def _factorise(self, batch: list[_Task]) -> None:
        """Factorise the moments of one size, those that are still wanted."""
        batch = [task for task in batch if isinstance(task.record.statistic, Moment)]
        moments = [s.matrix for task in batch if isinstance(s := task.record.statistic, Moment)]
        if not batch:
            return
        first = batch[0]
        summing, factorising = self._streams
        self._busy.add(factorising)
        factorising.wait_stream(summing)
        work = partial(_factorised, moments, first.damping, first.record.rows)
        with switched_to(factorising):
            if self._may_record(first) and len(batch) * first.bytes_of_factor < MOST_FACTORS_RECORDED:
                piece = ("factors", *_piece_of(batch))
                key = (first.kind_of_moment, *[moment.data_ptr() for moment in moments])
                results = self._recorded(self._replays[True], piece, key, work)
            else:
                results = self._not_recorded(work())
        for moment in moments:
            moment.record_stream(factorising)
        for task, inverse, status in zip(batch, *[iter(results)] * 2, strict=True):
            assert isinstance(task.record.statistic, Moment)
            task.become(task.record.statistic.matrix, (task.damping, InverseFactor(inverse, status)))

    def _may_record(self, task: _Task) -> bool:
        """Not where the user captures; and not cuSOLVER, which float64 is left to and may not be in a graph."""
        return not self._in_graph and task.record.first_use.dtype != torch.float64

    def _recorded(self, replays: Replays, piece: Hashable, key: Hashable, work: Work) -> tuple[Tensor, ...]:
        results, are_kept = replays.run(piece, key, work)
        return results if are_kept else self._not_recorded(results)

    def _not_recorded(self, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if not self._in_graph:  # which keeps its memory
            self._fresh += results
        return results


@in_full_precision
def _reduced(
    task: _Task, inputs: list[Tensor], factorises: bool, factorising: torch.cuda.Stream | None
) -> tuple[Tensor, ...]:
    """The moment of each layer, and its inverse factor and status if it is to be factorised.

    Args:
        task: one of a kind.
        inputs: of all of its kind.
        factorises: whether they are factorised too,
        factorising: and on which stream, if it is another one.
    """
    record = task.record
    moments = record.operation.second_moments(inputs, ones=bool(record.biases))
    if not factorises:
        return tuple(moments.unbind())
    if factorising is None:
        factors = inverse_factor(moments, task.damping.level(record.rows, record.columns))
    else:
        factorising.wait_stream(torch.cuda.current_stream())
        moments.record_stream(factorising)
        with switched_to(factorising):
            factors = inverse_factor(moments, task.damping.level(record.rows, record.columns))
    parts = zip(moments.unbind(), factors.inverse.unbind(), factors.status.unbind(), strict=True)
    return tuple([tensor for part in parts for tensor in part])


@in_full_precision
def _factorised(moments: list[Tensor], damping: Damping, rows: int) -> tuple[Tensor, ...]:
    """The inverse factor and the status of each moment, all of one size and, if λ is relative, of as many rows."""
    together = torch.stack(moments)
    factors = inverse_factor(together, damping.level(rows, together.shape[-1]), overwrite=True)
    parts = zip(factors.inverse.unbind(), factors.status.unbind(), strict=True)
    return tuple([tensor for part in parts for tensor in part])


def _piece_of(batch: list[_Task]) -> tuple[Hashable, ...]:
    """Whose work it is: its results have the same shapes every time."""
    first = batch[0]
    return (*[task.record for task in batch], first.record.columns, first.record.first_use.dtype, first.is_factorised)
