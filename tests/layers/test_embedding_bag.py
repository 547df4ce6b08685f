"""Bags of embeddings as matrix products, against torch's own layers, loops, and numpy in float64."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from embedding_cases import ROWS, WIDTH, close, dense, prepared, ridge, seeded, with_numbers_everywhere
from torch import nn

from consequent.layers.embedding import Embedding
from consequent.layers.embedding_bag import EmbeddingBag

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


def build_bag(name, dtype=torch.float64):
    """(module, arguments of its forward)."""
    settings, indices, offsets, is_weighted = BAGS[name]
    module = seeded(name, lambda: nn.EmbeddingBag(ROWS, WIDTH, dtype=dtype, **settings))
    inputs = torch.tensor(indices, dtype=torch.int64)
    weights = seeded(name, lambda: torch.randn(inputs.shape, dtype=torch.float64).to(dtype)) if is_weighted else None
    offsets = None if offsets is None else torch.tensor(offsets, dtype=torch.int64)
    return with_numbers_everywhere(module), (inputs, offsets, weights)


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
