"""The kernels in Triton's interpreter, against their plain-torch lines in float64. test_kernels.py runs this file."""

from contextlib import nullcontext

import pytest
import torch
from gpu.training import CASES, OPTIMIZERS, check_run, name_of
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from consequent.gpu import inverses, launch, moments, multiply, samples, shorten
from consequent.layers import Linear
from consequent.layers.convolution import Convolution
from consequent.maths.bound import relative_change, shortening
from consequent.maths.damping import Damping
from consequent.maths.inverse import Inverse, multiplied
from consequent.maths.ridge import update_from_samples
from consequent.minibatch import own_inputs

SEEDS = st.integers(0, 2**31)
SIZES = st.sampled_from([1, 5, 16, 17, 32, 40])
FEW = settings(max_examples=10, deadline=None, derandomize=True, phases=[Phase.generate])  # shrinking takes minutes
SMALL = {  # tiles, of which even small problems have several
    inverses: {"TILE": 16},
    moments: {"TILE": 16, "PART": 32},
    multiply: {"TILE": (16, 32, 16), "BLOCK": (8, 32)},
    samples: {"SMALL": (16, 32, 16)},
    shorten: {"BLOCK": 64},
}


@pytest.fixture(scope="module", autouse=True)
def kernels_run_on_a_cpu():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "is_on_gpu", lambda tensor: True)
        patch.setattr(own_inputs, "gathers", lambda weight: weight.dtype is torch.float32)
        patch.setattr(torch.cuda, "device_of", lambda tensor: nullcontext())
        yield


@pytest.fixture(scope="module")
def small_tiles():
    with pytest.MonkeyPatch.context() as patch:
        for module, sizes in SMALL.items():
            for name, size in sizes.items():
                assert hasattr(module, name)
                patch.setattr(module, name, size)
        yield
    for module in (moments, multiply, samples, shorten):
        module._layout.cache_clear()


def check(actual, expected, rtol=1e-4):
    """Relative to the length."""
    assert actual.shape == expected.shape
    assert float((actual.double() - expected).norm()) <= rtol * float(expected.norm()) + 1e-12


def second_moment(size, groups=1):
    x = torch.randn(groups, 2 * size + 1, size) + 0.5
    return x.mT @ x / x.shape[1]


def a_problem(rows, features, taps, has_bias):
    """A layer, its gradients, and what comes out of them: U, u and the energy."""
    shape = (rows, features) if taps == (1, 1) else (rows, features, *taps)
    weight, grad = torch.randn(2, *shape).unbind()
    if len(shape) == 4:
        weight, grad = (one.to(memory_format=torch.channels_last) for one in (weight, grad))
    columns = weight[0].numel()
    shift = 0.3 * torch.randn(1, columns) if has_bias else torch.zeros(1, columns)
    parts = second_moment(columns), shift, torch.rand(1) + 0.1, torch.rand(1) * columns + 1
    problem = multiply.Problem(weight, has_bias, *parts, float(torch.rand(()) + 0.1))
    assert multiply.accepts(weight)
    bias_grad = torch.randn(rows) if has_bias else None
    plain = grad.double().reshape(1, rows, -1), None if bias_grad is None else bias_grad.double()[None]
    return problem, (grad, bias_grad), multiplied(*plain, Inverse(*(part.double() for part in parts)))


TAPS = st.sampled_from([(1, 1), (1, 1), (2, 3), (3, 1)])


@pytest.mark.usefixtures("small_tiles")
@FEW
@given(st.lists(st.tuples(SIZES, SIZES, TAPS, st.booleans()), min_size=1, max_size=4), SEEDS, st.integers(0, 3))
def test_gradients_of_many_layers_times_their_inverses(layers, seed, bounded):
    torch.manual_seed(seed)
    problems, gradients, expected = zip(*(a_problem(*layer) for layer in layers), strict=True)
    rates = [0.1 * (place + 1) for place in range(len(layers))]
    changes, limit = [], 0.0
    for problem, (update, of_bias, energy) in zip(problems, expected, strict=True):
        size = update.square().sum() + (0 if of_bias is None else of_bias.square().sum())
        columns, outputs = update.shape[2] + problem.has_bias, update.shape[1]
        changes.append(relative_change(energy, size, problem.trace.double().squeeze(), columns, outputs))
        changes[-1] = changes[-1], changes[-1] * size * problem.scale**2
    multiplication = multiply.Multiplication(problems)
    if bounded == 0:
        multiplication(gradients)
    elif bounded == 1:
        check(multiplication.with_changes(gradients), torch.stack([change for change, _ in changes]))
    else:  # of all, or of the first and those that change more
        limit = rates[0] * float(changes[0][1].sqrt()) * (1e3 if bounded == 2 else 0.5)
        multiplication(gradients, rates, limit)
    for problem, grads, wanted, rate, (_, change) in zip(problems, gradients, expected, rates, changes, strict=True):
        factor = problem.scale * (shortening(limit, rate**2 * change) if bounded > 1 else 1)
        check(grads[0], (wanted[0] * factor).reshape(grads[0].shape))
        if problem.has_bias:
            check(grads[1][None], wanted[1] * factor)


