"""Counts and Bags: what uses add, and their solve, against the naive one; also where gradients hold something else."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from one_weight import DAMPINGS, FACTORS, Case, check_solved, gathered
from torch import nn

import consequent
from consequent.maths.damping import Damping
from consequent.statistics.tables import Bags, Counts

TABLES = {
    "embedding": lambda sparse: nn.Embedding(9, 3, sparse=sparse),
    "bags": lambda sparse: nn.EmbeddingBag(40, 3, mode="sum", sparse=sparse),
}


def one_hot(indices, size):
    return nn.functional.one_hot(indices, size).double()


@pytest.mark.parametrize("at", ["step", "backward"])
@pytest.mark.parametrize("factor", [1.0, 0.25, -2.0])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("kind", TABLES)
def test_a_penalty_stays_plain_also_where_gradients_are_scaled(kind, sparse, factor, at):
    torch.manual_seed(0)
    table = TABLES[kind](sparse).double()
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    correction = consequent.attach(optimizer, table, damping=0.3, include=[type(table)], at=at)
    indices, wanted = torch.randint(0, 9, (4, 5)), torch.randn(4, 3, dtype=torch.float64)
    before = table.weight.detach().clone()
    X = one_hot(indices, table.num_embeddings)
    outputs = table(indices)
    if kind == "bags":
        dZ, X = wanted / 4, X.sum(1)
    else:
        outputs = outputs.sum(1)
        dZ, X = (wanted / 4).repeat_interleave(5, 0), X.flatten(0, 1)
    ((outputs * wanted).sum() / 4 + 0.05 * table.weight.square().sum()).backward()
    table.weight.grad.mul_(factor)
    optimizer.step()
    solved = torch.linalg.solve(X.T @ X + 0.3 * torch.eye(X.shape[1]).double(), X.T @ dZ)
    samples = correction.samples
    torch.testing.assert_close(before - table.weight.detach(), factor * (samples * solved + 0.1 * before))
    assert correction.counters.edited == 0


@st.composite
def table_cases(draw, kind):
    """Look-ups in one table, several at a time."""
    torch.manual_seed(draw(st.integers(0, 2**16)))
    size = draw(st.integers(1, 8))
    padding_idx = draw(st.sampled_from([None, size - 1]))
    if kind is nn.Embedding:
        table = nn.Embedding(size, 3, padding_idx=padding_idx, sparse=draw(st.booleans()))
        shapes = [(draw(st.integers(1, 6)),) for _ in range(draw(st.integers(1, 3)))]
    else:
        mode = draw(st.sampled_from(["sum", "mean"]))
        table = nn.EmbeddingBag(size, 3, mode=mode, padding_idx=padding_idx, sparse=draw(st.booleans()))
        shapes = [(draw(st.integers(1, 4)), draw(st.integers(1, 3))) for _ in range(draw(st.integers(1, 3)))]
    inputs = [torch.randint(0, size, shape) for shape in shapes]
    output_grads = [torch.randn(shape[0], 3).double() for shape in shapes]
    return Case([table.double()] * len(inputs), inputs, output_grads)


@settings(max_examples=40, deadline=None)
@given(table_cases(nn.Embedding), DAMPINGS, FACTORS)
def test_solve_with_counts(case, damping, factor):
    solution = check_solved(case, gathered(Counts, case.uses()), damping, factor=factor)
    assert solution.side == "features"
    assert case.weight.grad.is_sparse == case.layers[0].sparse


@settings(max_examples=40, deadline=None)
@given(table_cases(nn.EmbeddingBag), DAMPINGS, FACTORS)
def test_solve_with_bags(case, damping, factor):
    solution = check_solved(case, gathered(Bags, case.uses()), damping, factor=factor)
    assert solution.side == "samples"
    assert case.weight.grad.is_sparse == case.layers[0].sparse


@settings(max_examples=20, deadline=None)
@given(table_cases(nn.Embedding), st.randoms(use_true_random=False))
def test_counts_add_up_and_let_the_indices_go(case, random):
    uses = case.uses()
    random.shuffle(uses)
    statistic = gathered(Counts, uses)
    case.backpropagate()
    np.testing.assert_array_equal(statistic.counts.numpy(), case.rows()[0].sum(0))
    assert statistic.uses == tuple(uses)
    assert (statistic.rows, statistic.biases) == (case.rows().shape[1], ())
    assert all(use.inputs is None and use.output_grad is None for use in uses)


@settings(max_examples=20, deadline=None)
@given(table_cases(nn.EmbeddingBag), st.randoms(use_true_random=False))
def test_the_order_of_bags_does_not_matter(case, random):
    uses = case.uses()
    random.shuffle(uses)
    check_solved(case, gathered(Bags, uses), Damping(0.3))


def test_the_moment_of_bags():
    torch.manual_seed(0)
    table = nn.EmbeddingBag(4, 3, mode="sum").double()
    indices = [torch.randint(0, 4, (5, 3)) for _ in range(2)]
    case = Case([table, table], indices, [torch.randn(5, 3).double() for _ in indices])
    uses = case.uses()
    moment = gathered(Bags, uses).moment(keep_rows=False)
    assert all(use.inputs is None for use in uses)
    check_solved(case, moment, Damping(0.3))
