"""What every test walks over: name -> (make a module, make an input for it).

Inputs are made in float64 and cast, so that float64 tests see full mantissas. ``build`` seeds module and inputs by the
name.
"""

from zlib import crc32

import pytest
import reference
import torch
from torch import nn

from consequent.layers import kind_of

DAMPINGS = [1e-6, 1e-4, 1e-2, 1.0, 1e3]
DTYPES = [torch.float32, torch.float64]


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def rectified(*shape):
    """What layers see after a ReLU: a large common component, many zeros."""
    return (normal(*shape) + 0.5).relu()


def correlated(*shape):
    """Samples (leading dimension) that are multiples of one another, up to 1e-3."""
    samples = normal(shape[0], *(1 for _ in shape[1:]))
    return samples * normal(1, *shape[1:]) + 1e-3 * normal(*shape)


def duplicated(*shape):
    """Every sample twice, except for an odd one."""
    half = normal((shape[0] + 1) // 2, *shape[1:])
    return torch.cat([half, half])[: shape[0]]


LINEAR_CASES = {
    "linear-wide": (lambda: nn.Linear(12, 5), lambda: normal(4, 12)),
    "linear-wide-no-bias": (lambda: nn.Linear(12, 5, bias=False), lambda: normal(4, 12)),
    "linear-tall": (lambda: nn.Linear(3, 7), lambda: normal(20, 3)),
    "linear-tall-no-bias": (lambda: nn.Linear(3, 7, bias=False), lambda: normal(20, 3)),
    "linear-square": (lambda: nn.Linear(8, 4), lambda: normal(9, 8)),
    "linear-1d-input": (lambda: nn.Linear(6, 3), lambda: normal(6)),
    "linear-1d-input-no-bias": (lambda: nn.Linear(6, 3, bias=False), lambda: normal(6)),
    "linear-one-sample": (lambda: nn.Linear(6, 3), lambda: normal(1, 6)),
    "linear-one-feature": (lambda: nn.Linear(1, 3), lambda: normal(8, 1)),
    "linear-one-output": (lambda: nn.Linear(9, 1), lambda: normal(6, 9)),
    "linear-3d-input-wide": (lambda: nn.Linear(24, 4), lambda: normal(3, 5, 24)),
    "linear-3d-input-tall": (lambda: nn.Linear(6, 4), lambda: normal(3, 7, 6)),
    "linear-4d-input-wide": (lambda: nn.Linear(30, 2), lambda: normal(2, 3, 4, 30)),
    "linear-4d-input-tall-no-bias": (lambda: nn.Linear(5, 4, bias=False), lambda: normal(2, 3, 4, 5)),
    "linear-rectified": (lambda: nn.Linear(32, 10), lambda: rectified(16, 32)),
    "linear-correlated-wide": (lambda: nn.Linear(20, 4), lambda: correlated(8, 20)),
    "linear-correlated-tall": (lambda: nn.Linear(6, 4), lambda: correlated(30, 6)),
    "linear-duplicated": (lambda: nn.Linear(12, 4), lambda: duplicated(7, 12)),
    "linear-transposed-input": (lambda: nn.Linear(12, 4), lambda: normal(12, 7).T),
}

CONV1D_CASES = {
    "conv1d": (lambda: nn.Conv1d(2, 3, 3), lambda: normal(4, 2, 9)),
    "conv1d-few-positions": (lambda: nn.Conv1d(6, 3, 5, stride=3), lambda: normal(2, 6, 9)),
    "conv1d-stride-padding": (lambda: nn.Conv1d(2, 3, 4, stride=2, padding=2), lambda: normal(3, 2, 10)),
    "conv1d-padding-beyond-kernel": (lambda: nn.Conv1d(2, 3, 2, padding=3), lambda: normal(2, 2, 6)),
    "conv1d-dilation": (lambda: nn.Conv1d(2, 3, 3, dilation=3, padding=2), lambda: normal(3, 2, 9)),
    "conv1d-same-even": (lambda: nn.Conv1d(2, 3, 4, padding="same"), lambda: normal(3, 2, 8)),
    "conv1d-same-even-dilated": (lambda: nn.Conv1d(1, 3, 4, padding="same", dilation=3), lambda: normal(2, 1, 10)),
    "conv1d-same-even-reflect": (
        lambda: nn.Conv1d(2, 3, 4, padding="same", padding_mode="reflect"),
        lambda: normal(3, 2, 8),
    ),
    "conv1d-groups": (lambda: nn.Conv1d(4, 6, 3, groups=2, padding=1), lambda: normal(3, 4, 7)),
    "conv1d-depthwise-no-bias": (lambda: nn.Conv1d(4, 4, 3, groups=4, bias=False), lambda: normal(3, 4, 7)),
    "conv1d-unbatched": (lambda: nn.Conv1d(2, 3, 3, padding=1), lambda: normal(2, 9)),
    "conv1d-circular": (lambda: nn.Conv1d(2, 3, 3, padding=2, padding_mode="circular"), lambda: normal(2, 2, 7)),
    "conv1d-replicate-stride": (
        lambda: nn.Conv1d(2, 3, 5, padding=2, stride=2, padding_mode="replicate"),
        lambda: normal(3, 2, 9),
    ),
    "conv1d-kernel-1": (lambda: nn.Conv1d(5, 3, 1), lambda: normal(2, 5, 6)),
}

CONV2D_CASES = {
    "conv2d": (lambda: nn.Conv2d(2, 4, 3), lambda: normal(2, 2, 6, 6)),
    "conv2d-padding": (lambda: nn.Conv2d(2, 4, 3, padding=1), lambda: normal(2, 2, 5, 5)),
    "conv2d-padding-no-bias": (lambda: nn.Conv2d(2, 4, 3, padding=1, bias=False), lambda: normal(2, 2, 5, 5)),
    "conv2d-padding-rectified": (lambda: nn.Conv2d(2, 4, 3, padding=1), lambda: rectified(2, 2, 5, 5)),
    "conv2d-few-positions": (lambda: nn.Conv2d(4, 3, 3), lambda: normal(2, 4, 5, 4)),
    "conv2d-one-position": (lambda: nn.Conv2d(3, 4, 3), lambda: normal(5, 3, 3, 3)),
    "conv2d-kernel-1": (lambda: nn.Conv2d(4, 3, 1), lambda: normal(2, 4, 4, 4)),
    "conv2d-kernel-1-stride": (lambda: nn.Conv2d(4, 3, 1, stride=2, bias=False), lambda: normal(2, 4, 5, 5)),
    "conv2d-kernel-1-padding": (lambda: nn.Conv2d(3, 3, 1, padding=1), lambda: normal(2, 3, 3, 3)),
    "conv2d-even": (lambda: nn.Conv2d(2, 3, 2, padding=1), lambda: normal(2, 2, 5, 5)),
    "conv2d-rectangular": (lambda: nn.Conv2d(2, 3, (3, 2), padding=(1, 0)), lambda: normal(2, 2, 5, 6)),
    "conv2d-rectangular-1x3": (lambda: nn.Conv2d(3, 3, (1, 3), padding=(0, 1)), lambda: normal(2, 3, 4, 5)),
    "conv2d-padding-beyond-kernel": (lambda: nn.Conv2d(1, 3, 3, padding=(4, 3)), lambda: normal(2, 1, 4, 3)),
    "conv2d-input-below-kernel": (lambda: nn.Conv2d(2, 3, 5, padding=2), lambda: normal(3, 2, 3, 2)),
    "conv2d-stride": (lambda: nn.Conv2d(2, 3, 3, stride=2, padding=1), lambda: normal(4, 2, 6, 7)),
    "conv2d-stride-leaves-border": (lambda: nn.Conv2d(2, 3, 2, stride=3), lambda: normal(3, 2, 7, 10)),
    "conv2d-stride-beyond-kernel": (lambda: nn.Conv2d(2, 3, 1, stride=(2, 3)), lambda: normal(3, 2, 6, 7)),
    "conv2d-stride-mixed": (lambda: nn.Conv2d(2, 3, 3, stride=(1, 2), padding=(0, 1)), lambda: normal(3, 2, 6, 7)),
    "conv2d-dilation": (lambda: nn.Conv2d(2, 3, 3, dilation=2, padding=2), lambda: normal(2, 2, 6, 6)),
    "conv2d-dilation-mixed": (
        lambda: nn.Conv2d(2, 3, (2, 3), dilation=(3, 1), padding=(1, 2), stride=(2, 1)),
        lambda: normal(2, 2, 7, 5),
    ),
    "conv2d-groups": (lambda: nn.Conv2d(4, 6, 3, groups=2, padding=1), lambda: normal(2, 4, 4, 5)),
    "conv2d-groups-stride-no-bias": (
        lambda: nn.Conv2d(6, 3, 2, groups=3, stride=2, bias=False),
        lambda: normal(3, 6, 5, 4),
    ),
    "conv2d-groups-few-positions": (lambda: nn.Conv2d(8, 4, 3, groups=2), lambda: normal(3, 8, 4, 4)),
    "conv2d-depthwise": (lambda: nn.Conv2d(3, 3, 3, groups=3, padding=1), lambda: normal(2, 3, 4, 4)),
    "conv2d-depthwise-multiplier": (lambda: nn.Conv2d(3, 6, 3, groups=3), lambda: normal(2, 3, 5, 5)),
    "conv2d-depthwise-dilation": (
        lambda: nn.Conv2d(2, 4, 3, groups=2, dilation=2, padding="same", padding_mode="circular"),
        lambda: normal(2, 2, 6, 5),
    ),
    "conv2d-same": (lambda: nn.Conv2d(2, 3, 3, padding="same"), lambda: normal(2, 2, 5, 4)),
    "conv2d-same-even": (lambda: nn.Conv2d(2, 3, (2, 4), padding="same"), lambda: normal(2, 2, 5, 6)),
    "conv2d-same-even-dilated": (
        lambda: nn.Conv2d(1, 3, 2, padding="same", dilation=(3, 1)),
        lambda: normal(2, 1, 6, 5),
    ),
    "conv2d-same-even-replicate": (
        lambda: nn.Conv2d(2, 3, (4, 2), padding="same", padding_mode="replicate"),
        lambda: normal(2, 2, 5, 6),
    ),
    "conv2d-valid": (lambda: nn.Conv2d(2, 3, 3, padding="valid", stride=2), lambda: normal(3, 2, 7, 6)),
    "conv2d-valid-reflect": (
        lambda: nn.Conv2d(2, 3, 3, padding="valid", padding_mode="reflect"),
        lambda: normal(2, 2, 6, 5),
    ),
    "conv2d-reflect": (
        lambda: nn.Conv2d(2, 3, 3, padding=(2, 1), padding_mode="reflect"),
        lambda: normal(2, 2, 5, 4),
    ),
    "conv2d-replicate": (
        lambda: nn.Conv2d(2, 3, 3, padding=2, padding_mode="replicate", stride=2),
        lambda: normal(2, 2, 5, 6),
    ),
    "conv2d-circular": (
        lambda: nn.Conv2d(2, 3, 3, padding=(1, 2), padding_mode="circular"),
        lambda: normal(2, 2, 4, 5),
    ),
    "conv2d-circular-groups": (
        lambda: nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular", groups=2, stride=(2, 1)),
        lambda: normal(2, 4, 5, 4),
    ),
    "conv2d-unbatched": (lambda: nn.Conv2d(2, 3, 3, padding=1), lambda: normal(2, 5, 6)),
    "conv2d-unbatched-circular": (
        lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"),
        lambda: normal(2, 4, 5),
    ),
    "conv2d-correlated": (lambda: nn.Conv2d(2, 3, 3, padding=1), lambda: correlated(4, 2, 4, 4)),
    "conv2d-correlated-few-positions": (lambda: nn.Conv2d(4, 3, 3), lambda: correlated(6, 4, 4, 4)),
    "conv2d-duplicated": (lambda: nn.Conv2d(3, 3, 3), lambda: duplicated(4, 3, 4, 4)),
    "conv2d-channels-last": (
        lambda: nn.Conv2d(3, 4, 3, padding=1),
        lambda: normal(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    ),
}

CONV3D_CASES = {
    "conv3d": (lambda: nn.Conv3d(1, 3, 2), lambda: normal(2, 1, 3, 4, 3)),
    "conv3d-padding": (lambda: nn.Conv3d(1, 2, 3, padding=1), lambda: normal(2, 1, 3, 3, 4)),
    "conv3d-few-positions": (lambda: nn.Conv3d(3, 2, 3, stride=2), lambda: normal(2, 3, 3, 5, 4)),
    "conv3d-rectangular": (
        lambda: nn.Conv3d(2, 2, (1, 2, 3), stride=(1, 2, 1), padding=(0, 1, 1), dilation=(2, 1, 1)),
        lambda: normal(2, 2, 2, 4, 3),
    ),
    "conv3d-same-even-no-bias": (
        lambda: nn.Conv3d(1, 2, 2, padding="same", bias=False),
        lambda: normal(2, 1, 3, 2, 3),
    ),
    "conv3d-groups-replicate": (
        lambda: nn.Conv3d(4, 2, 2, groups=2, padding=1, padding_mode="replicate"),
        lambda: normal(1, 4, 2, 3, 2),
    ),
    "conv3d-reflect": (
        lambda: nn.Conv3d(1, 2, 3, padding=1, padding_mode="reflect"),
        lambda: normal(2, 1, 3, 2, 3),
    ),
    "conv3d-circular-depthwise": (
        lambda: nn.Conv3d(2, 2, 2, groups=2, padding=1, padding_mode="circular"),
        lambda: normal(2, 2, 2, 3, 2),
    ),
    "conv3d-unbatched": (lambda: nn.Conv3d(2, 2, 2), lambda: normal(2, 3, 4, 3)),
    "conv3d-kernel-1": (lambda: nn.Conv3d(3, 2, 1), lambda: normal(2, 3, 2, 2, 2)),
}

TRANSPOSED_CASES = {
    "transposed1d": (lambda: nn.ConvTranspose1d(2, 3, 3), lambda: normal(3, 2, 6)),
    "transposed1d-no-bias": (lambda: nn.ConvTranspose1d(2, 3, 3, bias=False), lambda: normal(3, 2, 6)),
    "transposed1d-few-positions": (lambda: nn.ConvTranspose1d(9, 2, 2, padding=1), lambda: normal(2, 9, 4)),
    "transposed1d-stride": (lambda: nn.ConvTranspose1d(3, 2, 4, stride=2, padding=1), lambda: normal(2, 3, 5)),
    "transposed1d-stride-is-kernel": (lambda: nn.ConvTranspose1d(3, 2, 2, stride=2), lambda: normal(2, 3, 4)),
    "transposed1d-stride-beyond-kernel": (
        lambda: nn.ConvTranspose1d(3, 2, 2, stride=5, padding=3),
        lambda: normal(3, 3, 4),
    ),
    "transposed1d-output-padding": (
        lambda: nn.ConvTranspose1d(2, 3, 3, stride=4, padding=1, output_padding=3),
        lambda: normal(2, 2, 4),
    ),
    "transposed1d-dilation": (lambda: nn.ConvTranspose1d(2, 3, 3, dilation=2, padding=1), lambda: normal(2, 2, 5)),
    "transposed1d-dilation-stride": (
        lambda: nn.ConvTranspose1d(2, 2, 4, stride=4, dilation=6, padding=5),
        lambda: normal(2, 2, 4),
    ),
    "transposed1d-groups": (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, groups=2), lambda: normal(2, 4, 4)),
    "transposed1d-unbatched": (lambda: nn.ConvTranspose1d(2, 3, 3, stride=2), lambda: normal(2, 5)),
    "transposed1d-one-pixel": (lambda: nn.ConvTranspose1d(3, 2, 4), lambda: normal(5, 3, 1)),
    "transposed1d-kernel-1": (lambda: nn.ConvTranspose1d(4, 2, 1), lambda: normal(2, 4, 5)),
    "transposed2d": (lambda: nn.ConvTranspose2d(2, 3, 3), lambda: normal(2, 2, 3, 4)),
    "transposed2d-doubling-4": (
        lambda: nn.ConvTranspose2d(2, 3, 4, stride=2, padding=1),
        lambda: normal(1, 2, 3, 4),
    ),
    "transposed2d-doubling-3": (
        lambda: nn.ConvTranspose2d(3, 2, 3, stride=2, padding=1, output_padding=1),
        lambda: normal(1, 3, 3, 4),
    ),
    "transposed2d-few-positions": (lambda: nn.ConvTranspose2d(4, 2, 3, padding=1), lambda: normal(3, 4, 3, 3)),
    "transposed2d-mixed": (
        lambda: nn.ConvTranspose2d(
            2, 4, (3, 2), stride=(3, 2), padding=(2, 1), output_padding=(2, 0), dilation=(2, 3), groups=2
        ),
        lambda: normal(2, 2, 3, 4),
    ),
    "transposed2d-depthwise": (lambda: nn.ConvTranspose2d(3, 6, 3, stride=2, groups=3), lambda: normal(2, 3, 2, 3)),
    "transposed2d-groups-no-bias": (
        lambda: nn.ConvTranspose2d(6, 3, 2, groups=3, padding=1, bias=False),
        lambda: normal(2, 6, 3, 4),
    ),
    "transposed2d-rectified": (lambda: nn.ConvTranspose2d(2, 3, 2, stride=2), lambda: rectified(2, 2, 3, 3)),
    "transposed2d-correlated": (lambda: nn.ConvTranspose2d(2, 3, 3, padding=1), lambda: correlated(3, 2, 3, 3)),
    "transposed2d-unbatched": (lambda: nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1), lambda: normal(2, 3, 4)),
    "transposed2d-channels-last": (
        lambda: nn.ConvTranspose2d(3, 2, 3, padding=1),
        lambda: normal(2, 3, 3, 4).contiguous(memory_format=torch.channels_last),
    ),
    "transposed3d": (lambda: nn.ConvTranspose3d(2, 2, 2), lambda: normal(1, 2, 2, 2, 2)),
    "transposed3d-doubling": (
        lambda: nn.ConvTranspose3d(1, 2, 3, stride=2, padding=1, output_padding=1),
        lambda: normal(1, 1, 2, 2, 2),
    ),
    "transposed3d-mixed": (
        lambda: nn.ConvTranspose3d(
            2, 4, (1, 2, 2), stride=(2, 1, 3), padding=(0, 1, 1), output_padding=(1, 0, 1), dilation=(1, 2, 2), groups=2
        ),
        lambda: normal(1, 2, 2, 3, 2),
    ),
    "transposed3d-unbatched-no-bias": (
        lambda: nn.ConvTranspose3d(2, 2, 2, stride=2, bias=False),
        lambda: normal(2, 1, 2, 2),
    ),
}

