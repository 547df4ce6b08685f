import pytest
import torch
from by_layer import second_moment
from torch import nn

pytest.importorskip("triton", reason="triton is not installed")

from consequent.engines.gpu.kernels.moment import patch_moment

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = DEVICE == "cpu"

# channels, height, width, kernel, stride, padding, dilation, ones
CONVOLUTIONS = [
    (3, 8, 8, (3, 3), (1, 1), (1, 1), (1, 1), True),
    (8, 5, 7, (3, 3), (1, 1), (1, 1), (1, 1), False),
    (5, 9, 7, (3, 2), (2, 1), (2, 0), (1, 2), True),
    (4, 9, 8, (3, 3), (2, 2), (1, 1), (1, 1), True),
    (7, 6, 6, (1, 1), (1, 1), (0, 0), (1, 1), True),
    (2, 11, 10, (3, 3), (1, 2), (2, 2), (2, 2), False),
    (1, 4, 4, (5, 5), (1, 1), (2, 2), (1, 1), True),
    (1, 1, 1, (1, 1), (1, 1), (0, 0), (1, 1), False),
]


def images(shape, layout, dtype=torch.float32):
    generator = torch.Generator().manual_seed(sum(shape))
    if layout == "strided":
        count, channels, height, width = shape
        every = torch.randn(height + 1, count, 2 * width, channels + 2, generator=generator)
        view = every.to(DEVICE, dtype).permute(1, 3, 0, 2)[:, 1:-1, 1:, ::2]
        assert view.shape == shape
        return view
    inputs = torch.randn(shape, generator=generator).add_(0.5).to(DEVICE, dtype)
    return inputs.to(memory_format=torch.channels_last) if layout == "channels_last" else inputs


def expected_moment(inputs, kernel, stride, padding, dilation, ones):
    layer = nn.Conv2d(inputs.shape[1], 1, kernel, stride, padding, dilation)
    return second_moment(layer, inputs.cpu().double(), ones=ones)[0]


def assert_close(moment, expected, tolerance):
    assert moment.dtype == torch.float32
    assert moment.shape == expected.shape
    moment = moment.cpu().double()
    assert torch.equal(moment, moment.T)
    assert (moment - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("case", CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "strided"])
def test_moment_of_patches(case, layout):
    channels, height, width, *convolution, ones = case
    inputs = images((3, channels, height, width), layout)
    moment = patch_moment(inputs, *convolution, ones=ones, precision="ieee")
    assert_close(moment, expected_moment(inputs, *convolution, ones), 1e-6)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_moment_of_several_tiles_and_splits(layout):
    inputs = images((4, 9, 8, 8), layout)  # 82 features: three tiles
    moment = patch_moment(inputs, (3, 3), (1, 1), (1, 1), (1, 1), ones=True, precision="ieee")
    assert_close(moment, expected_moment(inputs, (3, 3), (1, 1), (1, 1), (1, 1), True), 1e-6)


@pytest.mark.skipif(INTERPRETED, reason="too many programs for the interpreter")
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("channels", [16, 40])
def test_moment_of_large_images(channels, layout):
    inputs = images((16, channels, 32, 30), layout)
    ones, twos = (1, 1), (2, 2)
    expected = expected_moment(inputs, (3, 3), ones, ones, ones, True)
    for precision, tolerance in (("tf32x3", 1e-5), ("tf32", 3e-3)):
        moment = patch_moment(inputs, (3, 3), ones, ones, ones, ones=True, precision=precision)
        assert_close(moment, expected, tolerance)
    moment = patch_moment(inputs, (3, 3), twos, ones, ones, ones=True)
    assert_close(moment, expected_moment(inputs, (3, 3), twos, ones, ones, True), 3e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_inputs_of_half_the_size_are_summed_in_float32(dtype):
    inputs = images((4, 5, 8, 8), "channels_last", dtype)
    expected = expected_moment(inputs, (3, 3), (1, 1), (1, 1), (1, 1), True)
    assert_close(patch_moment(inputs, (3, 3), (1, 1), (1, 1), (1, 1), ones=True), expected, 1e-5)


def test_constant_features_leave_a_positive_semi_definite_moment():
    """The ones and the features must be rounded alike, or features that hardly vary get a negative variance."""
    noise = images((4, 2, 8, 8), "contiguous")
    inputs = 1.2345 + 1e-4 * noise
    moment = patch_moment(inputs, (3, 3), (1, 1), (1, 1), (1, 1), ones=True)
    eigenvalues = torch.linalg.eigvalsh(moment.cpu().double())
    assert eigenvalues[0] >= -1e-5 * eigenvalues[-1]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in the interpreter
def test_what_is_not_finite_is_seen_on_the_diagonal():
    for bad in (float("nan"), float("inf")):
        inputs = images((2, 3, 4, 4), "contiguous")
        inputs[1, 2, 3, 3] = bad
        moment = patch_moment(inputs, (3, 3), (1, 1), (1, 1), (1, 1), ones=True)
        assert not moment.trace().isfinite()


def test_no_images_give_zeros():
    empty = torch.empty(0, 3, 4, 4, device=DEVICE)
    assert torch.equal(patch_moment(empty, (3, 3), (1, 1), (1, 1), (1, 1), ones=True).cpu(), torch.zeros(28, 28))


def test_bad_arguments_are_refused():
    inputs = images((2, 3, 4, 4), "contiguous")
    with pytest.raises(TypeError, match="float64"):
        patch_moment(inputs.double(), (3, 3), (1, 1), (1, 1), (1, 1), ones=True)
    with pytest.raises(ValueError, match="precision must be one of"):
        patch_moment(inputs, (3, 3), (1, 1), (1, 1), (1, 1), ones=True, precision="fp8")
    with pytest.raises(ValueError, match="dimensions"):
        patch_moment(inputs[0], (3, 3), (1, 1), (1, 1), (1, 1), ones=True)
    with pytest.raises(ValueError, match="does not fit"):
        patch_moment(inputs, (7, 3), (1, 1), (1, 1), (1, 1), ones=True)
    with pytest.raises(ValueError, match="no such convolution"):
        patch_moment(inputs, (3, 3), (0, 1), (1, 1), (1, 1), ones=True)
    many = torch.zeros(1, 1, 1, 1, device=DEVICE).expand(2**31, 1, 1, 1)
    with pytest.raises(ValueError, match="32 bits"):
        patch_moment(many, (1, 1), (1, 1), (0, 0), (1, 1), ones=True)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_offsets_beyond_32_bits(layout):
    """Images that lie far apart in memory, of which nothing in between is touched; one step still fits into 32 bits."""
    distance = 2**30 + 64
    memory = torch.empty(2 * distance + 64, dtype=torch.float16, device=DEVICE)
    strides = (distance, 16, 4, 1) if layout == "contiguous" else (distance, 1, 16, 4)
    inputs = memory.as_strided((3, 4, 4, 4), strides)
    inputs.copy_(images((3, 4, 4, 4), "contiguous"))
    expected = expected_moment(inputs, (3, 3), (1, 1), (1, 1), (1, 1), True)
    assert_close(patch_moment(inputs, (3, 3), (1, 1), (1, 1), (1, 1), ones=True), expected, 1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
def test_capture_and_repetition():
    inputs = images((32, 16, 16, 16), "channels_last")
    moment = patch_moment(inputs, (3, 3), (1, 1), (1, 1), (1, 1), ones=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = patch_moment(inputs, (3, 3), (1, 1), (1, 1), (1, 1), ones=True)
    graph.replay()
    assert torch.equal(moment, again)
