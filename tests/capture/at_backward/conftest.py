import pytest

from consequent.correction import backward_passes


@pytest.fixture
def solves(monkeypatch):
    """The weights' layers that were solved for, one after the other."""
    found, solve = [], backward_passes.corrected_in_backward

    def counted(gathered, *args, **kwargs):
        found.append(gathered.products[0].use.layer)
        return solve(gathered, *args, **kwargs)

    monkeypatch.setattr(backward_passes, "corrected_in_backward", counted)
    return found
