"""Factorising ahead: on a GPU, second moments and their factors are computed beside the rest of the backward pass.

What a layer's factorisation needs, its inputs, is known when the backward pass reaches the layer; the gradient that it
is applied to is final only at the step. In between, backpropagation through the layers before it keeps the GPU partly
busy at best. Layers of one shape go together, as many as a little memory has room for: the host launches once for all
of them, and from their third step on by a recording of the launches (:mod:`consequent.replay`).
"""

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from consequent import kernels, layers
from consequent.autograd import graph_is_being_captured
from consequent.inverse_factor import InverseFactor, inverse_factor
from consequent.moments import second_moments
from consequent.precision import in_full_precision
from consequent.record import Record
from consequent.replay import GraphRecorder, Replays
from consequent.settings import Damping
from consequent.streams import side_stream, switched_to

MOST_TOGETHER = 8  # layers in a group

# Bytes that groups hold on to, about: their inputs, moments and factors. Large groups cost the host less, and memory
# more; so they may have a share of what a pass is given in all, within limits. In a CUDA graph, where nothing is
# launched late, a larger one leaves the backward pass more of the device.
LEAST_MEMORY, MOST_MEMORY = 11 * 2**20, 64 * 2**20
SHARE, SHARE_IN_GRAPH = 64, 4

MOST_RECORDED = 512 * 2**20  # of a group: more keeps the GPU busy for longer than the host


@dataclass
class _Group:
    """Records of one kind that wait."""

    kind: Hashable
    damping: Damping
    device: torch.device
    ready: torch.cuda.Event  # when the inputs of all are there
    records: list[Record] = field(default_factory=list)
    bytes: int = 0


@dataclass
class _Pass:
    """A backward pass on a device."""

    began: torch.cuda.Event  # when the forward pass was over
    room: int  # bytes that groups may hold on to
    given: int = 0  # bytes that it took for all that was added
    groups: dict[Hashable, _Group] = field(default_factory=dict)  # by their kinds, the oldest first

    @property
    def bytes(self) -> int:
        return sum([group.bytes for group in self.groups.values()])


class Ahead:
    """Groups of records whose moments are computed, and factorised, beside the backward pass."""

    def __init__(self) -> None:
        self.factorises = True  # not where the moments of other ranks are still to be added
        self._passes: dict[torch.device, _Pass] = {}
        self._given: dict[torch.device, int] = {}  # what the last pass was given
        self._replays: dict[torch.device, Replays] = {}

    def takes(self, record: Record) -> bool:
        """Whether the record's moment can wait and be computed with others: one use, on a GPU with kernels."""
        if len(record.uses) != 1 or record.reduced or not record.verified:
            return False
        inputs = record.uses[0].inputs
        return inputs is not None and inputs.numel() > 0 and kernels.run_on(inputs.device)

    def add(self, record: Record, damping: Damping) -> None:
        """Reduce the record soon, with others of its kind.

        Args:
            record: one that :meth:`takes` approves of.
            damping: λ, to factorise the moment with.
        """
        use = record.uses[0]
        inputs = use.inputs
        assert inputs is not None
        device = inputs.device
        running = self._passes.get(device)
        if running is None:
            began = torch.cuda.current_stream(device.index).record_event()
            running = self._passes[device] = _Pass(began, _room(self._given.get(device, 0)))
        kind = (_kind_of(record), inputs.shape, inputs.stride(), inputs.dtype, damping)
        group = running.groups.get(kind)
        if group is None:
            group = running.groups[kind] = _Group(kind, damping, device, running.began)
        # The inputs wait since the forward pass, unless they were recomputed or brought back now. So a CUDA graph, in
        # which the host's order means nothing, can do all of this in the shadow of the whole backward pass.
        if not use.inputs_stayed:
            group.ready = torch.cuda.current_stream(device.index).record_event()
        needed = inputs.nbytes + 20 * record.columns**2
        group.records.append(record)
        group.bytes += needed
        running.given += needed
        if len(group.records) == MOST_TOGETHER or group.bytes >= running.room:
            self._start(running.groups.pop(kind))
        while running.bytes >= running.room:
            self._start(running.groups.pop(next(iter(running.groups))))

    def _start(self, group: _Group) -> None:
        """Start with what waits."""
        records, device = group.records, group.device
        inputs = [tensor for record in records if (tensor := record.uses[0].inputs) is not None]
        size = records[0].columns
        factorises = self.factorises and all(record.usual_uses == 1 for record in records)
        summing, factorising = _side_streams(device)
        if graph_is_being_captured() or not _is_worth_recording(group, inputs[0].dtype):
            summing.wait_event(group.ready)
            with switched_to(summing):
                results = _reduced(group, inputs, factorises, factorising)
            last = summing
        else:
            factorising.wait_event(group.ready)
            with switched_to(factorising):
                piece = (*records, size, inputs[0].dtype, factorises)
                key = (*[tensor.data_ptr() for tensor in inputs], group.kind, factorises)
                replays = self._replays.setdefault(device, Replays(GraphRecorder()))
                results = replays.run(piece, key, lambda: _reduced(group, inputs, factorises, None))
            last = factorising
        for tensor in inputs:
            tensor.record_stream(last)  # its memory is not used again before that is over
        for record, moment, *factor in zip(records, *[iter(results)] * (3 if factorises else 1), strict=True):
            record.reduce_to(moment, (group.damping, InverseFactor(*factor)) if factor else None)

    def join(self) -> None:
        """Let the current streams wait for all that was added; the host does not wait."""
        for device, running in self._passes.items():
            for group in running.groups.values():
                self._start(group)
            self._given[device] = running.given
            current = torch.cuda.current_stream(device.index)
            for stream in _side_streams(device):
                current.wait_stream(stream)
            if device in self._replays:
                self._replays[device].end_round()
        self._passes.clear()

    def forget(self) -> None:
        """Drop what waits: its gradients are gone."""
        self._passes.clear()


