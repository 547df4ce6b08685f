"""Embeddings and bags of them as matrix products, against torch's own layers, loops, and numpy in float64."""

import subprocess
import sys
from zlib import crc32

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from consequent.layers.embedding import Embedding, EmbeddingBag

ROWS, WIDTH = 7, 3

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

# name -> (arguments of the layer, indices, offsets, whether the indices have weights)
BAGS = {
    "sum": ({"mode": "sum"}, [1, 2, 2, 4, 5, 2], [0, 3], False),
    "sum-matrix": ({"mode": "sum"}, [[1, 2, 2], [4, 5, 2], [0, 0, 0]], None, False),
    "sum-weights": ({"mode": "sum"}, [1, 2, 2, 4, 5, 2], [0, 3], True),
    "sum-matrix-weights": ({"mode": "sum"}, [[1, 2, 2], [4, 5, 2]], None, True),
    "sum-empty-bags": ({"mode": "sum"}, [1, 2, 2, 4], [0, 0, 3, 3, 4], False),
    "sum-no-indices": ({"mode": "sum"}, [], [0, 0], False),
    "sum-last-offset": ({"mode": "sum", "include_last_offset": True}, [1, 2, 2, 4, 5], [0, 2, 2, 5], False),
    "sum-padding": ({"mode": "sum", "padding_idx": 2}, [1, 2, 2, 4, 2, 2], [0, 4], False),
    "sum-padding-weights": ({"mode": "sum", "padding_idx": 2}, [1, 2, 2, 4, 2, 2], [0, 4], True),
    "sum-sparse": ({"mode": "sum", "sparse": True}, [1, 2, 2, 4, 5, 2], [0, 3], False),
    "sum-sparse-padding": ({"mode": "sum", "sparse": True, "padding_idx": 2}, [1, 2, 2, 4, 5, 2], [0, 3], False),
    "sum-sparse-weights": ({"mode": "sum", "sparse": True}, [1, 2, 2, 4, 5, 2], [0, 3], True),
    "mean": ({"mode": "mean"}, [1, 2, 2, 4, 5, 2], [0, 4], False),
    "mean-matrix": ({"mode": "mean"}, [[1, 2, 2], [4, 5, 2], [0, 0, 0]], None, False),
    "mean-empty-bags": ({"mode": "mean"}, [1, 2, 2, 4], [0, 0, 3, 4], False),
    "mean-last-offset": ({"mode": "mean", "include_last_offset": True}, [1, 2, 2, 4, 5], [0, 2, 2, 5], False),
    "mean-padding": ({"mode": "mean", "padding_idx": 2}, [1, 2, 2, 4, 2, 2], [0, 4], False),
    "mean-padding-from-the-end": ({"mode": "mean", "padding_idx": -3}, [1, 2, 4, 4, 2, 2], [0, 4], False),
    "mean-sparse-padding": ({"mode": "mean", "sparse": True, "padding_idx": 2}, [1, 2, 2, 4, 2], [0, 4], False),
    "mean-max-norm": ({"mode": "mean", "max_norm": 0.5}, [1, 2, 2, 4], [0, 1], False),
    "mean-max-norm-padding": ({"mode": "mean", "max_norm": 0.5, "padding_idx": 2}, [1, 2, 2, 4], [0, 1], False),
    "mean-many-bags": ({"mode": "mean"}, [i * i % ROWS for i in range(40)], list(range(0, 40, 2)), False),
}


def seeded(name, make):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(crc32(name.encode()))
        return make()


def build(name, dtype=torch.float64):
    """(module, indices)."""
    settings, indices = EMBEDDINGS[name]
    module = seeded(name, lambda: nn.Embedding(ROWS, WIDTH, dtype=dtype, **settings))
    return with_numbers_everywhere(module), torch.tensor(indices, dtype=torch.int64)


