import pytest

from ranks.crew import Crew


def _crew(size):
    crew = Crew(size)
    yield crew
    crew.stop()


@pytest.fixture(scope="session")
def two():
    """Two ranks."""
    yield from _crew(2)


@pytest.fixture(scope="session")
def four():
    """Four ranks."""
    yield from _crew(4)
