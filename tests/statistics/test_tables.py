"""Tables of embeddings where something else is in their gradient, or it was scaled since the backward pass."""

import pytest
import torch
from torch import nn

import consequent

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
