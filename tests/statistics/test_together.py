"""What goes together, and how much at a time."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from consequent.capture.use import Use
from consequent.layers.linear import Linear
from consequent.statistics import together as going_together
from consequent.statistics.rows import Rows, moments_together
from consequent.statistics.together import together


@given(st.lists(st.integers(0, 20)), st.integers(1, 50))
def test_every_item_is_in_one_list_of_its_kind_in_order(items, at_once):
    numbered = list(enumerate(items))
    before, going_together.AT_ONCE = going_together.AT_ONCE, at_once
    try:
        lists = list(together(numbered, lambda item: item[1] % 3, lambda item: 10))
    finally:
        going_together.AT_ONCE = before
    assert sorted(item for one in lists for item in one) == numbered
    for one in lists:
        assert one == sorted(one)
        assert len({value % 3 for _, value in one}) == 1
        assert len(one) <= max(1, at_once // 10)
    kinds = {value % 3 for _, value in numbered}
    assert at_once < 10 * len(items) or len(lists) == len(kinds)


def use_of(weight, inputs, bias):
    operation = Linear(1, weight.shape[1], len(weight), tuple(weight.shape))
    use = Use(None, operation, weight, bias, True, None, len(inputs), inputs.dtype)
    use.take(inputs, torch.randn(len(inputs), len(weight), dtype=inputs.dtype))
    return use


def test_moments_are_those_of_each_weight_alone():
    torch.manual_seed(0)
    kinds = [(5, 7, True), (5, 7, True), (5, 4, True), (5, 7, False), (6, 7, True), (5, 7, True), (5, 7, False)]
    all_rows, expected = [], []
    for count, features, has_bias in kinds:
        weight, bias = torch.randn(3, features).double(), torch.randn(3).double() if has_bias else None
        X = torch.randn(count, features, dtype=torch.float64)
        all_rows.append(Rows.of(use_of(weight, X, bias)))
        whole = torch.cat([X, torch.ones(count, 1, dtype=torch.float64)], 1) if has_bias else X
        expected.append(whole.T @ whole)
    again = torch.randn(5, 7, dtype=torch.float64)  # a second use of the first weight, with a bias of its own
    first, bias = all_rows[0].uses[0], torch.randn(3).double()
    all_rows[0] = all_rows[0].add(use_of(first.weight, again, bias))
    X = torch.zeros(10, 9, dtype=torch.float64)
    X[:5, :7], X[5:, :7] = first.inputs, again
    X[:5, 7] = X[5:, 8] = 1
    expected[0] = X.T @ X
    for moment, rows, matrix in zip(moments_together(all_rows), all_rows, expected, strict=True):
        torch.testing.assert_close(moment.matrix, matrix[None])
        assert moment.uses is rows.uses
        assert moment.rows == rows.rows
        assert all(use.inputs is None for use in rows.uses)
