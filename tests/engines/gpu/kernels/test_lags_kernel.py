import random

import pytest
import torch
from by_layer import second_moment
from torch import nn

pytest.importorskip("triton", reason="triton is not installed")

from consequent.engines.gpu.kernels.lag_jobs import cut_up
from consequent.engines.gpu.kernels.lag_turn import turn_around
from consequent.engines.gpu.kernels.lags import lag_moments

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def images(shape, channels_last, dtype=torch.float32, seed=0):
    inputs = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).add_(0.5).to(DEVICE, dtype)
    return inputs.to(memory_format=torch.channels_last) if channels_last else inputs


def rounded(inputs):
    """To TF32, by another way than the kernel's: 10 digits after the leading one, halves away from zero."""
    mantissa, exponent = torch.frexp(inputs.double())
    return torch.ldexp(mantissa.sign() * (mantissa.abs() * 2**11 + 0.5).floor(), exponent - 11)


def expected_moments(inputs, ones):
    layer = nn.Conv2d(inputs[0].shape[1], 1, 3, padding=1)
    return torch.stack([second_moment(layer, images.cpu().double(), ones=ones)[0] for images in inputs])


def assert_close(moments, expected, tolerance):
    assert moments.dtype == torch.float32
    assert moments.shape == expected.shape
    moments = moments.cpu().double()
    assert torch.equal(moments, moments.mT)
    assert (moments - expected).abs().max() <= tolerance * expected.abs().max()


def random_cases(count):
    chance = random.Random(3)
    for number in range(count):
        shape = tuple(chance.randint(1, most) for most in (4, 20, 7, 9))
        yield pytest.param(shape, 1 + number // 2, number % 2 == 0, number % 3 == 0, id=f"{number}-{shape}")


@pytest.mark.parametrize(("shape", "layers", "channels_last", "ones"), list(random_cases(5)))
def test_moments_of_random_shapes(shape, layers, channels_last, ones):
    inputs = [images(shape, channels_last, seed=seed) for seed in range(layers)]
    assert_close(lag_moments(inputs, ones=ones), expected_moments([rounded(x) for x in inputs], ones), 2e-6)


@pytest.mark.parametrize("shape", [(33, 17, 2, 5), (1, 65, 1, 2), (130, 2, 2, 3), (1, 1, 1, 1)], ids=str)
def test_moments_of_many_images_or_channels(shape):
    inputs = [images(shape, channels_last=True)]
    assert_close(lag_moments(inputs, ones=True), expected_moments([rounded(x) for x in inputs], True), 2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_multiplied_as_it_is(dtype):
    inputs = [images((3, 5, 3, 6), True, dtype)]
    assert_close(lag_moments(inputs, ones=True), expected_moments(inputs, True), 2e-6)


def test_views_with_any_strides():
    every = images((4, 9, 7, 10), channels_last=True)
    view = every[1:, 2:7, :, ::2]
    assert not view.is_contiguous(memory_format=torch.channels_last)
    assert_close(lag_moments([view], ones=False), expected_moments([rounded(view)], False), 2e-6)


def test_more_layers_than_one_launch_turns_around():
    inputs = [images((3, 2, 3, 4), False, seed=seed) for seed in range(9)]
    cut = cut_up(inputs[0].shape, 9, True, inputs[0].device)
    turned, sums = turn_around(inputs, cut, True)
    expected = torch.stack([rounded(x.cpu()).permute(2, 3, 1, 0) for x in inputs])
    turned = turned.cpu().double().view(*expected.shape[:-1], cut.images)
    assert torch.equal(turned[..., :3], expected)
    assert not turned[..., 3:].any()
    assert torch.allclose(sums.cpu().double(), expected.sum(-1).flatten())


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_number_that_is_none_shows(value):
    good, bad = images((2, 3, 2, 3), True), images((2, 3, 2, 3), True, seed=1)
    bad[1, 2, 0, 2] = value
    moments = lag_moments([good, bad], ones=False)
    assert moments[0].isfinite().all()
    assert not moments[1].isfinite().all()


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter runs one program after the other")
def test_the_same_bits_every_time():
    inputs = [images((128, 16, 32, 32), True)]
    assert torch.equal(lag_moments(inputs, ones=True), lag_moments(inputs, ones=True))


def test_no_pixels():
    assert not lag_moments([torch.zeros(0, 3, 4, 4, device=DEVICE)] * 2, ones=True).any()


def test_layers_must_be_alike():
    inputs = images((2, 3, 4, 4), True)
    for other in (inputs[:, :2], inputs.contiguous(), inputs.bfloat16()):
        with pytest.raises(ValueError, match="number 1"):
            lag_moments([inputs, other], ones=False)
    with pytest.raises(ValueError, match="no inputs"):
        lag_moments([], ones=False)
    with pytest.raises(TypeError, match="float64"):
        lag_moments([inputs.double()], ones=False)