def check_updates(calls, damping, measured):
    found = samples.update_all(calls, damping, measured=measured)
    for call, weight, bias, told in zip(calls, found.weights, found.biases, found.told, strict=True):
        x, dz = call.inputs.double()[None], call.output_grads.double()[None]
        wanted = update_from_samples(x, dz, Damping(damping, relative=True), ones=call.ones, measured=True)
        check(weight, call.scale * wanted.weight[0])
        if call.ones:
            check(bias, call.scale * wanted.bias[0])
        change = relative_change(*wanted.change.sum(1), x.shape[2] + call.ones, dz.shape[2])
        tells = measured and change > 0
        check(told, torch.tensor([tells, change if tells else 0.0, 0.0], dtype=torch.float64))


@pytest.mark.usefixtures("small_tiles")
@FEW
@given(st.lists(st.tuples(SIZES, SIZES, SIZES, st.booleans()), min_size=1, max_size=4), SEEDS, st.booleans())
def test_the_sample_side_of_many_layers(layers, seed, measured):
    torch.manual_seed(seed)
    calls = []
    for rows, features, outputs, ones in layers:
        x, dz = (
            torch.randn(min(rows, features + ones), features) + 0.5,
            torch.randn(min(rows, features + ones), outputs),
        )
        assert samples.accepts(x, dz, ones=ones)
        calls.append(samples.Call(x.mT.contiguous().mT, dz, ones, 0.5 + len(calls)))  # in another order in memory
    check_updates(calls, 0.1, measured)


@pytest.mark.usefixtures("small_tiles")
def test_a_layer_without_inputs_and_one_that_wants_nothing():
    x, dz = torch.randn(3, 20), torch.randn(3, 4)
    calls = [samples.Call(x, dz, True, 1.0), samples.Call(0 * x, dz, False, 1.0), samples.Call(x, 0 * dz, True, 1.0)]
    check_updates(calls, 0.1, measured=True)


@pytest.mark.usefixtures("small_tiles")
def test_equal_samples_are_a_failure_and_get_the_shortened_plain_gradient():
    torch.manual_seed(0)
    x, dz = torch.ones(4, 20), torch.randn(4, 3)
    calls = [samples.Call(torch.randn(4, 20), dz, True, 2.0), samples.Call(x, dz, False, 2.0)]
    found = samples.update_all(calls, 1e-7, measured=True)
    assert found.told[:, 2].tolist() == [0, 1]
    check(found.weights[1], 2 * dz.double().mT @ x.double() / (80 * (1 + 1e-7 / 4)))
    calls[1].inputs[2, 5] = torch.nan
    found = samples.update_all(calls, 0.1, measured=True)
    assert found.weights[0].isfinite().all()
    assert not found.weights[1].isfinite().any(1).all()
    assert found.told[1].tolist() == [0, 0, 0]


@pytest.mark.usefixtures("small_tiles")
@FEW
@given(st.lists(st.lists(st.integers(1, 300), min_size=1, max_size=3), min_size=1, max_size=4), SEEDS)
def test_shortening_many_layers(layers, seed):
    torch.manual_seed(seed)
    gradients = [[torch.randn(size) for size in of_layer] for of_layer in layers]
    told, rates = torch.rand(len(layers), 3) + 0.1, [0.1 + place for place in range(len(layers))]
    if seed % 3:  # one that was not passed, or that overflowed
        told[seed % len(layers), :2] = torch.tensor([0, 0] if seed % 3 == 1 else [1, torch.inf])
    sizes = [sum(one.double().square().sum() for one in of_layer) for of_layer in gradients]
    squared = torch.tensor(rates).double() ** 2 * torch.stack(sizes) * told[:, 1] / told[:, 0]
    limit = float(squared.sqrt().nan_to_num(nan=1.0, posinf=1.0).median())
    factors = shortening(limit, squared)
    expected = [[factor * one for one in of_layer] for of_layer, factor in zip(gradients, factors, strict=True)]
    shorten.shorten_all(gradients, rates, told, limit)
    for of_layer, wanted in zip(gradients, expected, strict=True):
        for one, its in zip(of_layer, wanted, strict=True):
            check(one, its)


