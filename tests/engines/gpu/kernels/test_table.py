import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from consequent.engines.gpu.kernels import table as tables
from consequent.engines.gpu.kernels.table import device_table, float_pair, int_pair

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def needs_cuda(test):
    return pytest.mark.gpu(pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")(test))


@pytest.mark.parametrize("make", [device_table, tables._written])
@pytest.mark.parametrize("length", [0, 1, 16, 17, 64, 200, 256, 257, 700])
def test_holds_the_values_in_order(length, make):
    generator = torch.Generator().manual_seed(length)
    values = torch.randint(-(2**62), 2**62, (length,), generator=generator).tolist()
    table = make(values, torch.device(DEVICE))
    assert table.dtype == torch.int64
    assert table.tolist() == values


def test_small_round_and_large_values_together():
    values = [0, 1, -1, 16, 2**31 - 1, 2**31, -(2**31) - 1, 2**63 - 1, -(2**63)]
    assert device_table(values, DEVICE).tolist() == values


@needs_cuda
def test_same_values_are_written_once_per_key():
    first = device_table([1, 2, 3], DEVICE, key="one")
    assert device_table([1, 2, 3], DEVICE, key="one") is first
    assert device_table([1, 2, 3], DEVICE, key="other") is not first


def test_new_values_leave_the_old_table_as_it_was():
    first = device_table([1, 2, 3], DEVICE, key="old")
    second = device_table([4, 5, 6], DEVICE, key="old")
    assert (first.tolist(), second.tolist()) == ([1, 2, 3], [4, 5, 6])


def test_pairs_fill_64_bits():
    assert int_pair(2**31 - 1, 2**31 - 1).bit_length() == 63
    packed = torch.tensor([float_pair(-0.5, 1e-3), float_pair(2.0, -0.0)])
    assert packed.view(torch.float32).tolist() == [-0.5, pytest.approx(1e-3), 2.0, -0.0]


@needs_cuda
def test_a_graph_writes_its_own_table():
    outside = device_table([7, 8], DEVICE, key="graph")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inside = device_table([7, 8], DEVICE, key="graph")
    assert inside is not outside
    inside.zero_()
    graph.replay()
    assert inside.tolist() == [7, 8]
    assert device_table([7, 8], DEVICE, key="graph") is not inside


@needs_cuda
def test_compiles_once_for_all_values():
    table = torch.empty(16, dtype=torch.int64, device=DEVICE)
    kernels = [
        tables._writer(16)[(1,)](table, start, *values, num_warps=1)
        for start, values in ((0, [0] * 16), (0, [1, 16, 2**31, 2**40] * 4), (0, [-1] * 16))
    ]
    assert kernels[0] is kernels[1] is kernels[2]
    assert table.tolist() == [-1] * 16
