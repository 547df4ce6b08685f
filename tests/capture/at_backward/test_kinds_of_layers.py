"""Every kind of layer, tables of embeddings among them, against the reference."""

from contextlib import nullcontext

import numpy as np
import pytest
import reference
import torch
from cases import CASES, Around, called, check_error, included, random_like
from cases import build as build_case
from loop.expected import DAMPING, assert_close, weights
from models.expected import half_squares, twin_of
from torch import nn

import consequent
from at_backward.expected import TOLERANCE
from consequent import NonFiniteError


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_layer(name, dtype, create_graph):
    module, x = build_case(name, dtype)
    correction = consequent.Consequentialism(
        Around(module), damping=DAMPING, loss_reduction="sum", at="backward", **included(module)
    )
    output = called(correction.model, x)
    output_grad = random_like(output, name)
    parameters = [p for p in (module.weight, reference.bias_of(module)) if p is not None]
    grads = torch.autograd.grad(output, parameters, output_grad, create_graph=create_graph)
    assert all(grad.dtype == dtype and grad.shape == p.shape for grad, p in zip(grads, parameters, strict=True))
    assert grads[0].is_sparse == getattr(module, "sparse", False)
    actual = reference.gradient_matrices(module, *(*map(reference.to_numpy, grads), None)[:2])
    designs, rows = reference.design_matrices(module, x), reference.output_rows(module, output_grad)
    for matrix, X, dZ in zip(actual, designs, rows, strict=True):
        expected = reference.consequential_gradient(X, dZ, DAMPING)
        assert check_error(matrix, expected, reference.condition_number(X, DAMPING), dtype)


def table_gradient(X, dZ, damping=DAMPING):
    """[features, outputs]."""
    return torch.from_numpy(reference.consequential_gradient(X, dZ, damping)).T


def one_hot(indices, size, padding_idx=None):
    rows = np.zeros((indices.numel(), size))
    for row, index in enumerate(indices.flatten().tolist()):
        rows[row, index] = index != padding_idx
    return rows


@pytest.mark.parametrize("batch", [1, 5])
def test_transposed_convolutions(batch):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.ConvTranspose2d(3, 2, 3, stride=2, padding=1, output_padding=1),
        nn.Tanh(),
        nn.ConvTranspose2d(2, 4, 2, groups=2, bias=False),
    ).double()
    x = torch.randn(batch, 3, 3, 4).double()
    plain = twin_of(model)
    correction = consequent.Consequentialism(model, damping=DAMPING, at="backward")
    assert list(correction.corrected) == ["0", "2"]
    half_squares(model(x)).backward()
    hidden = plain[0](x)
    outputs = plain[2](torch.tanh(hidden))
    grads = torch.autograd.grad(half_squares(outputs), [hidden, outputs])
    for layer, mine, inputs, grad in zip(
        (plain[0], plain[2]), (model[0], model[2]), (x, torch.tanh(hidden)), grads, strict=True
    ):
        weight_grad, bias_grad = reference.corrected_gradients(layer, inputs, grad, DAMPING)
        np.testing.assert_allclose(mine.weight.grad.numpy(), batch * weight_grad, rtol=1e-8, atol=1e-11)
        if layer.bias is not None:
            np.testing.assert_allclose(mine.bias.grad.numpy(), batch * bias_grad, rtol=1e-8, atol=1e-11)


class Words(nn.Module):
    """A table, looked at twice, under a layer."""

    def __init__(self, sparse=False, padding_idx=None):
        super().__init__()
        self.table = nn.Embedding(9, 4, sparse=sparse, padding_idx=padding_idx)
        self.layer = nn.Linear(4, 3)

    def forward(self, words, more=None):
        hidden = self.table(words)
        if more is not None:
            hidden = hidden + 2 * self.table(more)
        return self.layer(hidden.mean(1))


@pytest.mark.parametrize("padding_idx", [None, 2])
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
def test_embeddings_by_include(sparse, twice, padding_idx):
    torch.manual_seed(0)
    model = Words(sparse, padding_idx).double()
    words = torch.tensor([[1, 2, 2], [5, 1, 1], [7, 2, 5], [1, 1, 1]])
    more = words.flip(0).roll(1, 1) if twice else None
    plain = twin_of(model)
    correction = consequent.Consequentialism(model, damping=DAMPING, at="backward", include=["table", "layer"])
    half_squares(model(words, more)).backward()
    looked_up = [plain.table(words), *([plain.table(more)] if twice else [])]
    outputs = plain.layer((looked_up[0] + (2 * looked_up[1] if twice else 0)).mean(1))
    grads = torch.autograd.grad(half_squares(outputs), looked_up)
    X = np.concatenate([one_hot(w, 9, padding_idx) for w in ([words, more] if twice else [words])])
    dZ = np.concatenate([grad.reshape(-1, 4).numpy() for grad in grads])
    grad = model.table.weight.grad
    assert grad.is_sparse == sparse
    torch.testing.assert_close(grad.to_dense() if sparse else grad, 4 * table_gradient(X, dZ), rtol=1e-6, atol=1e-9)
    assert (correction.samples, correction.counters.steps) == (4, 1)
    assert sorted(correction.corrected) == ["layer", "table"]