PAIRS = st.tuples(st.integers(1, 3), st.integers(1, 3))
CONVOLUTIONS = st.tuples(SIZES, PAIRS, PAIRS, st.tuples(st.integers(0, 2), st.integers(0, 2)), PAIRS)
# Of bfloat16 the interpreter takes products of the bits: test_on_gpu.py has it.
INPUTS = st.tuples(st.integers(1, 3), st.sampled_from([torch.float32, torch.float16]), st.booleans())


@pytest.mark.usefixtures("small_tiles")
@FEW
@given(st.lists(st.tuples(INPUTS, st.one_of(SIZES, CONVOLUTIONS)), min_size=1, max_size=3), SEEDS)
def test_second_moments_of_many_layers(layers, seed):
    torch.manual_seed(seed)
    sources, expected = [], []
    for (images, dtype, channels_last), shape in layers:
        if isinstance(shape, int):
            operation, x = Linear.of(nn.Linear(shape, 2)), torch.randn(images, 15, shape)
        else:
            operation = Convolution.of(nn.Conv2d(shape[0], 2, *shape[1:]))
            x = torch.randn(images, shape[0], 7, 8)
            x = x.to(memory_format=torch.channels_last) if channels_last else x
        x = (x + 0.5).to(dtype)
        start = torch.randn(operation.features, operation.features), torch.randn(operation.features)
        moment, sums, rows = operation.moments(x.double())
        patches = operation.as_images(x)
        assert moments.accepts(patches[0], rows, operation.features)
        expected.append((start[0] + moment[0], start[1] + sums[0]))
        sources.append(moments.Source(*patches, *start))
    moments.add_moments(sources)
    for source, (moment, sums) in zip(sources, expected, strict=True):
        check(source.moment, moment)
        check(source.sums, sums)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("size", [1, 15, 16, 17, 40])
def test_inverses(size):
    torch.manual_seed(size)
    spread = torch.logspace(0, -1, size)
    matrix, damping = spread * second_moment(size, 3) * spread[:, None], torch.tensor([0.01, 0.1, 1.0])
    damped = matrix.double() + damping.double()[:, None, None] * torch.eye(size)
    found, failed = inverses.damped_inverses(matrix, damping)
    check(found, torch.linalg.inv(damped))
    assert failed == 0
    matrix[1] = -torch.eye(size)
    trace = matrix[1].trace().double()
    again, failed = inverses.damped_inverses(matrix, damping)
    assert failed == 1
    check(again[1], torch.eye(size).double() / (trace + damping[1].double()))
    assert torch.equal(again[::2], found[::2])
    matrix[2, size // 2, size // 2] = torch.nan
    again, failed = inverses.damped_inverses(matrix, damping)
    assert failed == 1
    assert again[2].isnan().any()
    assert torch.equal(again[0], found[0])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32])
@pytest.mark.parametrize("shape", [(1,), (8,), (19,), (7, 3)])
def test_a_table_filled_by_launches(shape, dtype):
    table = (torch.arange(torch.Size(shape).numel()).view(shape) * 1.7 - 3).to(dtype)
    table.view(-1)[-1] = 2**47 + 5 if dtype is torch.int64 else -(2**30)  # an address
    filled = launch.by_launches(table, torch.device("cpu"))
    assert filled.dtype == dtype
    assert torch.equal(filled, table)


def test_what_a_graph_reads_is_not_copied_from_the_host(monkeypatch):
    seen = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(launch, "by_launches", lambda table, device: seen.append(table) or table)
    cuda = torch.device("cuda")
    assert launch.Addresses()([5, 2**40], cuda).tolist() == [5, 2**40]
    assert launch.on_device([0.5, 2.0], torch.float32, cuda).tolist() == [0.5, 2.0]
    assert len(seen) == 2


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_training(case, optimizer, monkeypatch):
    check_run(monkeypatch, case, optimizer, "cpu", 1e-4)
