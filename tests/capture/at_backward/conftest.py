import pytest

import consequent.correction


@pytest.fixture
def solves(monkeypatch):
    """The weights' layers that were solved for, one after the other."""
    found, solve = [], consequent.correction.corrected_in_backward

    def counted(gathered, *args, **kwargs):
        found.append(gathered.products[0].use.layer)
        return solve(gathered, *args, **kwargs)

    monkeypatch.setattr(consequent.correction, "corrected_in_backward", counted)
    return found