def test_embeddings_stay_plain_unless_they_are_included():
    torch.manual_seed(0)
    model, words = Words().double(), torch.tensor([[1, 2, 2], [5, 1, 1]])
    plain = twin_of(model)
    consequent.Consequentialism(model, damping=DAMPING, at="backward")
    for net in (model, plain):
        half_squares(net(words)).backward()
    torch.testing.assert_close(model.table.weight.grad, plain.table.weight.grad)
    assert not torch.allclose(model.layer.weight.grad, plain.layer.weight.grad)


BAGS = {
    "sum": ({"mode": "sum"}, False),
    "mean": ({"mode": "mean"}, False),
    "mean, padding": ({"mode": "mean", "padding_idx": 2}, False),
    "sum, weights": ({"mode": "sum"}, True),
    "sum, sparse": ({"mode": "sum", "sparse": True}, False),
    "mean, sparse, padding": ({"mode": "mean", "sparse": True, "padding_idx": 2}, False),
}


@pytest.mark.parametrize("damping", [DAMPING, 0.0])
@pytest.mark.parametrize("bags", [3, 30])
@pytest.mark.parametrize("name", BAGS)
def test_bags_of_embeddings_by_include(name, bags, damping):
    settings, is_weighted = BAGS[name]
    torch.manual_seed(0)
    layer, indices = nn.EmbeddingBag(9, 4, **settings).double(), torch.randint(0, 9, (bags, 3))
    factors = torch.randn(bags, 3).double() if is_weighted else None
    consequent.Consequentialism(layer, damping=damping, at="backward", include=[nn.EmbeddingBag])
    outputs = layer(indices, per_sample_weights=factors)
    output_grad = torch.randn_like(outputs)
    outputs.backward(output_grad)
    X = np.zeros((bags, 9))
    for bag, row in enumerate(indices.tolist()):
        kept = [place for place, index in enumerate(row) if index != layer.padding_idx]
        for place in kept:
            weight = factors[bag, place].item() if is_weighted else 1.0
            X[bag, row[place]] += weight / len(kept) if layer.mode == "mean" else weight
    grad = layer.weight.grad
    assert grad.is_sparse == layer.sparse
    expected = bags * table_gradient(X, output_grad.numpy(), damping)
    torch.testing.assert_close(grad.to_dense() if layer.sparse else grad, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("cls", [nn.Embedding, nn.EmbeddingBag])
def test_bad_numbers_in_tables(cls, sparse):
    """All that there is of the gradient is NaN: of a sparse one, the rows that were looked up."""
    torch.manual_seed(0)
    model = nn.Sequential(cls(9, 4, sparse=sparse)).double()
    correction = consequent.Consequentialism(model, damping=DAMPING, at="backward", include=["0"])
    indices = torch.tensor([[1, 2], [4, 5], [7, 1]])
    outputs = model(indices)
    output_grad = torch.ones_like(outputs)
    output_grad.view(-1)[0] = torch.inf
    outputs.backward(output_grad)
    grad = model[0].weight.grad
    assert (grad.coalesce().values() if sparse else grad).isnan().all()
    model.zero_grad()
    correction.check = True
    with pytest.raises(NonFiniteError, match="layer '0'"):
        model(indices).backward(output_grad)


@pytest.mark.parametrize("cls", [nn.Embedding, nn.EmbeddingBag])
def test_differentiable_gradients_of_tables(cls):
    torch.manual_seed(0)
    model = nn.Sequential(cls(9, 4)).double()
    consequent.Consequentialism(model, damping=DAMPING, at="backward", include=["0"])
    indices = torch.tensor([[1, 2], [4, 5], [7, 1]])
    plain, found = (
        torch.autograd.grad(half_squares(torch.tanh(model(indices))), model[0].weight, create_graph=create_graph)[0]
        for create_graph in (False, True)
    )
    assert found.requires_grad
    torch.testing.assert_close(found, plain)


@pytest.mark.parametrize(
    "context", [nullcontext, lambda: torch.autocast("cpu", torch.bfloat16)], ids=["plain", "autocast"]
)
def test_tables_with_a_layer_above_train(context):
    """Three steps by Adam on a sparse table's dense twin and on the table itself go the same way as at the step."""
    found = []
    for at in ("backward", "step"):
        torch.manual_seed(0)
        model, words = Words(), torch.tensor([[1, 2, 2], [5, 1, 1]])
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        consequent.attach(optimizer, model, damping=DAMPING, at=at, include=["table", "layer"])
        for _ in range(3):
            optimizer.zero_grad()
            with context():
                outputs = model(words)
            half_squares(outputs.float()).backward()
            optimizer.step()
        found.append(weights(model))
    assert_close(*found, 1e-4)
