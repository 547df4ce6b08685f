# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Numbers that a CUDA graph holds itself: the arguments of a launch."""

import triton
import triton.language as tl

AT_ONCE = 8
_NUMBERS = [f"n{place}" for place in range(AT_ONCE)]


@triton.jit(do_not_specialize=["place", *_NUMBERS])
def fill(table, place, n0, n1, n2, n3, n4, n5, n6, n7):
    """Write eight numbers."""
    tl.store(table + place, n0)
    tl.store(table + place + 1, n1)
    tl.store(table + place + 2, n2)
    tl.store(table + place + 3, n3)
    tl.store(table + place + 4, n4)
    tl.store(table + place + 5, n5)
    tl.store(table + place + 6, n6)
    tl.store(table + place + 7, n7)
