"""The filters against padasip, against plain numpy loops, and against what the paper says of them."""

import math

import numpy as np
import padasip
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consequent.filters import apa, lms, nlms

SAMPLES, FEATURES, OUTPUTS = 60, 4, 3

# name -> (our filter, the same filter in padasip), both with initial weights
PADASIP = {
    "lms": (
        lambda x, d, w: lms(x, d, 0.05, weights=w),
        lambda w: padasip.filters.FilterLMS(n=FEATURES, mu=0.05, w=w),
    ),
    "nlms": (
        lambda x, d, w: nlms(x, d, 0.7, damping=0.01, weights=w),
        lambda w: padasip.filters.FilterNLMS(n=FEATURES, mu=0.7, eps=0.01, w=w),
    ),
    "apa-1": (
        lambda x, d, w: apa(x, d, 0.4, order=1, damping=0.01, weights=w),
        lambda w: padasip.filters.FilterAP(n=FEATURES, mu=0.4, order=1, ifc=0.01, w=w),
    ),
    "apa-3": (
        lambda x, d, w: apa(x, d, 0.4, order=3, damping=0.01, weights=w),
        lambda w: padasip.filters.FilterAP(n=FEATURES, mu=0.4, order=3, ifc=0.01, w=w),
    ),
    "apa-7-more-than-features": (
        lambda x, d, w: apa(x, d, 0.4, order=7, damping=0.01, weights=w),
        lambda w: padasip.filters.FilterAP(n=FEATURES, mu=0.4, order=7, ifc=0.01, w=w),
    ),
}

# name -> (our filter with several outputs, ΔW from the errors [P, O] and inputs [P, D] of the window, its length P)
NUMPY = {
    "lms": (lambda x, d: lms(x, d, 0.05), lambda e, x: 0.05 * e.T @ x, 1),
    "nlms": (lambda x, d: nlms(x, d, 0.7, damping=0.1), lambda e, x: 0.7 * e.T @ x / ((x * x).sum() + 0.1), 1),
    "apa": (
        lambda x, d: apa(x, d, 0.4, order=3, damping=0.1),
        lambda e, x: 0.4 * e.T @ np.linalg.inv(x @ x.T + 0.1 * np.eye(len(x))) @ x,
        3,
    ),
    "apa-undamped": (
        lambda x, d: apa(x, d, 0.4, order=3),
        lambda e, x: 0.4 * e.T @ np.linalg.pinv(x).T,
        3,
    ),
}

FILTERS = {
    "lms": lambda x, d, **options: lms(x, d, **{"step_size": 0.1, **options}),
    "nlms": lambda x, d, **options: nlms(x, d, **{"step_size": 0.1, **options}),
    "apa": lambda x, d, **options: apa(x, d, **{"step_size": 0.1, "order": 2, **options}),
}
each_filter = pytest.mark.parametrize("run", FILTERS.values(), ids=FILTERS)


def stream(seed: int = 0, outputs: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(SAMPLES, FEATURES)) + 1.0
    shape = (SAMPLES,) if outputs is None else (SAMPLES, outputs)
    mixing = rng.normal(size=(FEATURES,) if outputs is None else (FEATURES, outputs))
    return inputs, inputs @ mixing + 0.1 * rng.normal(size=shape)


def assert_close(actual: torch.Tensor, expected: np.ndarray | torch.Tensor) -> None:
    torch.testing.assert_close(actual, torch.as_tensor(expected), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("ours", "theirs"), PADASIP.values(), ids=PADASIP)
def test_equals_padasip_sample_by_sample(ours, theirs):
    inputs, targets = stream()
    start = np.array([0.5, -1.0, 2.0, 0.1])
    reference = theirs(start)
    predictions, errors, history = reference.run(targets, inputs)
    result = ours(torch.from_numpy(inputs), torch.from_numpy(targets), torch.from_numpy(start))
    assert_close(result.predictions, predictions)
    assert_close(result.errors, errors)
    # padasip keeps what predicted each sample; ours ends with the trained weights as well.
    assert_close(result.weights[:-1], history)
    assert_close(result.weights[-1], reference.w)


@pytest.mark.parametrize(("ours", "change", "window"), NUMPY.values(), ids=NUMPY)
def test_several_outputs_equal_a_numpy_loop(ours, change, window):
    inputs, targets = stream(seed=1, outputs=OUTPUTS)
    weights = np.zeros((OUTPUTS, FEATURES))
    result = ours(torch.from_numpy(inputs), torch.from_numpy(targets))
    assert_close(result.weights[0], weights)
    for t in range(SAMPLES):
        assert_close(result.predictions[t], weights @ inputs[t])
        assert_close(result.errors[t], targets[t] - weights @ inputs[t])
        recent = slice(max(0, t - window + 1), t + 1)
        weights = weights + change(targets[recent] - inputs[recent] @ weights.T, inputs[recent])
        assert_close(result.weights[t + 1], weights)


