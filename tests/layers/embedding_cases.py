"""What the tests of embeddings have in common."""

from zlib import crc32

import numpy as np
import torch

ROWS, WIDTH = 7, 3


def seeded(name, make):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(crc32(name.encode()))
        return make()


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


def dense(tensor):
    return tensor.to_dense() if tensor.is_sparse else tensor


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def ridge(rows, output_grad, damping):
    """``ΔZ Xᵀ (XXᵀ + λI)⁻¹`` with numpy, as ``[features, out_features]``."""
    rows, output_grad = rows.numpy(), output_grad.numpy()
    return torch.from_numpy(np.linalg.solve(rows.T @ rows + damping * np.eye(ROWS), rows.T @ output_grad))
