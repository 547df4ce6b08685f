"""Products with lower triangular matrices, by parts, against the whole products in float64."""

import pytest
import torch

from consequent.maths import triangular_products as lower

SHAPES = [(1, 1, 1), (2, 5, 31), (1, 7, 64), (3, 40, 97), (2, 1, 200)]


@pytest.fixture(params=[1, 50, 10**9], ids=["many parts", "some", "one"], autouse=True)
def parts(request, monkeypatch):
    monkeypatch.setattr(lower, "ENTRIES", request.param)
    monkeypatch.setattr(lower, "WIDTH", 1)


def matrices(batch, rows, size):
    generator = torch.Generator().manual_seed(rows + size)
    triangle = torch.randn(batch, size, size, generator=generator, dtype=torch.float64).tril()
    return triangle, torch.randn(batch, rows, size, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("shape", SHAPES)
def test_products(shape):
    triangle, left = matrices(*shape)
    assert torch.allclose(lower.by_transposed(left, triangle), left @ triangle.mT)
    assert torch.allclose(lower.by_lower(left, triangle), left @ triangle)
    out = torch.full_like(left, torch.nan)
    assert lower.by_lower(left, triangle, out=out) is out
    assert torch.allclose(out, left @ triangle)
    out = torch.full((shape[0], shape[2], shape[1] + 3), torch.nan, dtype=torch.float64)
    lower.lower_by(triangle, left.mT, out=out[:, :, 1 : 1 + shape[1]])
    assert torch.allclose(out[:, :, 1 : 1 + shape[1]], triangle @ left.mT)
    assert out[:, :, 0].isnan().all()


@pytest.mark.parametrize("shape", SHAPES)
def test_the_part_below_the_diagonal_of_a_difference(shape):
    triangle, left = matrices(*shape)
    matrix = triangle + triangle.mT
    expected = matrix - left.mT @ left
    assert torch.allclose(lower.subtract_square(matrix, left.mT).tril(), expected.tril())


@pytest.mark.parametrize("size", [1, 31, 32, 33, 200, 3073])
def test_parts_cover_all_columns_and_are_aligned(size):
    edges = list(lower._parts(torch.empty(1, size)))
    assert [start for start, _ in edges] == [0, *(stop for _, stop in edges[:-1])]
    assert edges[-1][1] == size
    assert all(start % 32 == 0 for start, _ in edges)


def test_many_parts_save_nearly_half(monkeypatch):
    from torch.utils.flop_counter import FlopCounterMode

    triangle, left = matrices(1, 8, 1024)
    counted = []
    for width in (1024, 32):
        monkeypatch.setattr(lower, "ENTRIES", 1)
        monkeypatch.setattr(lower, "WIDTH", width)
        with FlopCounterMode(display=False) as counter:
            lower.by_transposed(left, triangle)
        counted.append(counter.get_total_flops())
    assert counted[1] < 0.52 * counted[0]


@pytest.mark.parametrize("rows", [0, 5, 300])
@pytest.mark.parametrize("size", [1, 127, 128, 129, 144, 255, 256, 300, 577])
def test_a_square(size, rows):
    """Also of some columns of a wider matrix."""
    wide = torch.randn(2, rows, size + 7, generator=torch.Generator().manual_seed(size), dtype=torch.float64)
    for matrix in (wide[:, :, 3 : size + 3], wide[:, :, :size].contiguous()):
        assert torch.allclose(lower.square(matrix), matrix.mT @ matrix)
