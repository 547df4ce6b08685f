"""``consequential_gradient``: against the naive reference, scikit-learn and numpy; its properties; bad input."""

from functools import cache

import numpy as np
import pytest
import reference
import torch
from cases import DAMPINGS, DTYPES, check_error, correlated, duplicated, normal, skip_if_silent
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from sklearn.linear_model import Ridge

from consequent import consequential_gradient

SHAPES = [(1, 6, 3), (6, 1, 3), (5, 5, 2), (4, 16, 3), (16, 4, 3), (10, 11, 1), (11, 10, 1), (3, 48, 8), (48, 3, 8)]
DATA = {"random": normal, "correlated": correlated, "duplicated": duplicated}
SIDES = ["samples", "features", "auto"]


@cache
def problem(data, shape, dtype):
    """(inputs [N, D], output_grads [N, O]) of that dtype."""
    samples, features, outputs = shape
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(samples * 1000 + features)
        return DATA[data](samples, features).to(dtype), normal(samples, outputs).to(dtype)


@cache
def expected_gradient(data, shape, dtype, damping):
    inputs, output_grads = problem(data, shape, dtype)
    return reference.consequential_gradient(inputs.numpy(), output_grads.numpy(), damping)


def matrices(samples, features, outputs, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    inputs = scale * torch.randn(samples, features, generator=generator, dtype=torch.float64)
    return inputs, torch.randn(samples, outputs, generator=generator, dtype=torch.float64)


# ---------------------------------------------------------------------------------------------------------------------
# Numbers.
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("damping", DAMPINGS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("data", DATA)
def test_equals_the_reference(data, shape, damping, dtype, side):
    inputs, output_grads = problem(data, shape, dtype)
    actual = consequential_gradient(inputs, output_grads, damping, side=side)
    assert actual.dtype == dtype
    kappa = reference.condition_number(inputs, damping, None if side == "auto" else side)
    skip_if_silent(check_error(actual, expected_gradient(data, shape, dtype, damping), kappa, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("damping", DAMPINGS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("data", DATA)
def test_equals_ridge_regression_of_sklearn(data, shape, damping, dtype):
    inputs, output_grads = problem(data, shape, dtype)
    ridge = Ridge(alpha=damping, fit_intercept=False)
    expected = ridge.fit(inputs.double().numpy(), output_grads.double().numpy()).coef_.reshape(shape[2], shape[1])
    actual = consequential_gradient(inputs, output_grads, damping)
    skip_if_silent(check_error(actual, expected, reference.condition_number(inputs, damping), dtype))


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("data", DATA)
def test_zero_damping_is_the_pseudo_inverse(data, shape, dtype, side):
    inputs, output_grads = problem(data, shape, dtype)
    expected = output_grads.double().numpy().T @ np.linalg.pinv(inputs.double().numpy()).T
    actual = consequential_gradient(inputs, output_grads, 0.0, side=side)
    skip_if_silent(check_error(actual, expected, reference.condition_number(inputs, 0), dtype))


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("samples", "features", "rank"), [(4, 9, 2), (9, 4, 2), (6, 6, 3), (12, 40, 5), (5, 3, 0)])
def test_zero_damping_of_a_rank_deficient_matrix(samples, features, rank, dtype, side):
    random = np.random.default_rng(rank)  # small integers, so that the rank is exact in every dtype
    inputs = random.integers(-3, 4, (samples, rank)) @ random.integers(-3, 4, (rank, features))
    assert np.linalg.matrix_rank(inputs) == rank
    output_grads = torch.from_numpy(random.normal(size=(samples, 3))).to(dtype)
    expected = output_grads.double().numpy().T @ np.linalg.pinv(inputs).T
    actual = consequential_gradient(torch.from_numpy(inputs).to(dtype), output_grads, 0, side=side)
    skip_if_silent(check_error(actual, expected, reference.condition_number(inputs, 0), dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_moderate_damping_survives_float32_at_training_sizes(dtype):
    inputs, output_grads = (matrix.to(dtype) for matrix in matrices(128, 400, 10))
    expected = reference.to_numpy(consequential_gradient(inputs.double(), output_grads.double(), 1e-3))
    actual = consequential_gradient(inputs, output_grads, 1e-3)
    assert check_error(actual, expected, reference.condition_number(inputs, 1e-3), dtype)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(("samples", "features"), [(32, 100), (100, 32)])
def test_a_failed_factorisation_is_repeated_in_float64(samples, features, side):
    """Samples on one line, λ below the rounding errors of the float32 Gram matrix: that is not positive definite.

    The retry must start from the inputs: in the rounded Gram matrix λ is lost, whatever the precision of what follows.
    """
    inputs, output_grads = (matrix.float() for matrix in matrices(samples, features, 2))
    inputs = 10 * inputs[:, :1] @ inputs[:1]
    damping = 1e-3
    expected = reference.consequential_gradient(inputs.numpy(), output_grads.numpy(), damping)
    actual = consequential_gradient(inputs, output_grads, damping, side=side)
    assert actual.dtype == torch.float32
    assert reference.relative_error(actual, expected) <= 1e-4


# ---------------------------------------------------------------------------------------------------------------------
# Leading dimensions, transforms, derivatives.
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damping", [0.0, 0.1])
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("leading", [(3,), (2, 3), (1, 1, 2), (0,)], ids=str)
@pytest.mark.parametrize(("samples", "features"), [(4, 7), (7, 4)])
def test_leading_dimensions_are_separate_problems(samples, features, leading, side, damping):
    inputs, output_grads = matrices(int(np.prod(leading)) * samples, features, 2)
    inputs = inputs.reshape(*leading, samples, features)
    output_grads = output_grads.reshape(*leading, samples, 2)
    actual = consequential_gradient(inputs, output_grads, damping, side=side)
    assert actual.shape == (*leading, 2, features)
    for index in np.ndindex(*leading):
        alone = consequential_gradient(inputs[index], output_grads[index], damping, side=side)
        torch.testing.assert_close(actual[index], alone, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("damping", [0.0, 0.1])
@pytest.mark.parametrize("side", SIDES)
def test_vmap(side, damping):
    inputs, output_grads = matrices(5 * 4, 6, 2)
    inputs, output_grads = inputs.reshape(5, 4, 6), output_grads.reshape(5, 4, 2)

    def correct(x, dz):
        return consequential_gradient(x, dz, damping, side=side)

    expected = correct(inputs, output_grads)
    torch.testing.assert_close(torch.func.vmap(correct)(inputs, output_grads), expected)
    one_input = torch.func.vmap(correct, in_dims=(None, 0))(inputs[0], output_grads)
    torch.testing.assert_close(one_input[3], correct(inputs[0], output_grads[3]))


@pytest.mark.parametrize("damping", [0.0, 0.3])
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(("samples", "features"), [(3, 5), (5, 3), (1, 4)])
def test_gradcheck(samples, features, side, damping):
    inputs, output_grads = matrices(samples, features, 2)
    variables = (inputs.requires_grad_(), output_grads.requires_grad_())
    assert torch.autograd.gradcheck(lambda x, dz: consequential_gradient(x, dz, damping, side=side), variables)


def test_arguments_are_left_alone():
    inputs, output_grads = matrices(4, 6, 2)
    copies = inputs.clone(), output_grads.clone()
    for side in SIDES:
        for damping in (0.0, 0.1):
            consequential_gradient(inputs, output_grads, damping, side=side)
    assert torch.equal(inputs, copies[0])
    assert torch.equal(output_grads, copies[1])


@pytest.mark.parametrize("side", SIDES)
def test_non_contiguous_arguments(side):
    inputs, output_grads = matrices(4, 6, 3)
    expected = consequential_gradient(inputs, output_grads, 0.1, side=side)
    strided = inputs.T.contiguous().T, output_grads.repeat_interleave(2, dim=1)[:, ::2]
    assert not any(matrix.is_contiguous() for matrix in strided)
    torch.testing.assert_close(consequential_gradient(*strided, 0.1, side=side), expected)


# ---------------------------------------------------------------------------------------------------------------------
# Bad input, and nothing to do.
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damping", [0.0, 0.1])
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("inputs", "output_grads", "result"),
    [((0, 4), (0, 2), (2, 4)), ((3, 0, 4), (3, 0, 2), (3, 2, 4)), ((5, 0), (5, 2), (2, 0)), ((5, 4), (5, 0), (0, 4))],
)
def test_nothing_in_gives_zeros(inputs, output_grads, result, dtype, side, damping):
    actual = consequential_gradient(
        torch.ones(inputs, dtype=dtype), torch.ones(output_grads, dtype=dtype), damping, side=side
    )
    assert actual.shape == result
    assert actual.dtype == dtype
    assert not actual.any()


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("damping", [0.0, 0.1])
def test_zero_inputs_give_zeros(damping, side):
    actual = consequential_gradient(torch.zeros(4, 3), torch.ones(4, 2), damping, side=side)
    assert torch.equal(actual, torch.zeros(2, 3))


@pytest.mark.parametrize(
    ("damping", "error", "message"),
    [
        (-1.5, ValueError, r"-1\.5"),
        (-1e-30, ValueError, r"-1e-30"),
        (float("nan"), ValueError, "nan"),
        (float("inf"), ValueError, "inf"),
        (-float("inf"), ValueError, "-inf"),
        ("0.1", TypeError, r"0\.1|str"),
        (None, TypeError, "None"),
    ],
)
def test_bad_damping(damping, error, message):
    with pytest.raises(error, match=message):
        consequential_gradient(torch.ones(3, 2), torch.ones(3, 1), damping)


@pytest.mark.parametrize(
    ("inputs", "output_grads", "message"),
    [
        ((3,), (3, 1), "3"),
        ((3, 2), (3,), "3"),
        ((), (3, 2), r"\[\]|\(\)"),
        ((7, 2), (5, 2), "7.*5"),
        ((2, 3, 4), (6, 3, 5), "2.*6"),
    ],
)
def test_bad_shapes(inputs, output_grads, message):
    with pytest.raises(ValueError, match=message):
        consequential_gradient(torch.ones(inputs), torch.ones(output_grads), 0.1)


@pytest.mark.parametrize("side", ["left", "", "N", None])
def test_bad_side(side):
    with pytest.raises(ValueError, match=repr(side)):
        consequential_gradient(torch.ones(3, 2), torch.ones(3, 1), 0.1, side=side)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64], ids=str)
def test_bad_dtype(dtype):
    matrix = torch.ones(3, 2, dtype=dtype)
    with pytest.raises(TypeError, match=str(dtype)):
        consequential_gradient(matrix, matrix, 0.1)


def test_mixed_dtypes():
    with pytest.raises(TypeError, match=r"float32.*float64"):
        consequential_gradient(torch.ones(3, 2), torch.ones(3, 2, dtype=torch.float64), 0.1)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_non_finite_inputs_raise(dtype, value, side):
    inputs, output_grads = (matrix.to(dtype) for matrix in matrices(3, 4, 2))
    inputs[1, 2] = value
    with pytest.raises(torch.linalg.LinAlgError, match=r"damping=0\.1.*NaN or inf"):
        consequential_gradient(inputs, output_grads, 0.1, side=side)
    # The SVD raises for NaN and passes inf on: either way nobody takes the result for a number.
    try:
        without_damping = consequential_gradient(inputs, output_grads, 0.0, side=side)
    except torch.linalg.LinAlgError:
        return
    assert not without_damping.isfinite().any()


@pytest.mark.parametrize("damping", [0.0, 0.1])
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_output_grads_stay_visible(value, side, damping):
    inputs, output_grads = matrices(3, 4, 2)
    output_grads[1, 0] = value
    actual = consequential_gradient(inputs, output_grads, damping, side=side)
    assert not actual[0].isfinite().any()
    assert actual[1].isfinite().all()


# ---------------------------------------------------------------------------------------------------------------------
# Properties.
# ---------------------------------------------------------------------------------------------------------------------

properties = settings(deadline=None, max_examples=60, derandomize=True)
sizes = st.integers(1, 12)
dampings = st.floats(-4, 3).map(lambda exponent: 10.0**exponent)
elements = st.floats(-10, 10, allow_subnormal=False, width=32)


@st.composite
def problems(draw, wide=False):
    """Matrices as hypothesis likes them: zeros, repeated rows, entries of very different size."""
    samples, features, outputs = draw(sizes), draw(sizes), draw(st.integers(1, 4))
    if wide and samples > features:
        samples, features = features, samples
    inputs = draw(arrays.arrays(np.float64, (samples, features), elements=elements))
    output_grads = draw(arrays.arrays(np.float64, (samples, outputs), elements=elements))
    return torch.from_numpy(inputs), torch.from_numpy(output_grads)


def tolerance(inputs, damping):
    """10·eps·κ of the larger, worse conditioned side: κ ≤ 1 + ‖X‖²/λ."""
    return 10 * torch.finfo(torch.float64).eps * (1 + inputs.square().sum() / damping)


def bound_on_norm(output_grads, damping):
    """‖ΔZ X (XᵀX + λI)⁻¹‖ ≤ ‖ΔZ‖ / 2√λ, the scale against which errors are measured."""
    return output_grads.norm() / (2 * damping**0.5)


@properties
@given(problems(), dampings)
def test_samples_side_equals_features_side(problem, damping):
    inputs, output_grads = problem
    samples = consequential_gradient(inputs, output_grads, damping, side="samples")
    features = consequential_gradient(inputs, output_grads, damping, side="features")
    scale = bound_on_norm(output_grads, damping)
    assert (samples - features).norm() <= tolerance(inputs, damping) * scale


@properties
@given(problems(wide=True), st.floats(1e-3, 10))
def test_outputs_move_by_exactly_what_was_wanted(problem, learning_rate):
    inputs, output_grads = problem
    condition = np.linalg.cond(inputs.numpy())
    assume(condition < 1e3)  # linearly independent samples
    weight = torch.ones(output_grads.shape[1], inputs.shape[1], dtype=torch.float64)
    before = inputs @ weight.T
    for damping in (0.0, 1e-14 * inputs.square().sum().item()):
        step = -learning_rate * consequential_gradient(inputs, output_grads, damping)
        moved = inputs @ (weight + step).T - before
        error = (moved + learning_rate * output_grads).norm()
        size = learning_rate * output_grads.norm() + before.norm()
        assert error <= 1e-12 * condition**2 * size


@properties
@given(problems())
def test_infinite_damping_is_the_plain_gradient(problem):
    inputs, output_grads = problem
    plain = output_grads.T @ inputs
    damping = 1e9 * max(1.0, inputs.square().sum().item())
    corrected = damping * consequential_gradient(inputs, output_grads, damping)
    assert (corrected - plain).norm() <= 1e-9 * output_grads.norm() * inputs.norm() * 1.01


@properties
@given(problems(), dampings, st.floats(-1e3, 1e3))
def test_scaling_the_loss_scales_the_correction(problem, damping, factor):
    inputs, output_grads = problem
    expected = factor * consequential_gradient(inputs, output_grads, damping)
    actual = consequential_gradient(inputs, factor * output_grads, damping)
    scale = abs(factor) * bound_on_norm(output_grads, damping) + 1e-300
    assert (actual - expected).norm() <= tolerance(inputs, damping) * scale


@properties
@given(problems(), dampings, st.randoms(use_true_random=False))
def test_permuting_the_batch_changes_nothing(problem, damping, random):
    inputs, output_grads = problem
    order = list(range(len(inputs)))
    random.shuffle(order)
    expected = consequential_gradient(inputs, output_grads, damping)
    actual = consequential_gradient(inputs[order], output_grads[order], damping)
    assert (actual - expected).norm() <= tolerance(inputs, damping) * bound_on_norm(output_grads, damping)


@properties
@given(problems(), dampings)
def test_no_sample_overshoots(problem, damping):
    """The outputs' movement X (XᵀX + λI)⁻¹XᵀΔZ is a contraction of the wanted one."""
    inputs, output_grads = problem
    moved = inputs @ consequential_gradient(inputs, output_grads, damping).T
    slack = tolerance(inputs, damping) * (1 + inputs.norm() / damping**0.5) * output_grads.norm()
    assert moved.norm() <= output_grads.norm() + slack
