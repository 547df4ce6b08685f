"""Packed triangles: nothing is lost, and nothing is sent twice."""

import pytest
import torch

from consequent.maths.packed_triangle import packed, unpacked, unpacked_triangle
from consequent.ranks.traffic import packed_length


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("size", range(1, 12))
def test_there_and_back(size, groups):
    matrix = torch.randn(groups, size, size, generator=torch.Generator().manual_seed(size))
    lower = matrix.tril()
    symmetric = lower + lower.tril(-1).mT
    assert packed(symmetric).numel() == groups * packed_length(size)
    assert torch.equal(unpacked(packed(symmetric), size), symmetric)
    assert torch.equal(unpacked_triangle(packed(lower), size), lower)
    assert torch.equal(packed(lower), packed(symmetric))
    assert unpacked_triangle(packed(lower), size).is_contiguous()