CONV_CASES = {**CONV1D_CASES, **CONV2D_CASES, **CONV3D_CASES}
CASES = {**LINEAR_CASES, **CONV_CASES, **TRANSPOSED_CASES}


def build(name, dtype=torch.float64):
    """(module, input) of a case, the same ones at every call."""
    make_module, make_input = CASES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(crc32(name.encode()))
        return make_module().to(dtype), make_input().to(dtype)


def second_moment(layer, x, *, ones):
    """That of the layer's inputs, the library's way."""
    found = []

    def product(operation, inputs):
        found.append(operation.second_moment(inputs, ones=ones))
        return inputs

    kind_of(layer).of(layer).call_product(x, product)
    return found[0]


def random_like(output, name):
    """A deterministic output gradient ΔZ."""
    generator = torch.Generator().manual_seed(crc32(name.encode()) + 1)
    return torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.dtype)


def error_bound(kappa, dtype):
    return 10 * torch.finfo(dtype).eps * kappa


def check_error(actual, expected, kappa, dtype):
    """Relative Frobenius error ≤ 10·eps·κ; where that bound is above 1 only finite numbers can be asked for.

    Returns whether the bound said anything. Callers pass the answers of all their checks to ``skip_if_silent``.
    """
    actual = reference.to_numpy(actual) if isinstance(actual, torch.Tensor) else actual
    bound = error_bound(kappa, dtype)
    error = reference.relative_error(actual, expected)
    assert error < float("inf"), "not finite"
    if bound > 1:
        return False
    assert error <= bound, f"relative error {error:.3g} > {bound:.3g} = 10·eps·κ with κ = {kappa:.3g}"
    return True


def skip_if_silent(told):
    """A check that could say nothing is counted as skipped, for everyone to see."""
    if not told:
        pytest.skip("finite, but 10·eps·κ > 1 says nothing about the error")
