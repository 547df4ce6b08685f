"""Inputs of several layers in one tensor: with ones, zeros at the end, and rounded to TF32 if that is asked for."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from consequent.engines.gpu.kernels.padded_rows import padded_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def matrices(rows, columns, step=1):
    generator = torch.Generator().manual_seed(rows + columns)
    return [torch.randn(rows, step * columns, generator=generator).to(DEVICE)[:, ::step] for _ in range(3)]


@pytest.mark.parametrize("shape", [(1, 1), (3, 4), (17, 255), (40, 256), (5, 300)], ids=str)
@pytest.mark.parametrize("ones", [False, True])
@pytest.mark.parametrize("step", [1, 2])
def test_all_numbers_are_in_their_places(shape, ones, step):
    inputs = matrices(*shape, step=step)
    found = padded_rows(inputs, ones=ones)
    rows, columns = shape
    width = columns + ones
    assert found.shape == (3, rows, width if columns < 128 else (width + 3) // 4 * 4)
    assert torch.equal(found[:, :, :columns], torch.stack(inputs))
    assert (found[:, :, columns : columns + ones] == 1).all()
    assert (found[:, :, columns + ones :] == 0).all()


def test_rounding_is_to_the_nearest_tf32():
    inputs = matrices(30, 20)
    found = padded_rows(inputs, ones=True, rounded=True)[:, :, :20]
    exact = torch.stack(inputs)
    assert (found.view(torch.int32) & 0x1FFF == 0).all()
    assert ((found - exact).abs() <= exact.abs() * 2.0**-11).all()
    assert (found - exact).sum().abs() < (found - exact).abs().sum() / 2  # to both sides


def test_what_is_not_finite_stays():
    inputs = matrices(4, 4)
    inputs[1][2, 3], inputs[2][0, 0] = torch.nan, -torch.inf
    found = padded_rows(inputs, ones=False, rounded=True)
    assert found[1, 2, 3].isnan()
    assert found[2, 0, 0] == -torch.inf


def test_no_rows():
    assert padded_rows([torch.empty(0, 3, device=DEVICE)], ones=True).shape == (1, 0, 4)


def test_bad_arguments_are_refused():
    inputs = torch.zeros(2, 2, device=DEVICE)
    with pytest.raises(TypeError, match="float64"):
        padded_rows([inputs.double()], ones=True)
    with pytest.raises(ValueError, match=r"one shape, got \[2, 2\] and \[2, 1\]"):
        padded_rows([inputs, inputs[:, :1]], ones=True)
