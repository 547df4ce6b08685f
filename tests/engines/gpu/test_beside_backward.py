"""Which layers are factorised together, and when; what is launched then needs a GPU (test_gpu_replay)."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from consequent.engines.gpu import beside_backward as ahead
from consequent.engines.gpu.beside_backward import LARGE, MOST_TOGETHER, Ahead, Room
from consequent.layers.convolution import Convolution
from consequent.layers.linear import Linear
from consequent.maths.damping import Damping

MEBIBYTE = 2**20


class Stream:
    def wait_stream(self, other):
        pass

    def record_event(self):
        return object()


@pytest.fixture
def started(monkeypatch):
    """The names of the layers of every batch that was started, in order."""
    batches = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(ahead._Beside, "_streams", (Stream(), Stream()))
    monkeypatch.setattr(ahead._Beside, "_replays", ())
    monkeypatch.setattr(ahead._Beside, "_sum_up", lambda self, batch: batches.append(names_of(batch)))
    return batches


def names_of(batch):
    return [task.record.name for task in batch]


def record(name, features=4, rows=1, *, dense=False):
    operation = Linear.of(nn.Linear(features, 2)) if dense else Convolution.of(nn.Conv2d(features, 2, 1))
    use = SimpleNamespace(inputs=torch.zeros(rows, features), inputs_stayed=True, bias=None)
    fields = {"uses": [use], "columns": features, "rows": rows, "usual_uses": 1, "biases": []}
    return SimpleNamespace(name=name, operation=operation, **fields)


def add_all(records, budget, monkeypatch):
    monkeypatch.setattr(ahead, "FOR_INPUTS", Room(budget, budget, 1, 1))
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


def test_batches_have_a_largest_size(started, monkeypatch):
    add_all([record(str(place)) for place in range(MOST_TOGETHER + 1)], MEBIBYTE, monkeypatch)
    assert started == [[str(place) for place in range(MOST_TOGETHER)]]


def test_a_batch_that_needs_much_memory_starts_at_once(started, monkeypatch):
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


def test_of_layers_that_came_before_nobody_waits_for_more(started, monkeypatch):
    records = [record("a", 4), record("b", 5), record("b", 5)]
    waiting = add_all(records, MEBIBYTE, monkeypatch)
    waiting.join()
    started.clear()
    for each in records:
        waiting.add(each, Damping(0.1))
    assert started == [["a"], ["b", "b"]]


@pytest.mark.parametrize(
    ("given", "in_graph", "room"),
    [(0, False, 11), (1280, False, 20), (160, True, 40), (10_000, False, 64), (10_000, True, 64)],
)
def test_batches_may_have_a_share_of_what_a_pass_is_given(given, in_graph, room):
    assert ahead.FOR_INPUTS.within(given * MEBIBYTE, in_graph=in_graph) == room * MEBIBYTE


def test_batches_are_larger_once_the_first_pass_has_shown_what_there_is(started, monkeypatch):
    records = [record(str(place), rows=2**16) for place in range(32)]  # a mebibyte each
    waiting = Ahead()
    monkeypatch.setattr(ahead, "FOR_INPUTS", Room(2 * MEBIBYTE, 64 * MEBIBYTE, 10, 4))
    for each in records:
        waiting.add(each, Damping(0.1))
    waiting.join()
    assert {len(batch) for batch in started} == {2}
    started.clear()
    for each in records:
        waiting.add(each, Damping(0.1))
    waiting.join()
    assert {len(batch) for batch in started} == {4}


@pytest.fixture
def factorised(monkeypatch):
    """The names of the layers of every batch of large moments that was started; moments are as good as computed."""
    batches = []

    def sum_up(self, batch):
        for task in batch:
            if task.is_factorised and not task.is_done_in_one_go:
                self._factorise_soon(task)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(ahead._Beside, "_streams", (Stream(), Stream()))
    monkeypatch.setattr(ahead._Beside, "_replays", ())
    monkeypatch.setattr(ahead._Beside, "_sum_up", sum_up)
    monkeypatch.setattr(ahead._Beside, "_factorise", lambda self, batch: batches.append(names_of(batch)))
    return batches


def test_large_moments_of_one_size_are_factorised_together_whatever_their_inputs(factorised, monkeypatch):
    sizes = {"a": LARGE + 1, "b": LARGE + 2, "c": LARGE}
    records = [record(f"{kind}{rows}", sizes[kind], rows) for rows in (1, 2) for kind in "abc"]
    waiting = add_all(records, MEBIBYTE, monkeypatch)
    assert factorised == []
    waiting.join()
    assert factorised == [["a1", "a2"], ["b1", "b2"]]


def test_moments_of_dense_layers_are_factorised_together_whatever_their_size(factorised, monkeypatch):
    records = [record(str(rows), 5, rows, dense=True) for rows in (1, 2, 3)]
    waiting = add_all([*records, record("image", 5)], MEBIBYTE, monkeypatch)
    waiting.join()
    assert factorised == [["1", "2", "3"]]


def test_with_relative_damping_large_moments_of_other_rows_are_of_another_kind(factorised, monkeypatch):
    waiting = add_all([], MEBIBYTE, monkeypatch)
    for rows in (1, 2, 1):
        waiting.add(record(str(rows), LARGE + 1, rows), Damping(0.1, relative=True))
    waiting.join()
    assert factorised == [["1", "1"], ["2"]]


def test_moments_that_others_are_added_to_are_not_factorised(factorised, monkeypatch):
    waiting = add_all([], MEBIBYTE, monkeypatch)
    of_many_uses, of_one = record("many", LARGE + 1), record("one", LARGE + 1)
    of_many_uses.usual_uses = 2
    waiting.add(of_many_uses, Damping(0.1))
    waiting.add(of_one, Damping(0.1))
    waiting.join()
    assert factorised == [["one"]]


def test_moments_that_are_gone_are_not_factorised(monkeypatch):
    monkeypatch.setattr(ahead._Beside, "_streams", (Stream(), Stream()))
    task = SimpleNamespace(record=SimpleNamespace(statistic=None))
    beside = ahead._Beside(torch.device("cuda"))
    beside._factorise([task])
    assert not beside._busy  # nothing was launched
