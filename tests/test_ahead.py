"""Which layers are factorised together, and when; what is launched then needs a GPU (test_gpu_replay)."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from consequent import ahead
from consequent.ahead import MOST_TOGETHER, Ahead
from consequent.settings import Damping

MEBIBYTE = 2**20


@pytest.fixture
def started(monkeypatch):
    """The names of the layers of every group that was started, in order."""
    groups = []
    stream = SimpleNamespace(record_event=object, wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(ahead, "_side_streams", lambda device: (stream, stream))
    monkeypatch.setattr(Ahead, "_start", lambda self, group: groups.append([r.name for r in group.records]))
    return groups


def record(name, features=4, rows=1):
    layer = nn.Linear(features, 2)
    use = SimpleNamespace(inputs=torch.zeros(rows, features), inputs_stayed=True, bias=None)
    return SimpleNamespace(name=name, layer=layer, uses=[use], columns=features)


def add_all(records, budget, monkeypatch):
    monkeypatch.setattr(ahead, "LEAST_MEMORY", budget)
    monkeypatch.setattr(ahead, "MOST_MEMORY", budget)
    waiting = Ahead()
    for each in records:
        waiting.add(each, Damping(0.1))
    return waiting


def test_layers_of_one_kind_go_together_though_others_lie_between(started, monkeypatch):
    records = [record(f"{kind}{place}", {"a": 4, "b": 5}[kind]) for place in range(3) for kind in "ab"]
    waiting = add_all(records, MEBIBYTE, monkeypatch)
    assert started == []
    waiting.join()
    assert started == [["a0", "a1", "a2"], ["b0", "b1", "b2"]]


def test_groups_have_a_largest_size(started, monkeypatch):
    add_all([record(str(place)) for place in range(MOST_TOGETHER + 1)], MEBIBYTE, monkeypatch)
    assert started == [[str(place) for place in range(MOST_TOGETHER)]]


def test_a_group_that_needs_much_memory_starts_at_once(started, monkeypatch):
    add_all([record("small"), record("large", features=200, rows=2000)], MEBIBYTE, monkeypatch)
    assert started == [["large"]]


def test_the_oldest_start_where_all_together_need_much_memory(started, monkeypatch):
    sizes = {"a": 100, "b": 101, "c": 102}
    add_all([record(kind, features=sizes[kind], rows=1000) for kind in "abab" + "c"], 2 * MEBIBYTE, monkeypatch)
    assert started == [["a", "a"]]


def test_other_damping_is_another_kind(started, monkeypatch):
    waiting = add_all([record("a")], MEBIBYTE, monkeypatch)
    waiting.add(record("b"), Damping(0.2))
    waiting.join()
    assert started == [["a"], ["b"]]


def test_what_is_forgotten_never_starts(started, monkeypatch):
    waiting = add_all([record("a")], MEBIBYTE, monkeypatch)
    waiting.forget()
    waiting.join()
    assert started == []


@pytest.mark.parametrize(
    ("given", "in_graph", "room"),
    [(0, False, 11), (1280, False, 20), (160, True, 40), (10_000, False, 64), (10_000, True, 64)],
)
def test_groups_may_have_a_share_of_what_a_pass_is_given(given, in_graph, room, monkeypatch):
    monkeypatch.setattr(ahead, "graph_is_being_captured", lambda: in_graph)
    assert ahead._room(given * MEBIBYTE) == room * MEBIBYTE


def test_groups_are_larger_once_the_first_pass_has_shown_what_there_is(started, monkeypatch):
    records = [record(str(place), rows=2**16) for place in range(32)]  # a mebibyte each
    waiting = Ahead()
    monkeypatch.setattr(ahead, "LEAST_MEMORY", 2 * MEBIBYTE)
    monkeypatch.setattr(ahead, "SHARE", 8)
    for each in records:
        waiting.add(each, Damping(0.1))
    waiting.join()
    assert {len(group) for group in started} == {2}
    started.clear()
    for each in records:
        waiting.add(each, Damping(0.1))
    waiting.join()
    assert {len(group) for group in started} == {4}
