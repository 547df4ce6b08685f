"""Factorising ahead: on a GPU, second moments and their factors are computed beside the rest of the backward pass.

What a layer's factorisation needs, its inputs, is known when the backward pass reaches the layer; the gradient that it
is applied to is final only at the step. In between, backpropagation through the layers before it keeps the GPU partly
busy at best. Layers of one shape that follow each other, as they do in most networks, go together: the host launches
once for all of them.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from consequent import kernels, layers
from consequent.inverse_factor import InverseFactor, inverse_factor
from consequent.moments import second_moments
from consequent.precision import in_full_precision
from consequent.record import Record
from consequent.settings import Damping

MOST_TOGETHER = 8  # layers in a group
MOST_MEMORY = 11 * 2**20  # bytes that a group holds on to, about: its inputs, moments and factors


@dataclass
class _Group:
    """Records of one kind that wait, on one device."""

    kind: Hashable
    damping: Damping
    records: list[Record] = field(default_factory=list)
    bytes: int = 0
    ready: torch.cuda.Event | None = None  # when the inputs of all are there

    @property
    def is_full(self) -> bool:
        return len(self.records) >= MOST_TOGETHER or self.bytes >= MOST_MEMORY


class Ahead:
    """Groups of records whose moments are computed, and factorised, beside the backward pass."""

    def __init__(self) -> None:
        self.factorises = True  # not where the moments of other ranks are still to be added
        self._groups: dict[torch.device, _Group] = {}
        self._busy: dict[torch.device, torch.cuda.Event] = {}  # devices, and when the forward pass was over there

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
        inputs = record.uses[0].inputs
        assert inputs is not None
        device = inputs.device
        kind = (_kind_of(record), inputs.shape, inputs.stride(), inputs.dtype, damping)
        group = self._groups.get(device)
        if group is not None and (group.kind != kind or group.is_full):
            self._start(device)
            group = None
        if group is None:
            group = self._groups[device] = _Group(kind, damping)
        group.records.append(record)
        group.bytes += inputs.nbytes + 20 * record.columns**2
        if device not in self._busy:
            self._busy[device] = torch.cuda.current_stream(device).record_event()
        # The inputs wait since the forward pass, unless they were recomputed or brought back now. So a CUDA graph, in
        # which the host's order means nothing, can do all of this in the shadow of the whole backward pass.
        if not record.uses[0].inputs_stayed:
            group.ready = torch.cuda.current_stream(device).record_event()
        elif group.ready is None:
            group.ready = self._busy[device]

    @in_full_precision
    def _start(self, device: torch.device) -> None:
        """Start with what waits for the device."""
        group = self._groups.pop(device)
        uses = [record.uses[0] for record in group.records]
        inputs = [use.inputs for use in uses if use.inputs is not None]
        assert group.ready is not None
        summing, factorising = _side_streams(device)
        summing.wait_event(group.ready)
        with torch.cuda.stream(summing):
            moments = second_moments(uses[0].layer, inputs, ones=uses[0].bias is not None)
        for tensor in inputs:
            tensor.record_stream(summing)  # its memory is not used again before that is over
        factors: InverseFactor | None = None
        if self.factorises and all(record.usual_uses == 1 for record in group.records):
            factorising.wait_stream(summing)
            with torch.cuda.stream(factorising):
                level = group.damping.absolute_for(moments, group.records[0].rows)
                factors = inverse_factor(moments, level)
            moments.record_stream(factorising)
        for place, (record, moment) in enumerate(zip(group.records, moments, strict=True)):
            record.reduce_to(moment, None if factors is None else (group.damping, factors.of(place)))

    def join(self) -> None:
        """Let the current streams wait for all that was added; the host does not wait."""
        for device in list(self._groups):
            self._start(device)
        for device in self._busy:
            current = torch.cuda.current_stream(device)
            for stream in _side_streams(device):
                current.wait_stream(stream)
        self._busy.clear()

    def forget(self) -> None:
        """Drop what waits: its gradients are gone."""
        self._groups.clear()
        self._busy.clear()


@lru_cache
def _side_streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """One for moments and one for factors, so that the next group's moments need not wait for this one's factors.

    All corrections share them. Factors are one after the other, as their programs wait for each other: two such
    launches might each have half of the device.
    """
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


def _kind_of(record: Record) -> Hashable:
    """What layers must have in common to go together, the shape of their inputs aside."""
    layer, has_bias = record.layer, record.uses[0].bias is not None
    if layers.is_dense(layer):
        return has_bias
    geometry = (layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.groups, layer.padding_mode)
    return (has_bias, geometry)
