"""Whether two runs ended alike, bit for bit, the clock aside."""

from typing import Any

from consequent_lab.runs import RunFolder


def differences(run: RunFolder, other: RunFolder) -> list[str]:
    """Returns what differs between two finished runs."""
    found = []
    if _without_clock(run.metrics()) != _without_clock(other.metrics()):
        found.append("metrics")
    if run.outcome() is None or other.outcome() is None:
        found.append("one is not finished")
    if not _is_same(run.checkpoint(), other.checkpoint()):
        found.append("checkpoint")
    return found


def _without_clock(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def _is_same(state: Any, other: Any) -> bool:
    import torch

    if type(state) is not type(other):
        return False
    if isinstance(state, torch.Tensor):
        return torch.equal(state, other)
    if isinstance(state, dict):
        same_names = state.keys() == other.keys()
        return same_names and all(_is_same(state[name], other[name]) for name in state if name != "seconds")
    if isinstance(state, list):
        return len(state) == len(other) and all(_is_same(a, b) for a, b in zip(state, other, strict=True))
    return bool(state == other)
