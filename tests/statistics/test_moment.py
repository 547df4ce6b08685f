"""Moment and Factor: what adding uses makes of the matrix, and all ways to solve with it, against the naive solve."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from one_weight import DAMPINGS, FACTORS, cases, check_solved, dense_case, gathered

from consequent.capture.records import Record
from consequent.engines.inverse_factor import inverse_factor
from consequent.maths.damping import Damping
from consequent.statistics.moment import Factor, Moment
from consequent.statistics.rows import Rows


def moment_of(uses):
    return gathered(Rows, uses).moment(keep_rows=True)


def factorised(moment, damping):
    """(λ, the inverse factor of the matrix plus it)."""
    return damping, inverse_factor(moment.matrix, damping.level(moment.rows, moment.columns))


def with_factor(moment, damping):
    factor = factorised(moment, damping)
    return Moment(moment.uses, moment.features, moment.biases, moment.rows, moment.matrix, factor)


def by_inverse(moment, damping):
    factor = factorised(moment, damping)
    return Factor(moment.uses, moment.features, moment.biases, moment.rows, inverse=factor)


def by_cholesky(moment, damping):
    level = damping.level(moment.rows, moment.columns)(moment.matrix)
    cholesky = torch.linalg.cholesky(moment.matrix + level * torch.eye(moment.columns).double())
    return Factor(moment.uses, moment.features, moment.biases, moment.rows, cholesky=cholesky)


# Name -> (a statistic of a moment and λ, whether the host may look).
WAYS = {
    "moment": (lambda moment, _: moment, True),
    "moment, unseen": (lambda moment, _: moment, False),
    "moment with its factor": (with_factor, False),
    "factor by inverse": (by_inverse, False),
    "factor by cholesky": (by_cholesky, True),
}


@pytest.mark.parametrize("name", WAYS)
@settings(max_examples=20, deadline=None)
@given(case=cases(), damping=DAMPINGS, factor=FACTORS)
def test_solve(name, case, damping, factor):
    """All of them equal the naive solve, and so each other."""
    make, may_wait = WAYS[name]
    statistic = make(moment_of(case.uses()), damping)
    solution = check_solved(case, statistic, damping, may_wait=may_wait, factor=factor)
    assert (solution.side, solution.change is None) == ("features", False)


@settings(max_examples=20, deadline=None)
@given(cases(), st.randoms(use_true_random=False))
def test_uses_added_to_a_moment_are_those_added_to_its_rows(case, random):
    """Whatever their order, and where biases are met later."""
    uses = case.uses()
    together = moment_of(uses)
    random.shuffle(uses)
    one_by_one = Rows.of(uses[0]).moment(keep_rows=True)
    for use in uses[1:]:
        one_by_one = one_by_one.add(use)
    assert (one_by_one.uses, one_by_one.rows) == (tuple(uses), together.rows)
    matrix = one_by_one.with_biases(together.biases).matrix
    np.testing.assert_allclose(matrix.numpy(), together.matrix.numpy(), rtol=1e-12, atol=1e-12)


def test_columns_for_other_biases():
    case = dense_case((True, True))
    one, other = case.biases
    moment = moment_of(case.uses()[:1])  # has met the first one only
    assert moment.with_biases([one]) is moment
    wider = moment.with_biases([other, one])
    assert [id(bias) for bias in wider.biases] == [id(other), id(one)]
    expected = np.zeros((1, 7, 7))
    places = [0, 1, 2, 3, 4, 6]
    expected[np.ix_([0], places, places)] = moment.matrix.numpy()
    np.testing.assert_array_equal(wider.matrix.numpy(), expected)
    assert (wider.rows, wider.uses) == (moment.rows, moment.uses)


@pytest.mark.parametrize("make", [with_factor, by_inverse])
def test_a_factor_is_for_its_own_damping(make):
    moment = moment_of(dense_case().uses())
    assert moment.factor_for(Damping(0.3)) is None
    statistic = make(moment, Damping(0.3))
    assert statistic.factor_for(Damping(0.3)) is not None
    assert statistic.factor_for(Damping(0.4)) is None
    assert statistic.factor_for(Damping(0.3, relative=True)) is None


def test_a_factor_is_not_taken_for_another_damping_nor_after_more_uses():
    case = dense_case((True, True))
    first, second = case.uses()
    moment = with_factor(moment_of([first]), Damping(0.3)).add(second)
    assert moment.factor is None
    check_solved(case, with_factor(moment, Damping(0.3)), Damping(5.0), may_wait=False)


def test_nothing_is_added_to_a_factor():
    case = dense_case()
    with pytest.raises(NotImplementedError):
        by_cholesky(moment_of(case.uses()), Damping(0.3)).add(case.uses()[0])


@pytest.mark.parametrize("name", WAYS)
def test_bad_numbers_are_told(name):
    make, may_wait = WAYS[name]
    case = dense_case()
    statistic = make(moment_of(case.uses()), Damping(0.3))
    case.output_grads[0][0, 0] = torch.nan
    case.backpropagate()
    assert not statistic.solve(Record(case.weight, statistic), Damping(0.3), may_wait=may_wait).finite
