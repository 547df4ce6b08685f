"""Which kernel computes a layer's second moment on a GPU, and that all of them compute the same thing."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

import by_layer as moments

from consequent.engines.gpu import kernels
from consequent.engines.gpu.kernels import choice, lags, moment, padded_rows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

CASES = {  # layer, shape of its inputs, the kernel
    "linear": (nn.Linear(9, 2), (6, 9), "padded_rows"),
    "sequence": (nn.Linear(5, 2), (3, 4, 5), "padded_rows"),
    "strided": (nn.Conv2d(3, 2, 3, stride=2, padding=1), (4, 3, 6, 5), "patch_moment"),
    "point": (nn.Conv2d(3, 2, 1), (4, 3, 4, 5), "patch_moment"),
    "few images": (nn.Conv2d(3, 2, 3, padding=1), (2, 3, 5, 5), "patch_moment"),
    "same": (nn.Conv2d(2, 2, 3, padding="same"), (2, 2, 5, 5), "patch_moment"),
    "usual": (nn.Conv2d(2, 2, 3, padding=1), (64, 2, 8, 8), "lag_moments"),
    "grouped": (nn.Conv2d(4, 2, 3, padding=1, groups=2), (3, 4, 5, 5), None),
    "circular": (nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"), (3, 2, 5, 5), "patch_moment"),
    "lopsided": (nn.Conv2d(2, 2, 2, padding="same"), (3, 2, 5, 5), "patch_moment"),
    "one dimension": (nn.Conv1d(2, 2, 3, padding=1), (3, 2, 7), None),
}


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_for_a_layer(monkeypatch, name):
    layer, shape, expected_kernel = CASES[name]
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator).to(DEVICE) for _ in range(2)]
    wanted = torch.stack([moments.second_moment(layer, x.double(), ones=True) for x in inputs])
    monkeypatch.setattr(kernels, "run_on", lambda device: True)
    used = set()
    for module, function in ((padded_rows, "padded_rows"), (moment, "patch_moment"), (lags, "lag_moments")):
        original = getattr(module, function)

        def spy(*args, original=original, function=function, **options):
            used.add(function)
            return original(*args, **options)

        monkeypatch.setattr(module, function, spy)
    actual = moments.second_moments(layer, inputs, ones=True)
    assert used == ({expected_kernel} if expected_kernel else set())
    assert actual.shape == wanted.shape
    assert (actual.double() - wanted).norm() <= 1e-4 * wanted.norm()


@pytest.mark.parametrize("allowed", [False, True])
def test_few_rows_are_not_rounded(monkeypatch, allowed):
    """Rounding errors of a few rows do not cancel out; and nothing is rounded where TF32 is not allowed."""
    monkeypatch.setattr(kernels, "run_on", lambda device: True)
    monkeypatch.setattr(choice, "tf32_is_allowed", lambda: allowed)
    monkeypatch.setattr(choice, "tf32_products", nullcontext)
    seen = []

    def look(rows, *, ones, rounded):
        seen.append(rounded)
        return torch.zeros(1, len(rows[0]), 4)

    monkeypatch.setattr(padded_rows, "padded_rows", look)
    for rows in (128, 4096):
        moments.second_moment(nn.Linear(3, 1), torch.zeros(rows, 3), ones=True)
    assert seen == [False, allowed]
