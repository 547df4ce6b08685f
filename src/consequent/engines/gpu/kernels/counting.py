# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Counting on the device what is not an ordinary step, in the tensor that :mod:`consequent.reports.counters` keeps."""

import triton
import triton.language as tl

__all__ = ["BOUNDED", "EDITED", "FALLEN_BACK", "RESCUED", "SKIPPED", "STEPS", "count", "count_step"]

STEPS, SKIPPED, RESCUED, FALLEN_BACK, EDITED, BOUNDED = (tl.constexpr(place) for place in range(6))


@triton.jit
def count(counts, PLACE: tl.constexpr, number):
    """Add to one of the counts."""
    tl.atomic_add(counts + PLACE, number.to(tl.int64))


@triton.jit
def count_step(counts, steps, skips, is_bad):
    """Add to the steps, and to the skipped ones if this one is bad. For one program of a step."""
    count(counts, STEPS, steps)
    count(counts, SKIPPED, tl.where(is_bad, skips, 0))
