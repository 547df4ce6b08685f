"""Products of several matrices with themselves: as float64 has them, symmetric, and of any strides."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from consequent.engines.gpu.kernels.row_products import gram_matrices, row_moments

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

SHAPES = [(1, 1), (1, 31), (130, 70), (64, 64), (65, 129), (300, 5)]


def matrices(rows, columns, number=3, dtype=torch.float32, step=1):
    generator = torch.Generator().manual_seed(rows + columns)
    return [torch.randn(rows, step * columns, generator=generator).to(DEVICE, dtype)[:, ::step] for _ in range(number)]


def with_ones(matrix, ones):
    matrix = matrix.cpu().double()
    return torch.cat([matrix, matrix.new_ones(len(matrix), 1)], dim=1) if ones else matrix


def assert_close(found, expected, tolerance=1e-6):
    assert found.dtype == torch.float32
    assert torch.equal(found, found.mT)
    assert (found.cpu().double() - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("ones", [False, True])
@pytest.mark.parametrize("step", [1, 2])
def test_moments_and_gram_matrices(shape, ones, step):
    inputs = matrices(*shape, step=step)
    whole = torch.stack([with_ones(matrix, ones) for matrix in inputs])
    assert_close(row_moments(inputs, ones=ones, precision="ieee"), whole.mT @ whole)
    assert_close(gram_matrices(inputs, ones=ones, precision="ieee"), whole @ whole.mT)


def test_sums_that_are_split(monkeypatch):
    from consequent.engines.gpu.kernels import row_products

    monkeypatch.setattr(row_products, "multiprocessors", lambda device: 64)
    row_products._cut.cache_clear()
    inputs = matrices(1100, 20)
    whole = torch.stack([with_ones(matrix, True) for matrix in inputs])
    assert row_products._cut(3, 21, 1100, inputs[0].device).splits > 1
    assert_close(row_moments(inputs, ones=True, precision="ieee"), whole.mT @ whole)
    transposed = [matrix.mT.contiguous() for matrix in inputs]
    whole = torch.stack([with_ones(matrix, True) for matrix in transposed])
    assert_close(gram_matrices(transposed, ones=True, precision="ieee"), whole @ whole.mT)
    row_products._cut.cache_clear()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_inputs_of_half_the_size_are_summed_in_float32(dtype):
    inputs = matrices(90, 40, dtype=dtype)
    whole = torch.stack([with_ones(matrix, True) for matrix in inputs])
    assert_close(row_moments(inputs, ones=True), whole.mT @ whole, 1e-5)
    assert_close(gram_matrices(inputs, ones=True), whole @ whole.mT, 1e-5)


def test_constant_features_leave_a_positive_semi_definite_moment():
    """The ones and the features must be rounded alike, or features that hardly vary get a negative variance."""
    inputs = [1.2345 + 1e-4 * matrix for matrix in matrices(300, 18)]
    eigenvalues = torch.linalg.eigvalsh(row_moments(inputs, ones=True).cpu().double())
    assert (eigenvalues[:, 0] >= -1e-5 * eigenvalues[:, -1]).all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in the interpreter
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_seen_on_the_diagonal(bad):
    inputs = matrices(70, 9)
    inputs[1][69, 8] = bad
    for product in (row_moments(inputs, ones=True), gram_matrices(inputs, ones=True)):
        is_finite = product.diagonal(dim1=1, dim2=2).sum(1).isfinite()
        assert is_finite.tolist() == [True, False, True]


def test_no_rows_give_zeros():
    assert torch.equal(row_moments([torch.empty(0, 3, device=DEVICE)], ones=False).cpu(), torch.zeros(1, 3, 3))


def test_bad_arguments_are_refused():
    inputs = torch.zeros(2, 2, device=DEVICE)
    with pytest.raises(TypeError, match="float64"):
        row_moments([inputs.double()], ones=True)
    with pytest.raises(ValueError, match="precision must be one of"):
        row_moments([inputs], ones=True, precision="fp8")
    with pytest.raises(ValueError, match="dimensions"):
        row_moments([inputs[:, :, None]], ones=True)
    with pytest.raises(ValueError, match=r"alike, got \[2, 2\].*\[2, 1\]"):
        row_moments([inputs, inputs[:, :1]], ones=True)
