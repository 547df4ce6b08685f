"""Streams of a GPU beside the one that trains."""

from collections.abc import Iterator
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
