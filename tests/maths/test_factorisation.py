"""Solving with ``matrix + λI``: what is right, what fails, and what a failure gets."""

import pytest
import torch

from consequent.maths import factorisation
from consequent.maths.damping import Damping
from consequent.maths.factorisation import damped_inverse, damped_solve


def moment(rows, columns, dtype=torch.float64, seed=0):
    x = torch.randn(2, rows, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return (x.mT @ x).to(dtype), x


@pytest.fixture(params=[True, False], ids=["host looks", "host must not look"])
def looks(request, monkeypatch):
    monkeypatch.setattr(factorisation, "may_sync", lambda tensor: request.param)
    return request.param


@pytest.mark.parametrize("outputs", [1, 5, 200])
@pytest.mark.parametrize("size", [1, 4, 140])
@pytest.mark.parametrize("is_large", [True, False])
def test_it_solves(size, outputs, is_large, looks):
    matrix, _ = moment(3 * size, size)
    right, damping = torch.randn(2, size, outputs, dtype=torch.float64), torch.tensor([0.5, 2.0], dtype=torch.float64)
    expected = torch.linalg.inv(matrix + damping[:, None, None] * torch.eye(size)) @ right
    solved = damped_solve(matrix, right, damping, is_large=is_large)
    torch.testing.assert_close(solved.solution, expected)
    assert int(solved.failed) == 0
    inverse = damped_inverse(matrix, damping, is_large=is_large)
    torch.testing.assert_close(inverse.solution @ right, expected)
    assert int(inverse.failed) == 0


def test_the_matrix_is_left_alone():
    matrix, _ = moment(5, 4)
    before = matrix.clone()
    damped_solve(matrix, torch.ones(2, 4, 3, dtype=torch.float64), torch.ones(2, dtype=torch.float64))
    assert torch.equal(matrix, before)


def test_dependent_inputs_without_damping_get_the_pseudo_inverse():
    """Eigenvalues that rounding explains are left out."""
    _, x = moment(3, 6)
    x = x.float()
    matrix, right = x.mT @ x, x.mT @ torch.randn(2, 3, 4)
    solution, failed = damped_solve(matrix, right, torch.zeros(2))
    expected = torch.linalg.pinv(matrix.double(), rcond=1e-5) @ right.double()
    assert failed == 2
    torch.testing.assert_close(solution.double(), expected, rtol=1e-3, atol=1e-4)
    inverse, failed = damped_inverse(matrix, torch.zeros(2))
    assert failed == 2
    torch.testing.assert_close((inverse @ right).double(), expected, rtol=1e-2, atol=1e-3)


def test_where_the_host_must_not_look_a_failure_gets_the_shortened_plain_gradient(monkeypatch):
    monkeypatch.setattr(factorisation, "may_sync", lambda tensor: False)
    matrix, _ = moment(8, 4)
    matrix[1] = -torch.eye(4, dtype=torch.float64)  # no second moment at all
    right, damping = torch.randn(2, 4, 3, dtype=torch.float64), torch.full((2,), 0.1, dtype=torch.float64)
    solved = damped_solve(matrix, right, damping)
    inverse = damped_inverse(matrix, damping)
    assert int(solved.failed) == int(inverse.failed) == 1
    torch.testing.assert_close(solved.solution[1], right[1] / (-4 + 0.1))
    torch.testing.assert_close(inverse.solution[1], torch.eye(4, dtype=torch.float64) / (-4 + 0.1))
    torch.testing.assert_close(
        solved.solution[0], torch.linalg.inv(matrix[0] + 0.1 * torch.eye(4, dtype=torch.float64)) @ right[0]
    )


@pytest.mark.parametrize("is_large", [True, False])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_visible(value, is_large, looks):
    matrix, _ = moment(8, 4)
    matrix[1, 2, 2] = value
    right = torch.randn(2, 4, 3, dtype=torch.float64)
    right[1, 2] = value  # as the gradient of such inputs has it
    solution, failed = damped_solve(matrix, right, torch.ones(2, dtype=torch.float64), is_large=is_large)
    assert solution[0].isfinite().all()
    assert not solution[1].isfinite().all()
    assert int(failed) == 0  # it is no fault of the factorisation


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("share", [1e-1, 1e-3, 1e-5, 1e-7])
def test_an_update_of_nearly_dependent_inputs_does_not_overshoot(scale, share, looks):
    """Whatever λ is beside the rounding of float32: outputs move toward their targets, and not past them."""
    generator = torch.Generator().manual_seed(0)
    x = scale * torch.randn(40, 1, generator=generator) @ torch.randn(1, 12, generator=generator)
    x = x + share * scale * torch.randn(40, 12, generator=generator)
    wanted = torch.randn(40, 3, generator=generator)
    for level in (0.0, 1e-12, 1e-6, 1e-3):
        update, _ = damped_solve((x.mT @ x)[None], (x.mT @ wanted)[None], torch.tensor([level * scale**2]))
        assert (x @ update[0]).norm() <= 1.05 * wanted.norm()


def test_which_dampings_are_above_all_rounding():
    assert Damping(0.1, relative=True).is_large(128, 800, torch.float32)
    assert not Damping(1e-6, relative=True).is_large(128, 800, torch.float32)
    assert Damping(1e-6, relative=True).is_large(128, 800, torch.float64)
    assert not Damping(0.1).is_large(128, 800, torch.float64)  # the inputs may be of any size
