"""First steps are those of new processes."""

import pytest

from benchmarks.first_step import TARGETS, first_steps, table

pytestmark = pytest.mark.slow


def test_first_steps_are_those_of_new_processes():
    steps = first_steps("resnet20", "cpu", "quick")
    assert TARGETS == {"cold": 10, "warm": 2}
    assert [step["cache"] for step in steps] == ["cold", "warm"]
    for step in steps:
        assert (step["ours"], step["error"]) == ("C-Nesterov", None)
        assert 0 < step["seconds"] < 30
        assert step["met"] == (step["seconds"] <= TARGETS[step["cache"]])


def test_a_first_step_that_fails_is_said_so():
    step = first_steps("mlp", "no such device", "quick")[0]
    assert step["seconds"] is step["met"] is None
    assert step["error"].startswith("RuntimeError")


def test_the_table_has_a_line_for_every_step():
    steps = [
        {"task": "MLP", "cache": cache, "seconds": seconds, "target": 10}
        for cache, seconds in (("a", 7.0), ("b", None))
    ]
    lines = table({"device": {"type": "cuda", "name": "NVIDIA H200"}, "first_steps": steps})
    assert lines[2:] == ["| MLP, H200 | a | 7 | 10 |", "| MLP, H200 | b | failed | 10 |"]
