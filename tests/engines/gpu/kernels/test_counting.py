import pytest

pytest.importorskip("triton", reason="triton is not installed")

from consequent.engines.gpu.kernels import counting
from consequent.reports.counters import NAMES


def test_kernels_count_in_the_places_that_are_read():
    *counted, by_host = NAMES
    assert by_host == "promised"
    assert [getattr(counting, name.upper()).value for name in counted] == list(range(len(counted)))
