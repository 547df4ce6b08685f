"""Streams of a GPU beside the one that trains."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from typing import Any

import torch

from consequent.autograd import graph_is_being_captured


def switched_to(stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
    """``torch.cuda.stream``, in a fraction of its time where the stream is of the current device."""
    if stream.device_index != torch.cuda.current_device():
        return torch.cuda.stream(stream)
    return _switched_on_device(stream)


@contextmanager
def _switched_on_device(stream: torch.cuda.Stream) -> Iterator[None]:
    before = torch.cuda.current_stream(stream.device_index)
    torch.cuda.set_stream(stream)
    try:
        yield
    finally:
        torch.cuda.set_stream(before)


@lru_cache
def side_stream(device: torch.device, purpose: str) -> torch.cuda.Stream:
    """The stream for this purpose; all corrections share it."""
    return torch.cuda.Stream(device)


def event_in_graph() -> torch.cuda.Event | None:
    """An event for what the current stream has been given so far, if that is captured in a CUDA graph.

    There the host's order means nothing: who waits for the event, and is launched later, runs as soon as it happens.
    """
    return torch.cuda.current_stream().record_event() if graph_is_being_captured() else None


class Fork:
    """Another stream that runs beside the current one in a CUDA graph, from some events on.

    Args:
        stream: the other one.
        events: of :func:`event_in_graph`; None stands for all that the current stream has been given so far.

    An event of another graph cannot be waited for, and to try it spoils the capture that a stream takes part in: so it
    is tried before the other stream does.
    """

    def __init__(self, stream: torch.cuda.Stream, events: Sequence[torch.cuda.Event | None]) -> None:
        self.stream = stream
        self.origin = torch.cuda.current_stream(stream.device)
        self._knows_events = None not in events
        try:
            self.wait(events)
        except RuntimeError:  # they happened in another graph, which has to run first as a whole
            self._knows_events = False
        if not self._knows_events:
            stream.wait_stream(self.origin)

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