@each_filter
def test_empty_stream_leaves_the_initial_weights(run):
    start = torch.tensor([1.0, 2.0])
    result = run(torch.empty(0, 2), torch.empty(0), weights=start)
    assert result.predictions.shape == result.errors.shape == (0,)
    assert torch.equal(result.weights, start.unsqueeze(0))


@each_filter
def test_builds_no_graph_and_leaves_its_arguments_alone(run):
    inputs, targets = map(torch.from_numpy, stream())
    inputs.requires_grad_()
    start = torch.ones(FEATURES, dtype=torch.float64, requires_grad=True)
    before = inputs.detach().clone(), targets.clone()
    result = run(inputs, targets, weights=start)
    assert not any(tensor.requires_grad for tensor in (result.predictions, result.errors, result.weights))
    assert torch.equal(inputs, before[0])
    assert torch.equal(targets, before[1])
    assert torch.equal(start, torch.ones(FEATURES, dtype=torch.float64))


def test_apa_meets_its_last_samples_and_nlms_only_the_last():
    inputs, targets = map(torch.from_numpy, stream(seed=4))
    window = slice(SAMPLES - 3, SAMPLES)
    projected = apa(inputs, targets, 1.0, order=3).weights[-1]
    assert_close(inputs[window] @ projected, targets[window])
    normalised = nlms(inputs, targets, 1.0).weights[-1]
    assert (inputs[window] @ normalised - targets[window]).abs()[:2].max() > 1e-3


# --- defined outcomes for degenerate samples ---


def test_undamped_sample_of_zeros_makes_no_update():
    inputs = torch.tensor([[1.0, 2.0], [0.0, 0.0], [3.0, -1.0]], dtype=torch.float64)
    targets = torch.tensor([1.0, 5.0, 2.0], dtype=torch.float64)
    result = nlms(inputs, targets, 1.0)
    assert result.weights.isfinite().all()
    assert torch.equal(result.weights[2], result.weights[1])
    assert_close(result.weights[3] @ inputs[2], targets[2])

    # APA still sees the sample before, which is met already.
    result = apa(inputs, targets, 1.0, order=2)
    assert result.weights.isfinite().all()
    assert_close(result.weights[2], result.weights[1])
    assert torch.equal(apa(inputs[1:2], targets[1:2], 1.0, order=2).weights, torch.zeros(2, 2, dtype=torch.float64))


