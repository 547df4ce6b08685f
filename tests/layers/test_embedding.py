"""Embeddings as matrix products, against torch's own layers, loops, and numpy in float64."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from embedding_cases import ROWS, WIDTH, close, dense, prepared, ridge, seeded, with_numbers_everywhere
from torch import nn

from consequent.layers.embedding import Embedding

# name -> (arguments of the layer, indices)
EMBEDDINGS = {
    "plain": ({}, [[1, 2, 2], [0, 6, 2]]),
    "one-dimension": ({}, [1, 1, 5]),
    "one-index": ({}, 4),
    "three-dimensions": ({}, [[[1, 2], [2, 3]], [[0, 0], [5, 2]]]),
    "none": ({}, []),
    "padding": ({"padding_idx": 2}, [[1, 2, 2], [0, 6, 2]]),
    "padding-from-the-end": ({"padding_idx": -1}, [[1, 6, 2], [6, 6, 2]]),
    "padding-0": ({"padding_idx": 0}, [[0, 0, 3], [0, 1, 1]]),
    "only-padding": ({"padding_idx": 4}, [4, 4]),
    "by-frequency": ({"scale_grad_by_freq": True}, [[1, 2, 2], [0, 6, 2]]),
    "by-frequency-padding": ({"scale_grad_by_freq": True, "padding_idx": 2}, [[1, 2, 2], [0, 1, 1]]),
    "sparse": ({"sparse": True}, [[1, 2, 2], [0, 6, 2]]),
    "sparse-padding": ({"sparse": True, "padding_idx": 2}, [[1, 2, 2], [0, 6, 6]]),
    "max-norm": ({"max_norm": 0.5}, [[1, 2, 2], [0, 6, 2]]),
    "max-norm-1": ({"max_norm": 0.5, "norm_type": 1.0}, [3, 3, 1]),
    "max-norm-sparse": ({"max_norm": 0.5, "sparse": True, "padding_idx": 1}, [3, 3, 1]),
}


def build(name, dtype=torch.float64):
    """(module, indices)."""
    settings, indices = EMBEDDINGS[name]
    module = seeded(name, lambda: nn.Embedding(ROWS, WIDTH, dtype=dtype, **settings))
    return with_numbers_everywhere(module), torch.tensor(indices, dtype=torch.int64)


def naive_one_hot(module, indices):
    rows = np.zeros((indices.numel(), ROWS))
    for row, index in enumerate(indices.flatten().tolist()):
        rows[row, index] = index != module.padding_idx
    return torch.from_numpy(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", EMBEDDINGS)
def test_apply_is_the_layers_forward(name, dtype):
    module, indices = build(name, dtype)
    expected_module, _ = build(name, dtype)
    expected = expected_module(indices)
    call = prepared(module, Embedding, indices)
    outputs = call.operation.apply(call.inputs, module.weight, None)
    assert torch.equal(outputs if call.output_shape is None else outputs.reshape(call.output_shape), expected)
    assert torch.equal(module.weight, expected_module.weight)  # max_norm has written to it
    assert call.samples == (indices.shape[0] if indices.ndim else 1)
    assert call.inputs.shape == (indices.numel(),)


def test_max_norm_writes_to_the_weight():
    module, indices = build("max-norm")
    before, version = module.weight.detach().clone(), module.weight._version
    prepared(module, Embedding, indices)
    assert not torch.equal(module.weight, before)
    assert module.weight._version > version
    assert (module.weight[indices].norm(dim=-1) < 0.5 + 1e-6).all()
    assert torch.equal(module.weight[3], before[3])  # not looked up


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_outputs_are_the_product_of_the_matrices(name):
    module, indices = build(name)
    call = prepared(module, Embedding, indices)
    operation = call.operation
    outputs = operation.output_rows(operation.apply(call.inputs, module.weight, None))
    rows = operation.input_rows(call.inputs)
    assert torch.equal(rows[0].double(), naive_one_hot(module, indices))
    constant = torch.zeros_like(outputs)
    if module.padding_idx is not None:  # the row of padding_idx is no parameter
        constant[0, call.inputs == module.padding_idx] = module.weight.detach()[module.padding_idx]
    close(outputs, rows.double() @ operation.weight_matrix(module.weight).mT + constant)
    assert torch.equal(operation.shaped_like_weight(operation.weight_matrix(module.weight)), module.weight)


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_gradient_is_autograds(name):
    module, indices = build(name)
    outputs = module(indices)
    output_grad = seeded(name, lambda: torch.randn_like(outputs))
    outputs.backward(output_grad)
    operation, inputs, *_ = Embedding.of(module).canonical(indices)
    gradient = operation.weight_gradient(inputs, output_grad.reshape(-1, WIDTH))
    assert gradient.is_sparse == module.sparse == module.weight.grad.is_sparse
    close(dense(gradient), dense(module.weight.grad))


@pytest.mark.parametrize("name", ["plain", "padding", "by-frequency", "by-frequency-padding"])
def test_gradient_can_be_differentiated(name):
    module, indices = build(name)
    operation, inputs, *_ = Embedding.of(module).canonical(indices)
    output_grad = torch.randn(inputs.numel(), WIDTH, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda dz: operation.weight_gradient(inputs, dz), output_grad)


def test_sparse_gradient_can_be_differentiated():
    module, indices = build("sparse-padding")
    operation, inputs, *_ = Embedding.of(module).canonical(indices)
    output_grad = torch.randn(inputs.numel(), WIDTH, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda dz: operation.weight_gradient(inputs, dz).to_dense(), output_grad)


@pytest.mark.parametrize("ones", [False, True])
@pytest.mark.parametrize("name", EMBEDDINGS)
def test_second_moment_is_diagonal_and_made_of_counts(name, ones):
    module, indices = build(name)
    operation, inputs, *_ = Embedding.of(module).canonical(indices)
    rows = naive_one_hot(module, indices)
    counts = operation.counts(inputs)
    assert counts.dtype == torch.float32
    assert torch.equal(counts.double(), rows.sum(0))
    expected = torch.cat([rows, torch.ones(len(rows), 1)], dim=1) if ones else rows
    assert torch.equal(operation.second_moment(inputs, ones=ones)[0].double(), expected.T @ expected)
    assert operation.is_diagonal
    assert operation.is_transposed
    assert not operation.corrected_by_default


@pytest.mark.parametrize("ones", [False, True])
@pytest.mark.parametrize("name", [name for name in EMBEDDINGS if name != "none"])
def test_interference_counts_equal_indices_at_equal_positions(name, ones):
    module, indices = build(name)
    operation, inputs, samples, _ = Embedding.of(module).canonical(indices)
    rows = naive_one_hot(module, indices)
    rows = torch.cat([rows, torch.ones(len(rows), 1)], dim=1) if ones else rows
    per_sample = rows.reshape(samples, -1)
    assert torch.equal(operation.interference(inputs, samples, ones=ones).double(), per_sample @ per_sample.T)


@pytest.mark.parametrize("damping", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize("name", EMBEDDINGS)
def test_corrected_gradient_is_the_ridge_regressions(name, damping):
    module, indices = build(name)
    operation, inputs, *_ = Embedding.of(module).canonical(indices)
    output_grad = seeded(name, lambda: torch.randn(inputs.numel(), WIDTH, dtype=torch.float64))
    gradient = operation.weight_gradient(inputs, output_grad)
    before = gradient.clone()
    for level in (damping, torch.tensor(damping, dtype=torch.float64)):
        update = operation.corrected(gradient, operation.counts(inputs), level)
        assert update.is_sparse == gradient.is_sparse
        assert update.dtype == torch.float64
        assert not update.is_sparse or update.is_coalesced() == gradient.is_coalesced()
        torch.testing.assert_close(dense(update), ridge(naive_one_hot(module, indices), output_grad, damping))
    assert torch.equal(dense(gradient), dense(before))  # nothing is written to it


def test_dividing_by_frequency_changes_nothing_in_the_corrected_gradient():
    (divided, indices), (plain, _) = build("by-frequency"), build("plain")
    output_grad = torch.randn(indices.numel(), WIDTH, dtype=torch.float64)
    gradients, updates = [], []
    for module in (divided, plain):
        operation, inputs, *_ = Embedding.of(module).canonical(indices)
        gradients.append(operation.weight_gradient(inputs, output_grad))
        updates.append(operation.corrected(gradients[-1], operation.counts(inputs), 0.1))
    assert not torch.allclose(*gradients)
    close(*updates)
    undivided = Embedding.of(divided).undivided
    assert undivided == Embedding.of(plain)
    close(undivided.weight_gradient(inputs, output_grad), gradients[1])


@pytest.mark.parametrize("name", ["plain", "sparse", "by-frequency", "padding"])
def test_rows_that_were_not_looked_up_stay_zero_without_damping(name):
    module, indices = build(name)
    operation, inputs, *_ = Embedding.of(module).canonical(indices)
    gradient = operation.weight_gradient(inputs, torch.randn(inputs.numel(), WIDTH, dtype=torch.float64))
    update = dense(operation.corrected(gradient, operation.counts(inputs), 0.0))
    assert update.isfinite().all()
    assert (update[operation.counts(inputs) == 0] == 0).all()
    assert (update[operation.counts(inputs) > 0] != 0).all()


@pytest.mark.parametrize("name", ["plain", "sparse"])
def test_half_precision_gradients_stay_half_precision(name):
    module, indices = build(name, torch.bfloat16)
    operation, inputs, *_ = Embedding.of(module).canonical(indices)
    gradient = operation.weight_gradient(inputs, torch.randn(inputs.numel(), WIDTH).bfloat16())
    update = operation.corrected(gradient, operation.counts(inputs), 0.1)
    assert update.dtype == torch.bfloat16
    factors = (operation.counts(inputs) + 0.1).reciprocal()  # in float32: only the result is rounded
    if not gradient.is_sparse:
        assert torch.equal(update, (gradient.float() * factors[:, None]).bfloat16())
    else:
        assert torch.equal(update._values(), (gradient._values().float() * factors[inputs, None]).bfloat16())


def test_counts_are_exact_where_float32_would_stop_counting():
    operation = Embedding.of(nn.Embedding(2, 1))
    inputs = torch.ones(2**24 + 4, dtype=torch.int64)
    assert operation.counts(inputs).tolist() == [0, 2**24 + 4]


def test_int32_indices_are_taken():
    module, indices = build("plain")
    call = Embedding.of(module).canonical(indices.int())
    assert call.inputs.dtype == torch.int64
    assert torch.equal(call.operation.apply(call.inputs, module.weight, None).reshape(2, 3, WIDTH), module(indices))


def test_what_is_no_tensor_of_indices_is_not_canonical():
    operation = Embedding.of(nn.Embedding(ROWS, WIDTH))
    assert operation.canonical(torch.randn(3)) is None
    nested = torch.nested.nested_tensor([torch.tensor([1, 2]), torch.tensor([3])], layout=torch.jagged)
    assert operation.canonical(nested) is None


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_calls_of_the_function_are_recognised(name):
    module, indices = build(name)
    operation = Embedding.of(nn.Embedding(ROWS, WIDTH, padding_idx=3, max_norm=9.0))  # all else is the call's
    settings = (module.padding_idx, module.max_norm, module.norm_type, module.scale_grad_by_freq, module.sparse)
    names = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    expected = Embedding.of(module)
    for call in (
        operation.product_called(F.embedding, (indices, module.weight, *settings), {}),
        operation.product_called(F.embedding, (indices, module.weight), dict(zip(names, settings, strict=True))),
    ):
        assert call.operation == expected
        assert torch.equal(call.inputs, indices.flatten())
    assert operation.product_called(F.embedding_bag, (indices, module.weight), {}) is None
