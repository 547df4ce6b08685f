"""Who factorises what: the balancing and the choice of the cost model, without any ranks."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from consequent.ranks.ownership import ON_CPUS, ON_GPUS, Matrix, Rates, balanced, divided
from consequent.ranks.traffic import packed_length

COSTS = st.lists(st.integers(1, 10**6), max_size=30)


def loads(costs, owners, ranks):
    totals = [0] * ranks
    for cost, owner in zip(costs, owners, strict=True):
        totals[owner] += cost
    return totals


def matrix(size, groups=1):
    return Matrix(groups, size, 4 * groups * packed_length(size))


@given(costs=COSTS, ranks=st.integers(1, 9))
def test_no_rank_has_more_than_its_share_and_one_matrix(costs, ranks):
    owners = balanced(costs, ranks)
    assert all(0 <= owner < ranks for owner in owners)
    assert len(owners) == len(costs)
    assert max(loads(costs, owners, ranks)) <= sum(costs) / ranks + max(costs, default=0)


@settings(max_examples=50, deadline=None)
@given(costs=st.lists(st.integers(1, 50), min_size=1, max_size=7), ranks=st.integers(2, 3))
def test_it_is_near_the_best_division_there_is(costs, ranks):
    best = min(max(loads(costs, owners, ranks)) for owners in product(range(ranks), repeat=len(costs)))
    assert 3 * max(loads(costs, balanced(costs, ranks), ranks)) <= 4 * best


@given(costs=st.lists(st.integers(1, 10**6), max_size=12, unique=True), ranks=st.integers(1, 5), data=st.data())
def test_the_order_of_the_layers_does_not_matter(costs, ranks, data):
    order = data.draw(st.permutations(range(len(costs))))
    owners = balanced(costs, ranks)
    assert balanced([costs[place] for place in order], ranks) == [owners[place] for place in order]


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5000), max_size=12),
    ranks=st.integers(2, 9),
    rates=st.sampled_from([ON_CPUS, ON_GPUS]),
)
def test_what_is_chosen_is_estimated_to_be_the_faster_way(sizes, ranks, rates):
    division = divided(tuple(matrix(size) for size in sizes), ranks, rates)
    is_shared = any(owner is not None for owner in division.owners)
    assert is_shared == (division.shared < division.repeated)
    shared = [size for size, owner in zip(sizes, division.owners, strict=True) if owner is not None]
    repeated = [size for size, owner in zip(sizes, division.owners, strict=True) if owner is None]
    assert min(shared, default=10**9) >= max(repeated, default=0), "the largest are shared out"


@pytest.mark.parametrize("rates", [ON_CPUS, ON_GPUS])
def test_small_matrices_and_single_ones_are_repeated(rates):
    assert set(divided((matrix(64),) * 20, 8, rates).owners) == {None}
    assert divided((matrix(4096),), 8, rates).owners == (None,)
    assert divided((), 8, rates).owners == ()


@pytest.mark.parametrize("rates", [ON_CPUS, ON_GPUS])
def test_large_ones_are_shared_out_evenly(rates):
    division = divided((matrix(4096),) * 8 + (matrix(64),), 4, rates)
    assert sorted(division.owners[:8]) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert division.owners[8] is None


def test_the_estimate_by_hand():
    rates = Rates(factorising=1e9, sending=1e8, message=0.1)
    division = divided((matrix(1000), matrix(1000)), 2, rates)
    size = 4 * packed_length(1000)
    assert division.repeated == pytest.approx(2 + 2 * size / 1e8 + 0.1)  # a ring of two: each sends all of it once
    assert division.shared == pytest.approx(1 + 4 * size / 1e8 + 4 * 0.1)
    assert division.owners == (0, 1)
    assert divided((matrix(1000), matrix(1000)), 2, rates._replace(message=0.5)).owners == (None, None)
