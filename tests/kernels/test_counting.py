import pytest

pytest.importorskip("triton", reason="triton is not installed")

from consequent.counters import NAMES
from consequent.kernels import counting


def test_kernels_count_in_the_places_that_are_read():
    assert [getattr(counting, name.upper()).value for name in NAMES] == list(range(len(NAMES)))
