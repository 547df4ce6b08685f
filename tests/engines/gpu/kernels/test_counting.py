import pytest

pytest.importorskip("triton", reason="triton is not installed")

from consequent.engines.gpu.kernels import counting
from consequent.reports.counters import NAMES


def test_kernels_count_in_the_places_that_are_read():
    assert [getattr(counting, name.upper()).value for name in NAMES] == list(range(len(NAMES)))
