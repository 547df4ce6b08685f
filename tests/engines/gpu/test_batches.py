"""Who waits for whom, and for how long."""

from consequent.engines.gpu.batches import Batches


def add_all(batches, names, room=1000, size=1):
    """The batches that are done as soon as each of these comes; its first letter is its kind."""
    return [[*"".join(batch)] for name in names for batch in batches.add(name[0], name, size, room)]


def test_those_of_a_kind_wait_for_each_other():
    batches = Batches(most=3)
    assert add_all(batches, "abab") == []
    assert batches.end_round() == [["a", "a"], ["b", "b"]]
    assert batches.end_round() == []


def test_a_batch_has_a_largest_size():
    batches = Batches(most=2)
    assert add_all(batches, "aabaa") == [["a", "a"], ["a", "a"]]
    assert batches.end_round() == [["b"]]


def test_one_that_needs_much_memory_does_not_wait():
    batches = Batches(most=9)
    assert batches.add("a", 1, 1, 10) == []
    assert batches.add("b", 2, 10, 10) == [[2]]
    assert batches.end_round() == [[1]]


def test_the_oldest_goes_where_all_together_need_much_memory():
    batches = Batches(most=9)
    assert add_all(batches, "abab", room=5) == []
    assert add_all(batches, "c", room=5) == [["a", "a"]]


def test_nobody_waits_for_more_than_came_last_time():
    batches = Batches(most=9)
    add_all(batches, "aaab")
    assert batches.end_round() == [["a", "a", "a"], ["b"]]
    assert add_all(batches, "a") == []
    assert add_all(batches, "b") == [["b"]]
    assert add_all(batches, "aa") == [["a", "a", "a"]]
    assert batches.end_round() == []


def test_more_than_last_time_wait_as_if_there_had_been_none():
    batches = Batches(most=9)
    add_all(batches, "a")
    batches.end_round()
    assert add_all(batches, "aaaa") == [["a"]]
    assert batches.end_round() == [["a", "a", "a"]]


def test_in_the_middle_of_a_round_all_can_be_had():
    batches = Batches(most=9)
    add_all(batches, "aaab")
    batches.end_round()
    add_all(batches, "a")
    assert batches.flush() == [["a"]]
    assert add_all(batches, "aa") == [["a", "a"]]  # that is all of the round
    assert add_all(batches, "b") == [["b"]]


def test_a_round_that_is_forgotten_teaches_nothing():
    batches = Batches(most=9)
    add_all(batches, "aa")
    batches.end_round()
    add_all(batches, "a")
    batches.forget()
    assert add_all(batches, "a") == []
    assert add_all(batches, "a") == [["a", "a"]]
