"""Recorded work: with a recorder that keeps the Python function, on the CPU, instead of a CUDA graph."""

import pytest
import torch

from consequent import ConsequentWarning
from consequent.engines.gpu import recordings as replay
from consequent.engines.gpu.recordings import Replays

MUCH = 2**30  # bytes


class Recorder:
    """Like a CUDA graph: nothing happens while recording, results lie where they lay, inputs are read again."""

    def __init__(self, *, works=True):
        self.works = works
        self.recorded = 0

    def record(self, work):
        if not self.works:
            raise RuntimeError("not permitted while capturing")
        self.recorded += 1
        work()
        return Recording(work)


class Recording:
    replayed = 0

    def __init__(self, work):
        self.work = work

    def replay(self):
        Recording.replayed += 1
        self.work()


class Squares:
    """Work on a buffer, which is a place in memory; counts how often it was done as it is."""

    def __init__(self, replays):
        self.replays = replays
        self.done = 0

    def __call__(self, buffer, piece="squares"):
        def work():
            self.done += 1
            return buffer.square(), buffer.sum()

        results, self.are_kept = self.replays.run(piece, buffer.data_ptr(), work)
        return results


def test_the_numbers_are_those_of_the_inputs_there_now():
    squares = Squares(Replays(Recorder(), MUCH))
    buffers = [torch.zeros(3) for _ in range(3)]
    for step in range(50):
        buffer = buffers[step * 7 % 11 % 3]
        buffer.copy_(torch.randn(3))
        squared, total = squares(buffer)
        assert torch.equal(squared, buffer.square())
        assert torch.equal(total, buffer.sum())


def test_what_comes_a_second_time_is_recorded_and_then_replayed():
    recorder = Recorder()
    squares = Squares(Replays(recorder, MUCH))
    buffer, before = torch.ones(3), Recording.replayed
    squares(buffer)
    assert recorder.recorded == 0
    second = squares(buffer)
    assert recorder.recorded == 1
    assert Recording.replayed == before
    third, fourth = squares(buffer), squares(buffer)
    assert recorder.recorded == 1
    assert Recording.replayed == before + 2
    assert second[0] is third[0] is fourth[0]


def test_all_recordings_of_a_piece_put_their_results_in_one_place():
    squares = Squares(Replays(Recorder(), MUCH))
    one, other = torch.ones(3), torch.full((3,), 2.0)
    for _ in range(2):
        squares(one), squares(other)
    results = [squares(one)[0], squares(other)[0]]  # both by a recording
    assert results[0] is results[1]
    assert torch.equal(results[1], torch.full((3,), 4.0))


def test_pieces_have_places_of_their_own():
    squares = Squares(Replays(Recorder(), MUCH))
    buffer = torch.ones(3)
    for _ in range(3):
        results = [squares(buffer, piece)[0] for piece in "ab"]
    assert results[0] is not results[1]


def test_memory_that_lies_elsewhere_every_time_is_not_recorded():
    recorder = Recorder()
    squares = Squares(Replays(recorder, MUCH))
    kept = [torch.ones(3) for _ in range(100)]
    for buffer in kept:
        squares(buffer)
    assert recorder.recorded == 0


def test_recordings_are_few_where_patterns_keep_changing():
    """Two buffers for a while, then two others, and so on: each would be worth it, but not all at once."""
    recorder = Recorder()
    squares = Squares(Replays(recorder, MUCH))
    kept = [torch.ones(3) for _ in range(500)]
    for buffer in kept:
        squares(buffer), squares(buffer)
    runs = 2 * len(kept)
    assert recorder.recorded <= replay.FREE_RECORDINGS + runs / replay.RUNS_PER_RECORDING
    assert recorder.recorded > 10
    (piece,) = squares.replays._pieces.values()
    assert len(piece.recordings) <= replay.MOST_RECORDINGS
    assert len(piece.seen) <= replay.MOST_KEYS


def test_work_that_cannot_be_recorded_is_done_as_it_is():
    recorder = Recorder(works=False)
    squares = Squares(Replays(recorder, MUCH))
    buffer = torch.ones(3)
    squares(buffer)
    with pytest.warns(ConsequentWarning, match=r"cannot be recorded \(not permitted"):
        squares(buffer)
    for step in range(3):  # in silence
        buffer.fill_(step)
        assert torch.equal(squares(buffer)[0], buffer.square())
    assert squares.done == 5


def test_pieces_that_no_longer_come_are_forgotten():
    squares = Squares(Replays(Recorder(), MUCH))
    buffer = torch.ones(3)
    for _ in range(5):
        squares(buffer, "old")
        squares.replays.end_round()
    for _ in range(3 * replay.MOST_ROUNDS_WITHOUT):
        squares(buffer, "new")
        squares.replays.end_round()
    assert set(squares.replays._pieces) == {"new"}


def test_work_that_is_not_recorded_puts_its_results_there_too():
    """Others, recorded, may read them there."""
    squares = Squares(Replays(Recorder(), MUCH))
    one = torch.ones(3)
    for _ in range(2):
        squares(one)
    (recorded, _) = squares(one)
    other = torch.full((3,), 2.0)
    (squared, total) = squares(other)
    assert squared is recorded
    assert torch.equal(squared, other.square())
    assert total == 6


def test_results_are_kept_once_they_are_recorded():
    squares = Squares(Replays(Recorder(), MUCH))
    buffer, other = torch.ones(3), torch.ones(3)
    kept = []
    for each in (buffer, buffer, buffer, other):
        squares(each)
        kept.append(squares.are_kept)
    assert kept == [False, True, True, True]


def test_recordings_keep_no_more_than_they_may():
    recorder = Recorder()
    squares = Squares(Replays(recorder, 2 * 16))  # results of four floats each
    buffers = [torch.full((3,), float(place)) for place in range(3)]
    for _ in range(3):
        for place, buffer in enumerate(buffers):
            squared, _ = squares(buffer, piece=place)
            assert torch.equal(squared, buffer.square())
    assert recorder.recorded == 2
    assert not squares.are_kept