@in_full_precision
def _reduced(
    group: _Group, inputs: list[Tensor], factorises: bool, factorising: torch.cuda.Stream | None
) -> tuple[Tensor, ...]:
    """The moment of each record of the group, and its inverse factor and status if it is to be factorised.

    Args:
        group: records of one kind.
        inputs: their inputs.
        factorises: whether they are factorised too,
        factorising: and on which stream, if it is another one.
    """
    first = group.records[0]
    moments = second_moments(first.layer, inputs, ones=first.uses[0].bias is not None)
    if not factorises:
        return tuple(moments.unbind())
    level = group.damping.absolute_for(moments, first.rows)
    if factorising is None:
        factors = inverse_factor(moments, level)
    else:
        factorising.wait_stream(torch.cuda.current_stream())
        moments.record_stream(factorising)
        with switched_to(factorising):
            factors = inverse_factor(moments, level)
    parts = zip(moments.unbind(), factors.inverse.unbind(), factors.status.unbind(), strict=True)
    return tuple([tensor for part in parts for tensor in part])


def _room(given: int) -> int:
    """Bytes that groups may hold on to in a pass that is given so many in all."""
    share = SHARE_IN_GRAPH if graph_is_being_captured() else SHARE
    return min(max(given // share, LEAST_MEMORY), MOST_MEMORY)


def _side_streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """One for moments and one for factors, so that the next group's moments need not wait for this one's factors.

    Factors are one after the other, as their programs wait for each other: two such launches might each have half of
    the device. So recordings, which have both, are replayed on the second.
    """
    return side_stream(device, "moments"), side_stream(device, "factors")


def _is_worth_recording(group: _Group, dtype: torch.dtype) -> bool:
    """Whether the host is what it waits for; and not cuSOLVER, which float64 is left to and may not be in a graph."""
    return group.bytes < MOST_RECORDED and dtype != torch.float64


def _kind_of(record: Record) -> Hashable:
    """What layers must have in common to go together, the shape of their inputs aside."""
    layer, has_bias = record.layer, record.uses[0].bias is not None
    if layers.is_dense(layer):
        return has_bias
    geometry = (layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.groups, layer.padding_mode)
    return (has_bias, geometry)
