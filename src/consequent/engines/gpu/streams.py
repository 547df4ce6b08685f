"""Streams of a GPU beside the one that trains."""

from collections.abc import Sequence
from functools import lru_cache

import torch

from consequent.capture.torch_internals import graph_is_being_captured, stream_now, switch_stream


class switched_to:  # noqa: N801 (used like a function)
    """``torch.cuda.stream``, in a fraction of its time where the stream is of the current device."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        is_elsewhere = stream.device_index != torch.cuda.current_device()
        self._anywhere = torch.cuda.stream(stream) if is_elsewhere else None

    def __enter__(self) -> None:
        """The stream is the current one from now on."""
        if self._anywhere is not None:
            self._anywhere.__enter__()
            return
        self._before = stream_now(self._stream.device_index)
        torch.cuda.set_stream(self._stream)

    def __exit__(self, *error: object) -> None:
        """The one before is."""
        if self._anywhere is not None:
            self._anywhere.__exit__(*error)
            return
        switch_stream(self._before)


@lru_cache
def side_stream(device: torch.device, purpose: str) -> torch.cuda.Stream:
    """The stream for this purpose; all corrections share it."""
    return torch.cuda.Stream(device)


def factor_streams(device: torch.device, purpose: str) -> list[torch.cuda.Stream]:
    """All streams on which matrices are factorised but the one for this purpose.

    Programs of one factorisation wait for each other: two such launches side by side might each have half of the
    device.
    """
    return [side_stream(device, other) for other in ("factors", "samples", "many rows") if other != purpose]


def event_in_graph() -> torch.cuda.Event | None:
    """An event for what the current stream has been given so far, if that is captured in a CUDA graph.

    There the host's order means nothing: who waits for the event, and is launched later, runs as soon as it happens.
    """
    return torch.cuda.current_stream().record_event() if graph_is_being_captured() else None


def _takes_part(stream: torch.cuda.Stream) -> bool:
    """Whether what the stream is given is captured in a CUDA graph."""
    with switched_to(stream):
        return graph_is_being_captured()


class Fork:
    """Another stream that runs beside the current one in a CUDA graph, from some events on.

    An event of another graph cannot be waited for, and the attempt would spoil the capture of a stream that takes part
    in one. So it is made first of all, while the other stream takes part in none.

    Args:
        stream: the other one.
        events: of :func:`event_in_graph`; None stands for all that the current stream has been given so far.
        behind: streams whose part in the graph so far goes first.
    """

    def __init__(
        self,
        stream: torch.cuda.Stream,
        events: Sequence[torch.cuda.Event | None],
        behind: Sequence[torch.cuda.Stream] = (),
    ) -> None:
        self.stream = stream
        self.origin = torch.cuda.current_stream(stream.device)
        self._knows_events = None not in events
        try:
            self.wait(events)
        except RuntimeError:  # they happened in another graph, which has to run first as a whole
            self._knows_events = False
        if not self._knows_events:
            stream.wait_stream(self.origin)
        for other in behind:
            if _takes_part(other):
                stream.wait_stream(other)

    def wait(self, events: Sequence[torch.cuda.Event | None]) -> None:
        """Let the other stream wait for more events."""
        for event in events if self._knows_events else ():
            if event is None:
                self.stream.wait_stream(self.origin)
            else:
                self.stream.wait_event(event)

    def join(self) -> None:
        """Let the original stream wait for the other one."""
        self.origin.wait_stream(self.stream)
