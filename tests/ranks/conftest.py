import pytest

from ranks.crew import Crew


@pytest.fixture(scope="session", params=[2, 4], ids=["two ranks", "four ranks"])
def ranks(request):
    """Two ranks, then four."""
    crew = Crew(request.param)
    yield crew
    crew.stop()
