"""Rows: what adding uses keeps, and their solve, against the naive one."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from one_weight import DAMPINGS, FACTORS, cases, check_solved, check_solved_as_it_is, dense_case, gathered

from consequent.maths.damping import Damping
from consequent.statistics.moment import Moment
from consequent.statistics.rows import Rows


def as_kind(kind, rows):
    """The rows, or their moment."""
    return rows if kind is Rows else rows.moment(keep_rows=True)


@settings(max_examples=40, deadline=None)
@given(cases(), DAMPINGS, FACTORS)
def test_solve(case, damping, factor):
    solution = check_solved(case, gathered(Rows, case.uses()), damping, factor=factor)
    assert (solution.side, solution.edited) == ("samples", False)


def test_what_a_use_adds():
    case = dense_case((False, True, False, True))
    uses = case.uses()
    first = Rows.of(uses[0])
    assert (first.uses, first.features, first.biases, first.rows) == ((uses[0],), 5, (), 3)
    rows = gathered(Rows, uses)
    assert rows.uses == tuple(uses)
    assert [id(bias) for bias in rows.biases] == [id(case.layers[1].bias), id(case.layers[3].bias)]
    assert (rows.rows, rows.columns) == (12, 7)
    assert rows.add(case.uses()[1]).biases == rows.biases  # met before
    assert (first.rows, first.biases) == (3, ())  # a value: what is added makes another one


@settings(max_examples=20, deadline=None)
@given(cases(), DAMPINGS, st.randoms(use_true_random=False))
def test_the_order_of_uses_does_not_matter(case, damping, random):
    uses = case.uses()
    random.shuffle(uses)
    check_solved(case, gathered(Rows, uses), damping)


@pytest.mark.parametrize("keep_rows", [False, True])
def test_the_moment_stands_for_them(keep_rows):
    case = dense_case((True, False))
    uses = case.uses()
    rows = gathered(Rows, uses)
    moment = rows.moment(keep_rows=keep_rows)
    case.backpropagate()
    X = case.rows()
    np.testing.assert_allclose(moment.matrix.numpy(), X.transpose(0, 2, 1) @ X)
    assert (moment.uses, moment.biases, moment.rows) == (rows.uses, rows.biases, rows.rows)
    assert [(use.inputs is None, use.output_grad is None) for use in uses] == 2 * [(not keep_rows, not keep_rows)]


@pytest.mark.parametrize("kind", [Rows, Moment])
@pytest.mark.parametrize("without", ["weight", "bias"])
def test_what_has_no_gradient_leaves_the_solve(without, kind):
    case = dense_case((True, True))
    statistic = as_kind(kind, gathered(Rows, case.uses()))
    case.backpropagate()
    getattr(case.layers[0], without).grad = None
    expected = case.expected(Damping(0.3))
    assert expected.shape[-1] == {"weight": 2, "bias": 6}[without]
    check_solved_as_it_is(case, statistic, Damping(0.3), expected)
    assert getattr(case.layers[0], without).grad is None


@pytest.mark.parametrize("kind", [Rows, Moment])
def test_biases_alone(kind):
    case = dense_case((True, True), trains_weight=False)
    rows = gathered(Rows, case.uses())
    assert (rows.features, rows.columns) == (0, 2)
    check_solved(case, as_kind(kind, rows), Damping(0.3))


@pytest.mark.parametrize("kind", [Rows, Moment])
def test_no_damping_is_the_pseudo_inverse(kind):
    case = dense_case((True,), features=7, rows=4)
    statistic = as_kind(kind, Rows.of(case.uses()[0]))
    check_solved(case, statistic, Damping(0.0), factor=0.25, rtol=1e-6)


def test_an_edited_gradient_is_shortened():
    case = dense_case((True,))
    rows = Rows.of(case.uses()[0])
    case.backpropagate()
    case.weight.grad[0, 0] += 1
    expected = case.gradients() / ((case.rows() ** 2).sum() + 0.3)
    assert check_solved_as_it_is(case, rows, Damping(0.3), expected).edited