def build_bag(name, dtype=torch.float64):
    """(module, arguments of its forward)."""
    settings, indices, offsets, is_weighted = BAGS[name]
    module = seeded(name, lambda: nn.EmbeddingBag(ROWS, WIDTH, dtype=dtype, **settings))
    inputs = torch.tensor(indices, dtype=torch.int64)
    weights = seeded(name, lambda: torch.randn(inputs.shape, dtype=torch.float64).to(dtype)) if is_weighted else None
    offsets = None if offsets is None else torch.tensor(offsets, dtype=torch.int64)
    return with_numbers_everywhere(module), (inputs, offsets, weights)


def with_numbers_everywhere(module):
    """Also in the row of padding_idx, which torch sets to zero at first."""
    with torch.no_grad():
        module.weight[module.weight.abs().sum(1) == 0] = 0.25
    return module


def prepared(module, kind, *args):
    """The call, its inputs met by the weight as ``forward`` would have it."""
    call = kind.of(module).canonical(*args)
    assert call is not None
    call.operation.prepare(module.weight, call.inputs)
    return call


def naive_one_hot(module, indices):
    rows = np.zeros((indices.numel(), ROWS))
    for row, index in enumerate(indices.flatten().tolist()):
        rows[row, index] = index != module.padding_idx
    return torch.from_numpy(rows)


def naive_bags(module, inputs, offsets, weights):
    """X, one index after the other."""
    if inputs.ndim == 2:
        bags = [list(range(i * inputs.shape[1], (i + 1) * inputs.shape[1])) for i in range(inputs.shape[0])]
    else:
        starts = offsets.tolist()
        ends = [*starts[1:], inputs.numel()]
        bags = [list(range(a, b)) for a, b in zip(starts, ends, strict=True)]
        bags = bags[:-1] if module.include_last_offset else bags
    indices = inputs.flatten().tolist()
    rows = np.zeros((len(bags), ROWS))
    for bag, places in enumerate(bags):
        kept = [place for place in places if indices[place] != module.padding_idx]
        for place in kept:
            weight = 1.0 if weights is None else float(weights.flatten()[place])
            rows[bag, indices[place]] += weight / len(kept) if module.mode == "mean" else weight
    return torch.from_numpy(rows)


def dense(tensor):
    return tensor.to_dense() if tensor.is_sparse else tensor


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def ridge(rows, output_grad, damping):
    """``ΔZ Xᵀ (XXᵀ + λI)⁻¹`` with numpy, as ``[features, out_features]``."""
    rows, output_grad = rows.numpy(), output_grad.numpy()
    return torch.from_numpy(np.linalg.solve(rows.T @ rows + damping * np.eye(ROWS), rows.T @ output_grad))


# ---- nn.Embedding ----------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("kind", [Embedding, EmbeddingBag])
def test_indices_have_no_gradient(kind):
    module = nn.Embedding(2, 2) if kind is Embedding else nn.EmbeddingBag(2, 2)
    with pytest.raises(TypeError, match="indices"):
        kind.of(module).input_gradient(torch.ones(1, 2), torch.ones(2, 2), torch.zeros(1, dtype=torch.int64))


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


def test_calls_of_the_functions_may_count_padding_from_the_end():
    weight, offsets = torch.randn(ROWS, WIDTH), torch.tensor([0])
    for kind, layer, function in (
        (Embedding, nn.Embedding, F.embedding),
        (EmbeddingBag, nn.EmbeddingBag, F.embedding_bag),
    ):
        operation = kind.of(layer(ROWS, WIDTH))
        given = {"padding_idx": -2} | ({"offsets": offsets} if kind is EmbeddingBag else {})
        call = operation.product_called(function, (torch.tensor([1, 5]), weight), given)
        assert call.operation.padding_idx == 5
        assert call.operation.input_rows(call.inputs).sum() == 1


@pytest.mark.parametrize("kind", [Embedding, EmbeddingBag])
@pytest.mark.parametrize(
    ("setting", "value"), [("padding_idx", 1), ("max_norm", 2.0), ("norm_type", 1.0), ("sparse", True)]
)
def test_changed_settings_are_seen(kind, setting, value):
    module = nn.Embedding(ROWS, WIDTH) if kind is Embedding else nn.EmbeddingBag(ROWS, WIDTH)
    operation = kind.of(module)
    assert operation.is_current(module)
    setattr(module, setting, value)
    assert not operation.is_current(module)


