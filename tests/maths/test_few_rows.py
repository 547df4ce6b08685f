"""The formula from the plain gradient alone, with fewer rows than columns."""

import pytest
import reference
import torch

from consequent.maths.damping import Damping
from consequent.maths.few_rows import solve_in_span


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("damping", [0.0, 1e-8, 1e-2, 10.0, ("relative", 0.1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("rows", [1, 5, 19])
def test_as_with_output_gradients(rows, dtype, damping):
    X, dZ = normal(rows, 20).to(dtype), normal(rows, 3, seed=1).to(dtype)
    given = Damping(damping[1], relative=True) if isinstance(damping, tuple) else Damping(damping)
    found = solve_in_span(X, dZ.T @ X, given.level(rows, 20))
    expected = reference.consequential_gradient(X.double().numpy(), dZ.double().numpy(), damping)
    error = reference.relative_error(found.gradient.numpy(), expected)
    assert error < (1e-3 if dtype == torch.float32 else 1e-9)
    torch.testing.assert_close(found.trace, X.double().square().sum())


def test_rounding_outside_of_the_span_is_not_divided_by_the_damping():
    """What the feature side does: for it, see how far it is off."""
    X, dZ = normal(4, 30).float(), normal(4, 3, seed=1).float()
    G, damping = dZ.T @ X, 1e-6
    expected = reference.consequential_gradient(X.double().numpy(), dZ.double().numpy(), damping)
    found = solve_in_span(X, G, Damping(damping).level(4, 30)).gradient
    moment = X.double().T @ X.double() + damping * torch.eye(30, dtype=torch.float64)
    by_features = torch.linalg.solve(moment, G.double().T).T
    assert reference.relative_error(found.numpy(), expected) < 1e-5
    assert reference.relative_error(by_features.numpy(), expected) > 1e-2


def test_rows_that_are_there_twice():
    X, dZ = normal(3, 12).repeat(2, 1), normal(6, 2, seed=1)
    found = solve_in_span(X, dZ.T @ X, Damping(0.03).level(6, 12))
    expected = reference.consequential_gradient(X.numpy(), dZ.numpy(), 0.03)
    assert reference.relative_error(found.gradient.numpy(), expected) < 1e-9


@pytest.mark.parametrize("apart", [1e-3, 1e-6, 1e-8, 1e-12, 0.0])
@pytest.mark.parametrize("damping", [1e-3, 0.1])
def test_rows_that_are_nearly_dependent_keep_their_digits(damping, apart):
    """Of squares of small differences, none would be left."""
    X = 3 + apart * normal(4, 20)
    dZ = normal(4, 3, seed=1)
    found = solve_in_span(X, dZ.T @ X, Damping(damping).level(4, 20))
    expected = reference.consequential_gradient(X.numpy(), dZ.numpy(), damping)
    condition = reference.condition_number(X.numpy(), damping)
    assert reference.relative_error(found.gradient.numpy(), expected) < 10 * torch.finfo(torch.float64).eps * condition
    assert found.outside == 0


@pytest.mark.parametrize("apart", [1e-6, 1e-7, 1e-8, 3e-9, 1e-9, 1e-10])
@pytest.mark.parametrize("seed", range(20))
def test_errors_that_cancel_in_rows_that_are_nearly_parallel_are_no_edit(apart, seed):
    """What is left of them is a difference that squares do not tell from rounding."""
    direction, errors = normal(1, 5, seed=seed), normal(1, 1, seed=seed + 100)
    X = direction + apart * normal(2, 5, seed=seed + 200)
    dZ = torch.cat([errors, -errors * (1 + 1e-9)])
    G = dZ.T @ X
    found = solve_in_span(X, G, Damping(1.0).level(2, 5))
    assert found.outside == 0
    expected = reference.consequential_gradient(X.numpy(), dZ.numpy(), 1.0)
    size = (dZ.norm() * X.norm()).item()
    assert abs(found.gradient.numpy() - expected).max() < 100 * torch.finfo(torch.float64).eps * size
    if apart != 1e-7:  # there an edit in such a direction may be as large as what rounding leaves
        edited = solve_in_span(X, G + 1e-3 * size * normal(1, 5, seed=seed + 300), Damping(1.0).level(2, 5))
        assert edited.outside > 0


@pytest.mark.parametrize("damping", [1e-10, 1e-3, 1.0])
def test_what_is_outside_of_dependent_rows_is_only_shortened(damping):
    """However small λ is, and although rounding has rows in every direction."""
    X = torch.cat([normal(6, 4), normal(6, 1) * normal(1, 7, seed=2)], dim=1)  # of rank 5
    G = normal(6, 3, seed=1).T @ X
    edited = G.clone()
    edited[1, 9] += 5.0
    level = Damping(damping).level(6, 11)
    plain, found = solve_in_span(X, G, level), solve_in_span(X, edited, level)
    assert plain.outside == 0
    assert found.outside > 1e-3
    inside = (edited - G) @ torch.linalg.pinv(X) @ X
    outside = edited - G - inside
    inside = torch.linalg.solve(X.T @ X + damping * torch.eye(11, dtype=X.dtype), inside.T).T
    expected = plain.gradient + inside + outside / (X.square().sum() + damping)
    torch.testing.assert_close(found.gradient, expected, rtol=1e-4, atol=1e-4 * float(expected.norm()))


@pytest.mark.parametrize("damping", [0.0, 0.1])
def test_rows_of_zeros(damping):
    found = solve_in_span(torch.zeros(3, 5), torch.zeros(2, 5), Damping(damping, relative=True).level(3, 5))
    assert torch.equal(found.gradient, torch.zeros(2, 5, dtype=torch.float64))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_bad_numbers_give_nan(bad):
    X = normal(3, 5)
    X[0, 0] = bad
    found = solve_in_span(X, normal(2, 5), Damping(0.1).level(3, 5))
    assert not found.gradient.isfinite().all()
