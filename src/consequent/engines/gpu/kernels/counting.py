# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Counting on the device what is not an ordinary step, in the tensor that :mod:`consequent.reports.counters` keeps."""

import triton
import triton.language as tl
from torch import Tensor

from consequent.engines.gpu.kernels.launch import launch
from consequent.engines.gpu.kernels.table import device_guard

__all__ = ["BOUNDED", "EDITED", "FALLEN_BACK", "RESCUED", "SKIPPED", "STEPS", "count", "count_factors", "count_step"]

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


def count_factors(status: Tensor, counts: Tensor) -> None:
    """Count the factors with raised pivots, and those that failed on finite numbers.

    Args:
        status: float32 ``[factors, 4]``, see :class:`consequent.engines.inverse_factor.InverseFactor`.
        counts: int64, added to.
    """
    with device_guard(counts.device):
        launch(_count_factors, (1, 1, 1), (status, counts, len(status)), num_warps=1)


@triton.jit(do_not_specialize=["status", "counts", "number"])
def _count_factors(status, counts, number: tl.int32):
    for place in range(number):
        trace, ok = tl.load(status + place * 4), tl.load(status + place * 4 + 2) != 0
        count(counts, RESCUED, ok & (tl.load(status + place * 4 + 3) > 0))
        count(counts, FALLEN_BACK, (ok == 0) & (tl.abs(trace) < float("inf")))
