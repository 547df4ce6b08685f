"""The two ways to the second moment of a convolution agree with explicit loops, whatever its geometry."""

import numpy as np
import pytest
import reference
import torch
from cases import second_moment
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from consequent.layers import convolution
from consequent.layers.autocorrelation import Window


@st.composite
def convolutions(draw, strides=(1,)):
    dims = draw(st.integers(1, 3))
    groups = draw(st.sampled_from([1, 1, 2]))
    channels = groups * draw(st.integers(1, 3))

    def each(low, high):
        return [draw(st.integers(low, high)) for _ in range(dims)]

    kernel_size, dilation, padding = each(1, 4 if dims < 3 else 2), each(1, 3), each(0, 3)
    mode = draw(st.sampled_from(["zeros", "zeros", "circular", "replicate"]))
    least = [d * (k - 1) + 1 - 2 * p for k, d, p in zip(kernel_size, dilation, padding, strict=True)]
    space = [max(3, size) + extra for size, extra in zip(least, each(0, 4 if dims < 3 else 1), strict=True)]
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    stride = [draw(st.sampled_from(strides)) for _ in range(dims)]
    layer = kind(channels, groups, kernel_size, stride, padding, dilation, groups, padding_mode=mode).double()
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    images = torch.randn(draw(st.integers(1, 3)), channels, *space, generator=generator, dtype=torch.float64)
    if dims == 2 and draw(st.booleans()):
        images = images.contiguous(memory_format=torch.channels_last)
    return layer, images


def expected(layer, images, ones):
    groups = reference.input_rows(layer, images)
    if ones:
        groups = [np.concatenate([rows, np.ones((len(rows), 1))], axis=1) for rows in groups]
    return np.stack([rows.T @ rows for rows in groups])


@pytest.mark.parametrize("by_autocorrelation", [True, False])
@given(case=convolutions(), ones=st.booleans())
@settings(max_examples=60, deadline=None)
def test_stride_one(by_autocorrelation, case, ones):
    layer, images = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convolution, "_autocorrelation_pays", lambda *_: by_autocorrelation)
        actual = second_moment(layer, images, ones=ones)
    wanted = expected(layer, images, ones)
    assert actual.shape == wanted.shape
    assert np.abs(actual.numpy() - wanted).max() <= 1e-12 * np.abs(wanted).max() + 1e-300


@given(case=convolutions(strides=(1, 2, 3)), ones=st.booleans())
@settings(max_examples=60, deadline=None)
def test_other_strides(case, ones):
    layer, images = case
    wanted = expected(layer, images, ones)
    actual = second_moment(layer, images, ones=ones).numpy()
    assert np.abs(actual - wanted).max() <= 1e-12 * np.abs(wanted).max() + 1e-300


def test_patches_are_made_a_few_images_at_a_time(monkeypatch):
    layer, images = nn.Conv2d(3, 1, 3, stride=2).double(), torch.randn(7, 3, 9, 9, dtype=torch.float64)
    whole = second_moment(layer, images, ones=True)
    monkeypatch.setattr("consequent.layers.patches.PATCH_ELEMENTS_AT_ONCE", 1000)
    torch.testing.assert_close(second_moment(layer, images, ones=True), whole)


def test_the_convolutions_of_a_residual_network_take_the_short_way():
    for channels, side in ((16, 32), (32, 16), (64, 8)):
        window = Window((3, 3), (1, 1), ((1, 1), (1, 1)))
        assert convolution._autocorrelation_pays(window, [1, 1], torch.empty(128, channels, side, side))
    assert not convolution._autocorrelation_pays(window, [2, 2], torch.empty(128, 16, 32, 32))
    point = Window((1, 1), (1, 1), ((0, 0), (0, 0)))
    assert not convolution._autocorrelation_pays(point, [1, 1], torch.empty(128, 16, 32, 32))
