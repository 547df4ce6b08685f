"""The inverse Cholesky factor by blocks against torch's own solve in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consequent.engines import inverse_factor as inverse_factors
from consequent.engines.inverse_factor import inverse_factor
from consequent.maths.damping import Level

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else ["cpu"]


def moment(batch, size, rows, dtype=torch.float64, seed=0):
    X = torch.randn(*batch, rows, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (X.mT @ X).to(dtype)


@settings(max_examples=60, deadline=None)
@given(
    batch=st.sampled_from([(), (1,), (3,), (2, 2)]),
    size=st.integers(1, 150),
    rows=st.integers(1, 200),
    largest_block=st.integers(1, 70),
    level=st.sampled_from([1e-3, 0.5, 20.0]),
    of_trace=st.booleans(),
)
def test_it_solves_what_torch_solves(batch, size, rows, largest_block, level, of_trace):
    matrix = moment(batch, size, rows)
    trace = matrix.diagonal(dim1=-2, dim2=-1).sum(-1)
    right = torch.randn(*batch, size, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    levels = level * trace if of_trace else torch.full_like(trace, level)
    damped = matrix + levels[..., None, None] * torch.eye(size, dtype=torch.float64)
    factor = inverse_factor(matrix, Level(level, of_trace), largest_block=largest_block)
    solution, rescued, failures = factor.solve(right)
    residual = (damped @ solution - right).norm() / (torch.linalg.matrix_norm(damped).max() * solution.norm())
    assert residual < 1e-13 * size
    assert (rescued, failures) == (0, 0)
    assert torch.equal(factor.inverse, factor.inverse.tril())
    assert torch.allclose(factor.status[..., 0], trace)
    assert torch.equal(factor.status[..., 1], levels)
    assert factor.status.shape == (*batch, 4)


@pytest.mark.parametrize("bad", [False, True])
def test_large_matrices_are_factorised_one_by_one(monkeypatch, bad):
    matrices = moment((3,), 20, 30)
    if bad:
        matrices[1, 4, 4] = -1e3
    together = inverse_factor(matrices, Level(0.5))
    monkeypatch.setattr(inverse_factors, "_are_large", lambda matrices: True)
    one_by_one = inverse_factor(matrices, Level(0.5))
    assert torch.equal(one_by_one.status, together.status)
    assert one_by_one.status[:, 2].tolist() == [1, not bad, 1]
    assert torch.allclose(one_by_one.inverse[[0, 2]], together.inverse[[0, 2]])


@pytest.mark.parametrize("place", [0, 40, 63])
@pytest.mark.parametrize("largest_block", [16, 64])
def test_a_matrix_that_cannot_be_factorised_gives_the_shortened_gradient_and_leaves_others_alone(place, largest_block):
    good, bad = moment((), 64, 100), moment((), 64, 100)
    bad[place, place] = -1e3
    right = torch.randn(2, 64, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    factor = inverse_factor(torch.stack([good, bad]), Level(0.5), largest_block=largest_block)
    solution, rescued, failures = factor.solve(right)
    assert (rescued, failures) == (0, 1)
    identity = torch.eye(64, dtype=torch.float64)
    assert torch.allclose(solution[0], torch.linalg.solve(good + 0.5 * identity, right[0]))
    assert torch.allclose(solution[1], right[1] / (bad.trace() + 0.5))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("few_calls", [False, True])
@pytest.mark.parametrize(("size", "layers"), [(300, 3), (1025, 1), (2100, 2)])
def test_float32_is_as_accurate_as_a_triangular_solve(device, size, layers, few_calls):
    """On a GPU, where blocks are what the kernel takes; on a CPU they are cut as well."""
    matrix = moment((layers,), size, 2 * size, torch.float32)
    right = torch.randn(layers, size, 5, generator=torch.Generator().manual_seed(1))
    damped = matrix.double() + 0.1 * torch.eye(size, dtype=torch.float64)
    expected = torch.linalg.solve(damped, right.double())
    by_torch = torch.cholesky_solve(right, torch.linalg.cholesky(damped.float()))
    blocks = None if device == "cuda" else 200
    factor = inverse_factor(matrix.to(device), Level(0.1), largest_block=blocks, few_calls=few_calls)
    solution, rescued, failures = factor.solve(right.to(device))
    assert (rescued, failures) == (0, 0)
    error, of_torch = ((each.cpu().double() - expected).norm() for each in (solution, by_torch))
    assert error <= 10 * of_torch
