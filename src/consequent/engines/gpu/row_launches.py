"""What is done with the rows of dense layers, launched by one recording once it has come a few times.

It is some hundred launches, which take the host longer than the GPU. The recording reads copies, which lie where they
lay the last time: to copy all rows is one launch.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from math import inf

import torch
from torch import Tensor

from consequent.capture.torch_internals import graph_is_being_captured
from consequent.engines.gpu.many_rows import RowLayer
from consequent.engines.gpu.recordings import GraphRecorder, Replays
from consequent.engines.gpu.streams import side_stream
from consequent.maths.precision import tf32_is_allowed

MOST_COPIED = 2**28  # bytes: more keeps the GPU busy for longer than the host
MOST_KINDS = 4  # of work that are recorded at a time: batches of so many sizes
MOST_SEEN = 64  # kinds of work that are remembered, to be recorded when they come again
SHARE_OF_RESULTS = 64  # recordings may keep the device's memory divided by this for what they compute

RowWork = Callable[[Sequence[RowLayer], Sequence[Tensor]], tuple[Tensor, ...]]


class RowLaunches:
    """Work on the rows of layers, the same at every step."""

    def __init__(self) -> None:
        self._replays: dict[torch.device, Replays] = {}
        self._copies: OrderedDict[Hashable, list[Tensor]] = OrderedDict()  # by the kind of work
        self._seen: OrderedDict[Hashable, None] = OrderedDict()

    def run(
        self,
        layers: Sequence[RowLayer],
        others: Sequence[Tensor],
        work: RowWork,
        kind: Hashable = None,
    ) -> tuple[tuple[Tensor, ...], bool]:
        """Do the work, by a recording if there is one, on the current stream.

        Args:
            layers: all on one device.
            others: what else is read, but for what lies in the same place for good.
            work: gets both, or copies of both. Launches on the current stream alone, unless that is captured.
            kind: all that its launches depend on, besides the layers' kinds.

        Returns:
            the results, and whether the next run will overwrite them.
        """
        device = layers[0].inputs.device
        read = [tensor for layer in layers for tensor in (layer.inputs, layer.output_grads)] + list(others)
        is_large = sum([tensor.nbytes for tensor in read]) > MOST_COPIED
        if is_large or graph_is_being_captured() or (replays := self._replays_on(device)) is None:
            return work(layers, others), False
        # What a limit is, is read from the device, as it changes with the learning rate; not whether there is one.
        kinds = [layer._replace(limit=inf if layer.limit == inf else 0.0).kind for layer in layers]
        piece = (device, kind, tf32_is_allowed(), *kinds, *[tensor.shape for tensor in others])
        copies = self._copies_for(piece, read)
        if copies is None:
            return work(layers, others), False
        torch._foreach_copy_(copies, read)
        copied = [
            layer._replace(inputs=inputs, output_grads=output_grads)
            for layer, inputs, output_grads in zip(layers, copies[::2], copies[1::2], strict=False)
        ]
        rest = copies[2 * len(layers) :]
        found = replays.run(piece, tuple([tensor.data_ptr() for tensor in copies]), lambda: work(copied, rest))
        replays.end_round()
        return found

    def _replays_on(self, device: torch.device) -> Replays | None:
        """None where nothing can be recorded."""
        if device.type == "cuda" and device not in self._replays:
            most = torch.cuda.get_device_properties(device).total_memory // SHARE_OF_RESULTS
            self._replays[device] = Replays(GraphRecorder(side_stream(device, "recordings")), most)
        return self._replays.get(device)

    def _copies_for(self, piece: Hashable, read: list[Tensor]) -> list[Tensor] | None:
        """Where recordings of this kind of work read; None the first time that it comes."""
        copies = self._copies.get(piece)
        if copies is None:
            if piece not in self._seen:
                self._seen[piece] = None
                if len(self._seen) > MOST_SEEN:
                    self._seen.popitem(last=False)
                return None
            copies = self._copies[piece] = [torch.empty(tensor.shape, device=tensor.device) for tensor in read]
            if len(self._copies) > MOST_KINDS:
                self._copies.popitem(last=False)
        self._copies.move_to_end(piece)
        return copies