@pytest.mark.parametrize("damping", [0.0, 1e-40, 1e-3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_apa_with_repeated_samples_stays_finite(damping, dtype):
    inputs = torch.tensor([[1.0, 2.0, 0.1]], dtype=dtype).repeat(6, 1)
    result = apa(inputs, torch.full((6,), 3.0, dtype=dtype), 1.0, order=4, damping=damping)
    minimum_norm = 3.0 * inputs[0] / inputs[0].square().sum()
    torch.testing.assert_close(result.weights[-1], minimum_norm, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_tiny_and_huge_samples_are_met_exactly_in_float32(scale):
    # Their squares are 0 and inf in float32; the pseudo-inverse is well defined.
    inputs = scale * torch.tensor([[3.0, 4.0]])
    for result in (nlms(inputs, torch.tensor([5.0]), 1.0), apa(inputs, torch.tensor([5.0]), 1.0, order=2)):
        torch.testing.assert_close(result.weights[-1] * scale, torch.tensor([0.6, 0.8]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_damped_apa_still_sees_a_sample_far_smaller_than_its_neighbour(dtype):
    inputs = torch.tensor([[1e4, 0.0], [0.0, 1e-4]], dtype=dtype)
    result = apa(inputs, torch.tensor([1e4, 1.0], dtype=dtype), 1.0, order=2, damping=1e-3)
    torch.testing.assert_close(result.weights[-1], torch.tensor([1.0, 1e-4 / (1e-8 + 1e-3)], dtype=dtype))


# --- properties ---

# Zeros, and sizes whose squares stay in range of the tolerances below.
numbers = st.floats(-1e3, 1e3).map(lambda value: value if abs(value) > 1e-3 else 0.0)


@st.composite
def streams(draw):
    samples, features = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    rows = st.lists(numbers, min_size=features, max_size=features)
    inputs = draw(st.lists(rows, min_size=samples, max_size=samples))
    targets = draw(st.lists(numbers, min_size=samples, max_size=samples))
    return torch.tensor(inputs, dtype=torch.float64), torch.tensor(targets, dtype=torch.float64)


@given(streams())
@settings(max_examples=100, deadline=None)
def test_nlms_with_unit_step_makes_the_a_posteriori_error_zero(data):
    inputs, targets = data
    result = nlms(inputs, targets, 1.0)
    assert result.weights.isfinite().all()
    for t, sample in enumerate(inputs):
        if sample.norm() == 0:
            assert torch.equal(result.weights[t + 1], result.weights[t])
        else:
            scale = targets[t].abs() + (result.weights[t].norm() + result.weights[t + 1].norm()) * sample.norm()
            assert (result.weights[t + 1] @ sample - targets[t]).abs() <= 1e-13 * scale


@given(seed=st.integers(0, 2**31), step_size=st.floats(0.1, 1.9), order=st.integers(1, 5), outlier=st.floats(10, 1e3))
@settings(max_examples=25, deadline=None)
def test_nlms_and_apa_never_move_away_from_the_true_weights(seed, step_size, order, outlier):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(30, FEATURES, dtype=torch.float64, generator=generator)
    inputs[15] *= outlier
    true_weights = torch.randn(FEATURES, dtype=torch.float64, generator=generator)
    for result in (
        nlms(inputs, inputs @ true_weights, step_size),
        apa(inputs, inputs @ true_weights, step_size, order=order),
    ):
        deviation = (result.weights - true_weights).norm(dim=1)
        assert (deviation.diff() <= 1e-9).all()
        assert deviation[-1] < deviation[0]


# --- bad input ---

GOOD_INPUTS, GOOD_TARGETS = torch.ones(5, 2), torch.ones(5)


@each_filter
@pytest.mark.parametrize(
    ("inputs", "targets", "message"),
    [
        (torch.ones(5), GOOD_TARGETS, r"inputs must be \[T, D\].*shape \[5\].*unsqueeze"),
        (torch.ones(5, 2, 2), GOOD_TARGETS, r"inputs must be \[T, D\].*shape \[5, 2, 2\]"),
        (torch.ones(5, 0), GOOD_TARGETS, r"D >= 1.*shape \[5, 0\]"),
        (GOOD_INPUTS, torch.tensor(1.0), r"targets must be \[T\].*shape \[\]"),
        (GOOD_INPUTS, torch.ones(5, 1, 1), r"targets must be \[T\].*shape \[5, 1, 1\]"),
        (GOOD_INPUTS, torch.ones(5, 0), r"targets must be \[T\].*shape \[5, 0\]"),
        (GOOD_INPUTS, torch.ones(4), r"same length, got 5 samples.*\[5, 2\].*4 targets.*\[4\]"),
        (GOOD_INPUTS, torch.ones(2, 5), r"same length, got 5 samples.*2 targets"),
        (GOOD_INPUTS.long(), GOOD_TARGETS, r"inputs must be float32 or float64, got torch.int64.*inputs\.double\(\)"),
        (GOOD_INPUTS, GOOD_TARGETS.int(), r"targets must be float32 or float64, got torch.int32.*targets\.double\(\)"),
        (GOOD_INPUTS.half(), GOOD_TARGETS.half(), r"float32 or float64, got torch.float16"),
        (GOOD_INPUTS, GOOD_TARGETS.double(), r"targets must match inputs \(torch.float32.*got torch.float64.*\.to\("),
    ],
)
def test_bad_stream(run, inputs, targets, message):
    with pytest.raises(ValueError, match=message):
        run(inputs, targets)


@each_filter
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_sample_is_named(run, value):
    inputs = GOOD_INPUTS.clone()
    inputs[3, 1] = inputs[4, 0] = value
    with pytest.raises(ValueError, match=r"inputs holds NaN or inf, first in sample 3 \(\[1.0, "):
        run(inputs, GOOD_TARGETS)
    targets = GOOD_TARGETS.clone()
    targets[2] = value
    with pytest.raises(ValueError, match=r"targets holds NaN or inf, first in sample 2 "):
        run(GOOD_INPUTS, targets)
    with pytest.raises(ValueError, match=r"targets holds NaN or inf, first in sample 2 "):
        run(GOOD_INPUTS, targets.unsqueeze(-1).repeat(1, 3))


@each_filter
@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (torch.ones(3), r"weights must have shape \[2\], got \[3\]"),
        (torch.ones(1, 2), r"weights must have shape \[2\], got \[1, 2\].*\[O, D\] with targets \[T, O\]"),
        (torch.ones(2).double(), r"weights must match inputs"),
        (torch.ones(2).long(), r"weights must be float32 or float64, got torch.int64"),
        (torch.tensor([1.0, math.nan]), r"weights hold NaN or inf: \[1.0, nan\]"),
    ],
)
def test_bad_weights(run, weights, message):
    with pytest.raises(ValueError, match=message):
        run(GOOD_INPUTS, GOOD_TARGETS, weights=weights)


@each_filter
@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf])
def test_bad_step_size(run, value):
    with pytest.raises(ValueError, match=rf"step_size must be finite and ≥ 0, got {value}.*stable for 0 < step_size"):
        run(GOOD_INPUTS, GOOD_TARGETS, step_size=value)


@pytest.mark.parametrize("run", [FILTERS["nlms"], FILTERS["apa"]], ids=["nlms", "apa"])
@pytest.mark.parametrize("value", [-1e-9, math.nan, math.inf])
def test_bad_damping(run, value):
    with pytest.raises(ValueError, match=rf"damping must be finite and ≥ 0, got {value}"):
        run(GOOD_INPUTS, GOOD_TARGETS, damping=value)


@pytest.mark.parametrize("order", [0, -3, 1.5])
def test_bad_order(order):
    with pytest.raises(ValueError, match=rf"order must be an integer >= 1, got {order}.*NLMS"):
        apa(GOOD_INPUTS, GOOD_TARGETS, 0.1, order=order)
