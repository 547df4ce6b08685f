"""Factorising ahead: on a GPU, second moments and their factors are computed beside the rest of the backward pass.

What a layer's factorisation needs, its inputs, is known when the backward pass reaches the layer; the gradient that it
is applied to is final only at the step. In between, backpropagation through the layers before it keeps the GPU partly
busy at best. Layers of one shape that follow each other, as they do in most networks, go together: the host launches
once for all of them.
"""

from collections.abc import Hashable

import torch
from torch import Tensor, nn

from consequent import kernels
from consequent.moments import second_moments
from consequent.precision import in_full_precision
from consequent.record import Factor, Record
from consequent.ridge import add_to_diagonal, cholesky
from consequent.settings import Damping

MOST_TOGETHER = 4  # layers in a group: the last one's work is not hidden behind anything
MOST_WAITING = 2**28  # bytes of inputs that wait for their group to be complete


class Ahead:
    """Groups of records whose moments are computed, and factorised, beside the backward pass."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}
        self._busy: set[torch.device] = set()
        self._group: list[Record] = []
        self._kind: Hashable = None
        self._damping = Damping(0.0)
        self._bytes = 0

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
        kind = (_kind_of(record), inputs.shape, inputs.stride(), inputs.dtype, inputs.device, damping)
        if self._group and (kind != self._kind or len(self._group) == MOST_TOGETHER or self._bytes > MOST_WAITING):
            self.flush()
        self._group.append(record)
        self._kind, self._damping = kind, damping
        self._bytes += inputs.nbytes

    @in_full_precision
    def flush(self) -> None:
        """Start with what waits."""
        records, self._group, self._bytes = self._group, [], 0
        uses = [record.uses[0] for record in records]
        inputs = [use.inputs for use in uses if use.inputs is not None]
        if not inputs:
            return
        device = inputs[0].device
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device), torch.cuda.Stream(device)
        # Two streams, so that the next group's moments need not wait for this one's factors. Factors are one after the
        # other, as their programs wait for each other: two such launches might each have half of the device.
        summing, factorising = self._streams[device]
        self._busy.add(device)
        summing.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(summing):
            moments = second_moments(uses[0].layer, inputs, ones=uses[0].bias is not None)
        for tensor in inputs:
            tensor.record_stream(summing)  # its memory is not used again before that is over
        factors: list[Factor] | list[None] = [None] * len(records)
        if all(record.usual_uses == 1 for record in records):
            factorising.wait_stream(summing)
            with torch.cuda.stream(factorising):
                factors = _factorise(moments, self._damping, records[0].rows)
            moments.record_stream(factorising)
        for record, moment, factor in zip(records, moments, factors, strict=True):
            record.reduce_to(moment, factor)

    def join(self) -> None:
        """Let the current stream wait for all that was added; the host does not wait."""
        self.flush()
        for device in self._busy:
            current = torch.cuda.current_stream(device)
            for stream in self._streams[device]:
                current.wait_stream(stream)
        self._busy.clear()

    def forget(self) -> None:
        """Drop what waits: its gradients are gone."""
        self._group, self._bytes = [], 0


def _kind_of(record: Record) -> Hashable:
    """What layers must have in common to go together, the shape of their inputs aside."""
    layer, has_bias = record.layer, record.uses[0].bias is not None
    if isinstance(layer, nn.Linear):
        return has_bias
    geometry = (layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.groups, layer.padding_mode)
    return (has_bias, geometry)


def _factorise(moments: Tensor, damping: Damping, rows: int) -> list[Factor]:
    """The factors of moments ``[layers, groups, D, D]``."""
    from consequent.kernels.factor import LARGEST, inverse_factor

    if moments.dtype == torch.float32 and 0 < moments.shape[-1] <= LARGEST:
        inverses, statuses = inverse_factor(
            moments.flatten(0, 1), damping.value, rows=rows if damping.relative else None
        )
        shape = moments.shape[:2]
        pairs = zip(inverses.unflatten(0, shape), statuses.unflatten(0, shape), strict=True)
        return [Factor(damping, inverse, status) for inverse, status in pairs]
    factors = []
    for moment in moments:
        level = damping.absolute(moment.diagonal(dim1=-2, dim2=-1).sum(-1), rows)
        lower, info = cholesky(add_to_diagonal(moment, level))
        factors.append(Factor(damping, lower=lower, info=info))
    return factors