# ---- nn.EmbeddingBag -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", BAGS)
def test_bags_apply_is_the_layers_forward(name, dtype):
    module, args = build_bag(name, dtype)
    expected_module, _ = build_bag(name, dtype)
    expected = expected_module(*args)
    call = prepared(module, EmbeddingBag, *args)
    assert call.inputs.layout == torch.sparse_coo
    assert call.inputs.dtype == dtype
    assert call.output_shape is None
    assert call.samples == expected.shape[0]
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 2e-2}[dtype]
    outputs = call.operation.apply(call.inputs, module.weight, None)
    torch.testing.assert_close(outputs, expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(module.weight, expected_module.weight)


@pytest.mark.parametrize("name", BAGS)
def test_bags_are_the_product_of_the_matrices(name):
    module, args = build_bag(name)
    call = prepared(module, EmbeddingBag, *args)
    operation = call.operation
    rows = operation.input_rows(call.inputs)
    close(rows[0], naive_bags(module, *args))
    outputs = operation.output_rows(operation.apply(call.inputs, module.weight, None))
    close(outputs, rows @ operation.weight_matrix(module.weight).mT)
    assert torch.equal(operation.shaped_like_weight(operation.weight_matrix(module.weight)), module.weight)


@pytest.mark.parametrize("name", BAGS)
def test_bags_gradient_is_autograds(name):
    module, args = build_bag(name)
    outputs = module(*args)
    output_grad = seeded(name, lambda: torch.randn_like(outputs))
    outputs.backward(output_grad)
    operation, inputs, *_ = EmbeddingBag.of(module).canonical(*args)
    gradient = operation.weight_gradient(inputs, output_grad)
    assert gradient.is_sparse == module.sparse == module.weight.grad.is_sparse
    close(dense(gradient), dense(module.weight.grad))


@pytest.mark.parametrize("name", ["mean-padding", "sum-padding-weights", "sum-sparse-weights"])
def test_bags_gradient_can_be_differentiated(name):
    module, args = build_bag(name)
    operation, inputs, *_ = EmbeddingBag.of(module).canonical(*args)
    output_grad = torch.randn(inputs.shape[0], WIDTH, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda dz: dense(operation.weight_gradient(inputs, dz)), output_grad)


@pytest.mark.parametrize("ones", [False, True])
@pytest.mark.parametrize("name", BAGS)
def test_bags_moments_are_those_of_the_rows(name, ones):
    module, args = build_bag(name)
    operation, inputs, samples, _ = EmbeddingBag.of(module).canonical(*args)
    rows = naive_bags(module, *args)
    close(operation.gram(inputs), (rows @ rows.T)[None])
    rows = torch.cat([rows, torch.ones(len(rows), 1)], dim=1) if ones else rows
    close(operation.second_moment(inputs, ones=ones), (rows.T @ rows)[None])
    close(operation.interference(inputs, samples, ones=ones), rows @ rows.T)


@pytest.mark.parametrize("name", ["mean", "sum-padding-weights"])
def test_bags_moments_of_half_precision_are_in_float32(name):
    module, args = build_bag(name, torch.bfloat16)
    operation, inputs, *_ = EmbeddingBag.of(module).canonical(*args)
    rows = operation.input_rows(inputs).float()
    for actual, expected in (
        (operation.gram(inputs), rows @ rows.mT),
        (operation.second_moment(inputs, ones=False), rows.mT @ rows),
    ):
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("damping", [1e-2, 1.0])
@pytest.mark.parametrize("name", ["mean", "mean-many-bags", "sum-weights", "mean-padding"])
def test_bags_samples_and_features_give_the_same_ridge_regression(name, damping):
    module, args = build_bag(name)
    operation, inputs, *_ = EmbeddingBag.of(module).canonical(*args)
    output_grad = seeded(name, lambda: torch.randn(inputs.shape[0], WIDTH, dtype=torch.float64))
    expected = ridge(naive_bags(module, *args), output_grad, damping)
    gram = operation.gram(inputs)[0] + damping * torch.eye(inputs.shape[0])
    by_samples = operation.weight_gradient(inputs, torch.linalg.solve(gram, output_grad))
    moment = operation.second_moment(inputs, ones=False)[0] + damping * torch.eye(ROWS)
    by_features = torch.linalg.solve(moment, operation.weight_gradient(inputs, output_grad))
    torch.testing.assert_close(by_samples, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(by_features, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", BAGS)
def test_bags_calls_of_the_function_are_recognised(name):
    module, (inputs, offsets, weights) = build_bag(name)
    operation = EmbeddingBag.of(nn.EmbeddingBag(ROWS, WIDTH, max_norm=9.0, padding_idx=3, dtype=torch.float64))
    settings = {
        "offsets": offsets,
        "max_norm": module.max_norm,
        "norm_type": module.norm_type,
        "scale_grad_by_freq": False,
        "mode": module.mode,
        "sparse": module.sparse,
        "per_sample_weights": weights,
        "include_last_offset": module.include_last_offset,
        "padding_idx": module.padding_idx,
    }
    expected = EmbeddingBag.of(module).canonical(inputs, offsets, weights)
    for call in (
        operation.product_called(F.embedding_bag, (inputs, module.weight), settings),
        operation.product_called(F.embedding_bag, (inputs, module.weight, *settings.values()), {}),
    ):
        assert call.operation == expected.operation
        assert torch.equal(call.inputs.to_dense(), expected.inputs.to_dense())
    for other in ({"mode": "max"}, {"scale_grad_by_freq": True}):
        assert operation.product_called(F.embedding_bag, (inputs, module.weight), settings | other) is None
    assert operation.product_called(F.embedding, (inputs, module.weight), {}) is None


@pytest.mark.parametrize("name", BAGS)
def test_bags_are_found_in_the_arguments_of_forward(name):
    module, args = build_bag(name)
    operation = EmbeddingBag.of(module)
    expected = operation.canonical(*args)
    names = ("input", "offsets", "per_sample_weights")
    for positional in range(4):
        named = dict(zip(names[positional:], args[positional:], strict=True))
        call = operation.canonical(operation.inputs_in(args[:positional], named))
        assert call.samples == expected.samples
        assert torch.equal(call.inputs.to_dense(), expected.inputs.to_dense())
    assert operation.inputs_in((), {}) is None


def test_bags_that_are_no_product_say_why():
    assert "max" in EmbeddingBag.why_not(nn.EmbeddingBag(ROWS, WIDTH, mode="max"))
    assert "scale_grad_by_freq" in EmbeddingBag.why_not(nn.EmbeddingBag(ROWS, WIDTH, scale_grad_by_freq=True))
    assert EmbeddingBag.why_not(nn.EmbeddingBag(ROWS, WIDTH, max_norm=1.0)) is None
    assert Embedding.why_not(nn.Embedding(ROWS, WIDTH, scale_grad_by_freq=True)) is None


def test_bags_whose_weights_are_trained_are_not_canonical():
    module, (inputs, offsets, weights) = build_bag("sum-weights")
    operation = EmbeddingBag.of(module)
    assert operation.canonical(inputs, offsets, weights) is not None
    assert operation.canonical(inputs, offsets, weights.requires_grad_()) is None


@pytest.mark.parametrize(
    ("settings", "args"),
    [
        ({"mode": "mean"}, ([1, 2], [0], torch.ones(2))),  # weights go with sums only
        ({"mode": "sum"}, ([1, 2], [0], torch.ones(2).double())),
        ({"mode": "sum"}, ([1, 2], [0], torch.ones(3))),
        ({}, ([1, 2], None, None)),
        ({}, ([[1, 2]], [0], None)),
        ({}, ([[[1, 2]]], None, None)),
        ({}, ([1, 2], [1], None)),
        ({}, ([1, 2], [0, 3], None)),
        ({}, ([[], []], None, None)),
    ],
)
def test_bags_that_torch_refuses_are_not_canonical(settings, args):
    module = nn.EmbeddingBag(ROWS, WIDTH, **settings)
    inputs, offsets, weights = args
    inputs = torch.tensor(inputs, dtype=torch.int64)
    offsets = None if offsets is None else torch.tensor(offsets)
    with pytest.raises((ValueError, RuntimeError, NotImplementedError)):
        module(inputs, offsets, weights)
    assert EmbeddingBag.of(module).canonical(inputs, offsets, weights) is None


@pytest.mark.parametrize("offsets", [[0, 2, 4], [0, 3, 2, 5]])
def test_bags_that_torch_answers_strangely_are_not_canonical(offsets):
    """Where the last offset is not the end, or offsets go back, torch's answer depends on the device."""
    module = nn.EmbeddingBag(ROWS, WIDTH, include_last_offset=True)
    assert EmbeddingBag.of(module).canonical(torch.tensor([1, 2, 3, 4, 5]), torch.tensor(offsets)) is None


def test_bags_of_indices_out_of_range_raise():
    module, _ = build_bag("sum")
    call = EmbeddingBag.of(module).canonical(torch.tensor([1, ROWS]), torch.tensor([0]))
    with pytest.raises((IndexError, RuntimeError), match="idx"):
        call.operation.apply(call.inputs, module.weight, None)


def test_bags_ignore_a_padding_row_that_is_not_finite():
    module, args = build_bag("mean-padding")
    with torch.no_grad():
        module.weight[2] = torch.inf
    call = EmbeddingBag.of(module).canonical(*args)
    close(call.operation.apply(call.inputs, module.weight, None), module(*args))
    assert module(*args).isfinite().all()


def test_bags_are_not_rounded_under_autocast():
    module, args = build_bag("mean", torch.float32)
    call = EmbeddingBag.of(module).canonical(*args)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = call.operation.apply(call.inputs, module.weight, None)
        gradient = call.operation.weight_gradient(call.inputs, torch.ones_like(outputs))
        gram = call.operation.gram(call.inputs)
    torch.testing.assert_close(outputs, module(*args))
    assert gradient.dtype == gram.dtype == torch.float32
    torch.testing.assert_close(gradient, call.inputs.to_dense().T @ torch.ones_like(outputs))


def test_sparse_tensors_do_not_warn():
    """Torch warns of sparse tensors once per process: so in one of its own."""
    script = """
import torch
from consequent.layers.embedding import Embedding, EmbeddingBag
table = torch.nn.Embedding(5, 2, sparse=True)
lookup, indices, *_ = Embedding.of(table).canonical(torch.tensor([1, 2, 2]))
lookup.corrected(lookup.weight_gradient(indices, torch.ones(3, 2)), lookup.counts(indices), 0.1)
module = torch.nn.EmbeddingBag(5, 2)
operation, inputs, *_ = EmbeddingBag.of(module).canonical(torch.tensor([[1, 2], [2, 4]]))
operation.gram(inputs)
operation.second_moment(inputs, ones=True)
operation.weight_gradient(inputs, operation.apply(inputs, module.weight, None).detach())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "Sparse" not in done.stderr


def test_bags_can_be_saved_for_the_backward_pass():
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, inputs, weight):
            ctx.save_for_backward(inputs)
            return operation.apply(inputs, weight, None)

        @staticmethod
        def backward(ctx, output_grad):
            return None, operation.weight_gradient(ctx.saved_tensors[0], output_grad)

    module, args = build_bag("mean")
    operation, inputs, *_ = EmbeddingBag.of(module).canonical(*args)
    assert torch.autograd.gradcheck(lambda weight: Product.apply(inputs, weight), module.weight)
    assert torch.autograd.gradgradcheck(lambda weight: Product.apply(inputs, weight), module.weight)


def test_bags_see_another_dtype_as_another_layer():
    module, _ = build_bag("mean")
    operation = EmbeddingBag.of(module)
    assert operation.is_current(module)
    assert not operation.is_current(module.float())
