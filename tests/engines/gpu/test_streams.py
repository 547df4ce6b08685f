"""Who waits for whom, with streams that only take notes."""

from types import SimpleNamespace

import pytest
import torch

from consequent.engines.gpu import streams
from consequent.engines.gpu.streams import Fork, event_in_graph


class Stream:
    """Notes what it was told to wait for; raises at events of another graph."""

    device = "cuda:0"

    def __init__(self, foreign=()):
        self.waited = []
        self.foreign = foreign

    def wait_event(self, event):
        if event in self.foreign:
            raise RuntimeError("dependency created on uncaptured work in another stream")
        self.waited.append(event)

    def wait_stream(self, stream):
        self.waited.append(stream)

    def record_event(self):
        return "now"


@pytest.fixture
def training(monkeypatch):
    stream = Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    return stream


def test_a_fork_waits_for_its_events_and_the_training_stream_for_the_fork(training):
    other = Stream()
    fork = Fork(other, ["first", "other"])
    assert other.waited == ["first", "other"]
    fork.wait(["second", None])
    assert other.waited == ["first", "other", "second", training]
    assert training.waited == []
    fork.join()
    assert training.waited == [other]


def test_events_of_another_graph_are_no_longer_waited_for(training):
    """A wait that fails in the midst of a capture would spoil it: none is tried after the first."""
    other = Stream(foreign=["first", "second"])
    fork = Fork(other, ["first", "first"])
    assert other.waited == [training]
    fork.wait(["second", None])
    assert other.waited == [training]


def test_without_an_event_a_fork_waits_for_all_and_tries_no_others(training):
    other = Stream(foreign=["first", "second"])
    fork = Fork(other, [None, "first"])
    fork.wait(["second"])
    assert other.waited == [training]


def test_a_fork_goes_behind_streams_that_take_part_in_the_graph(training, monkeypatch):
    other, captured, idle = Stream(), Stream(), Stream()
    monkeypatch.setattr(streams, "_takes_part", lambda stream: stream is captured)
    Fork(other, ["first"], [captured, idle])
    assert other.waited == ["first", captured]


@pytest.mark.parametrize("captured", [True, False])
def test_events_are_recorded_in_a_graph_alone(captured, training, monkeypatch):
    monkeypatch.setattr(streams, "graph_is_being_captured", lambda: captured)
    assert event_in_graph() == ("now" if captured else None)


def test_switching_streams_comes_back_after_an_error(monkeypatch):
    before = (7, 0, 1)
    current = [before]  # as torch._C has them: id, device, type
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: current.append(stream.three))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentStream", lambda index: current[-1], raising=False)
    monkeypatch.setattr(torch._C, "_cuda_setStream", lambda **three: current.append((*three.values(),)), raising=False)
    other = SimpleNamespace(device_index=0, three=(8, 0, 1))

    def fail_there():
        assert current[-1] == other.three
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), streams.switched_to(other):
        fail_there()
    assert current[-1] == before
