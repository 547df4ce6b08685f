"""Transposed convolutions as matrix products, against torch's own layers and against explicit loops."""

import itertools
from math import gcd, prod
from zlib import crc32

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from consequent.layers.transposed_convolution import TransposedConvolution

# name -> (module, shape of its inputs)
CASES = {
    "1d": (lambda: nn.ConvTranspose1d(2, 3, 3), (4, 2, 7)),
    "1d-no-bias": (lambda: nn.ConvTranspose1d(2, 3, 3, bias=False), (4, 2, 7)),
    "1d-stride-is-kernel": (lambda: nn.ConvTranspose1d(3, 2, 2, stride=2), (3, 3, 5)),
    "1d-stride-beyond-kernel": (lambda: nn.ConvTranspose1d(3, 2, 2, stride=5), (3, 3, 4)),
    "1d-stride-beyond-kernel-padding": (lambda: nn.ConvTranspose1d(3, 2, 2, stride=5, padding=3), (3, 3, 4)),
    "1d-padding": (lambda: nn.ConvTranspose1d(2, 3, 4, padding=2), (3, 2, 7)),
    "1d-padding-beyond-kernel": (lambda: nn.ConvTranspose1d(2, 3, 2, stride=3, padding=4), (3, 2, 7)),
    "1d-output-padding": (lambda: nn.ConvTranspose1d(2, 3, 3, stride=4, padding=1, output_padding=3), (2, 2, 4)),
    "1d-output-padding-by-dilation": (lambda: nn.ConvTranspose1d(2, 3, 2, dilation=3, output_padding=2), (2, 2, 4)),
    "1d-dilation": (lambda: nn.ConvTranspose1d(2, 3, 3, dilation=2, padding=1), (2, 2, 5)),
    "1d-dilation-and-stride-coprime": (lambda: nn.ConvTranspose1d(2, 2, 5, stride=3, dilation=2), (2, 2, 4)),
    "1d-dilation-and-stride-share": (lambda: nn.ConvTranspose1d(2, 2, 5, stride=4, dilation=6, padding=5), (2, 2, 4)),
    "1d-dilation-multiple-of-stride": (lambda: nn.ConvTranspose1d(2, 2, 3, stride=2, dilation=4), (2, 2, 4)),
    "1d-groups": (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, groups=2), (3, 4, 5)),
    "1d-unbatched": (lambda: nn.ConvTranspose1d(2, 3, 3, stride=2), (2, 5)),
    "1d-one-pixel": (lambda: nn.ConvTranspose1d(3, 2, 4), (5, 3, 1)),
    "1d-kernel-1": (lambda: nn.ConvTranspose1d(4, 2, 1), (2, 4, 5)),
    "1d-no-pixel-is-met": (lambda: nn.ConvTranspose1d(2, 3, 1, stride=6, padding=2, output_padding=5), (2, 2, 1)),
    "1d-one-output": (lambda: nn.ConvTranspose1d(2, 3, 3, stride=2, padding=1), (4, 2, 1)),
    "1d-no-images": (lambda: nn.ConvTranspose1d(2, 3, 3), (0, 2, 7)),
    "2d": (lambda: nn.ConvTranspose2d(2, 3, 3), (2, 2, 4, 5)),
    "2d-doubling-2": (lambda: nn.ConvTranspose2d(3, 4, 2, stride=2), (2, 3, 3, 4)),
    "2d-doubling-4": (lambda: nn.ConvTranspose2d(3, 2, 4, stride=2, padding=1), (2, 3, 4, 5)),
    "2d-doubling-3": (lambda: nn.ConvTranspose2d(3, 2, 3, stride=2, padding=1, output_padding=1), (2, 3, 4, 5)),
    "2d-same-size": (lambda: nn.ConvTranspose2d(2, 3, 3, padding=1), (3, 2, 6, 5)),
    "2d-many-channels": (lambda: nn.ConvTranspose2d(16, 2, 3, padding=1), (3, 16, 9, 9)),
    "2d-rectangular": (lambda: nn.ConvTranspose2d(2, 3, (2, 3), padding=(0, 1), stride=(1, 2)), (2, 2, 4, 3)),
    "2d-mixed": (
        lambda: nn.ConvTranspose2d(
            4, 6, (3, 4), stride=(3, 2), padding=(2, 1), output_padding=(2, 0), dilation=(2, 3), groups=2
        ),
        (2, 4, 3, 4),
    ),
    "2d-depthwise": (lambda: nn.ConvTranspose2d(3, 3, 3, stride=2, groups=3), (2, 3, 3, 4)),
    "2d-depthwise-multiplier": (lambda: nn.ConvTranspose2d(3, 6, 3, stride=2, groups=3), (2, 3, 3, 4)),
    "2d-groups-no-bias": (lambda: nn.ConvTranspose2d(6, 3, 2, groups=3, padding=1, bias=False), (2, 6, 3, 4)),
    "2d-cropped": (lambda: nn.ConvTranspose2d(2, 2, (1, 2), stride=(1, 3), padding=2), (2, 2, 6, 5)),
    "2d-unbatched": (lambda: nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1), (2, 4, 5)),
    "2d-kernel-1-stride": (lambda: nn.ConvTranspose2d(3, 2, 1, stride=2), (2, 3, 3, 4)),
    "3d": (lambda: nn.ConvTranspose3d(2, 2, 2), (2, 2, 2, 3, 2)),
    "3d-doubling": (lambda: nn.ConvTranspose3d(2, 2, 3, stride=2, padding=1, output_padding=1), (1, 2, 2, 2, 3)),
    "3d-mixed": (
        lambda: nn.ConvTranspose3d(
            2, 4, (1, 2, 3), stride=(2, 1, 3), padding=(0, 1, 2), output_padding=(1, 0, 1), dilation=(1, 2, 2), groups=2
        ),
        (2, 2, 2, 3, 3),
    ),
    "3d-unbatched": (lambda: nn.ConvTranspose3d(2, 2, 2, stride=2), (2, 2, 3, 2)),
}


def build(name, dtype=torch.float64):
    """(module, inputs) of a case, the same ones at every call."""
    make_module, shape = CASES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(crc32(name.encode()))
        return make_module().to(dtype), torch.randn(*shape, dtype=torch.float64).to(dtype)


def called(module, inputs, *args):
    call = TransposedConvolution.of(module).canonical(inputs, *args)
    assert call is not None
    return call


def naive_rows(module, inputs):
    """x̃ as ``[groups, images · positions, channels · taps]``: one number after the other, by the formula."""
    dims = len(module.kernel_size)
    images = (inputs if inputs.ndim == dims + 2 else inputs[None]).numpy()
    space = module(inputs).shape[-dims:]
    per_group = images.shape[1] // module.groups
    taps = list(itertools.product(*map(range, module.kernel_size)))
    rows = np.zeros((module.groups, images.shape[0], prod(space), per_group, len(taps)))
    for position, q in enumerate(itertools.product(*map(range, space))):
        for tap, k in enumerate(taps):
            numerators = [q[i] + module.padding[i] - k[i] * module.dilation[i] for i in range(dims)]
            if any(n % s for n, s in zip(numerators, module.stride, strict=True)):
                continue
            p = tuple(n // s for n, s in zip(numerators, module.stride, strict=True))
            if any(not 0 <= p[i] < images.shape[2 + i] for i in range(dims)):
                continue
            for image in range(images.shape[0]):
                for channel in range(images.shape[1]):
                    group, within = divmod(channel, per_group)
                    rows[group, image, position, within, tap] = images[(image, channel, *p)]
    return torch.from_numpy(rows.reshape(module.groups, -1, per_group * len(taps)))


def naive_weight_matrix(module):
    channels, outputs, *taps = module.weight.shape
    weight = module.weight.detach().reshape(channels, outputs, -1).numpy()
    per_group = channels // module.groups
    matrix = np.zeros((module.groups, outputs, per_group, prod(taps)))
    for channel, output, tap in np.ndindex(*weight.shape):
        matrix[channel // per_group, output, channel % per_group, tap] = weight[channel, output, tap]
    return torch.from_numpy(matrix.reshape(module.groups, outputs, -1))


def with_column_of_ones(rows):
    return torch.cat([rows, rows.new_ones(*rows.shape[:-1], 1)], dim=-1)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_apply_is_the_layers_forward(name, dtype):
    module, inputs = build(name, dtype)
    call = called(module, inputs)
    outputs = call.operation.apply(call.inputs, module.weight, module.bias)
    expected = module(inputs)
    assert torch.equal(outputs if call.output_shape is None else outputs.reshape(call.output_shape), expected)
    assert call.samples == (inputs.shape[0] if inputs.ndim == len(module.kernel_size) + 2 else 1)
    assert call.operation.rows(outputs) == call.operation.output_rows(outputs).shape[1]


@pytest.mark.parametrize("name", CASES)
def test_rows_are_the_formulas(name):
    module, inputs = build(name)
    call = called(module, inputs)
    assert torch.equal(call.operation.input_rows(call.inputs), naive_rows(module, inputs))
    assert torch.equal(call.operation.weight_matrix(module.weight), naive_weight_matrix(module))


@pytest.mark.parametrize("name", CASES)
def test_outputs_are_the_product_of_the_matrices(name):
    module, inputs = build(name)
    call = called(module, inputs)
    outputs = call.operation.output_rows(call.operation.apply(call.inputs, module.weight, None))
    product = call.operation.input_rows(call.inputs) @ call.operation.weight_matrix(module.weight).mT
    close(outputs, product)
    assert product.shape[-1] * call.operation.groups == call.operation.outputs
    assert product.shape[1] == 0 or outputs.abs().max() > 0 or name == "1d-no-pixel-is-met"


@pytest.mark.parametrize("name", CASES)
def test_weight_matrix_and_shaped_like_weight_are_inverse(name):
    module, inputs = build(name)
    operation = called(module, inputs).operation
    matrix = operation.weight_matrix(module.weight)
    assert matrix.shape == (module.groups, operation.outputs // module.groups, operation.features)
    assert torch.equal(operation.shaped_like_weight(matrix), module.weight)
    assert torch.equal(operation.shaped_like_weight(matrix[:, :1]), module.weight[:, :1])


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_autograds(name):
    module, inputs = build(name)
    call = called(module, inputs.requires_grad_())
    outputs = module(inputs)
    output_grad = torch.randn_like(outputs)
    outputs.backward(output_grad)
    canonical_grad = output_grad if call.output_shape is None else output_grad[None]
    close(call.operation.weight_gradient(call.inputs, canonical_grad), module.weight.grad)
    input_grad = call.operation.input_gradient(canonical_grad, module.weight, call.inputs)
    close(input_grad.reshape(inputs.shape), inputs.grad)
    has_bias = module.bias is not None
    together = call.operation.gradients(canonical_grad, call.inputs, module.weight, with_bias=has_bias)
    close(together[0], input_grad)
    close(together[1], module.weight.grad)
    if has_bias:
        close(together[2], module.bias.grad)
        close(call.operation.bias_gradient(canonical_grad), module.bias.grad)
    rows = naive_rows(module, inputs.detach())
    product = call.operation.output_rows(canonical_grad).mT @ rows  # ΔZ Xᵀ
    close(call.operation.weight_matrix(module.weight.grad), product)


@pytest.mark.parametrize("name", ["1d-dilation-and-stride-share", "2d-mixed", "3d-doubling"])
def test_gradients_can_be_differentiated(name):
    module, inputs = build(name)
    call = called(module, inputs)
    images = call.inputs.requires_grad_()
    weight = module.weight
    output_grad = torch.randn_like(call.operation.apply(images, weight, None)).requires_grad_()
    pass_back = call.operation.input_gradient
    assert torch.autograd.gradcheck(lambda dz, w: pass_back(dz, w, images), (output_grad, weight), fast_mode=True)
    assert torch.autograd.gradcheck(call.operation.weight_gradient, (images, output_grad), fast_mode=True)


@pytest.mark.parametrize("ones", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_second_moment_is_the_sum_over_rows(name, dtype, ones):
    module, inputs = build(name, dtype)
    call = called(module, inputs)
    moment = call.operation.second_moment(call.inputs, ones=ones)
    rows = naive_rows(build(name)[0], inputs.double())
    rows = with_column_of_ones(rows) if ones else rows
    expected = rows.mT @ rows
    assert moment.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert moment.shape == expected.shape
    error = (moment.double() - expected).abs().max()
    assert error <= 10 * torch.finfo(moment.dtype).eps * expected.abs().max()


def test_second_moment_of_random_geometries():
    generator = np.random.default_rng(0)
    tried = 0
    while tried < 60:
        k, s, d = (int(n) for n in generator.integers(1, 6, size=3))
        padding, more, size = int(generator.integers(0, 8)), int(generator.integers(0, max(s, d))), 1 + tried % 6
        if (size - 1) * s - 2 * padding + d * (k - 1) + more + 1 <= 0:
            continue
        module = nn.ConvTranspose1d(2, 1, k, s, padding, more, dilation=d).double()
        inputs = torch.from_numpy(generator.standard_normal((2, 2, size)))
        call = called(module, inputs)
        rows = naive_rows(module, inputs)
        assert torch.equal(call.operation.input_rows(inputs), rows)
        rows = with_column_of_ones(rows)
        close(call.operation.second_moment(inputs, ones=True), rows.mT @ rows)
        tried += 1


@pytest.mark.parametrize("name", CASES)
def test_transposed_norm_is_a_bound(name):
    module, inputs = build(name)
    call = called(module, inputs)
    output_grad = torch.randn_like(call.operation.apply(call.inputs, module.weight, None))
    bound = call.operation.transposed_norm(output_grad)
    for change in (torch.randn_like(module.weight), call.operation.weight_gradient(call.inputs, output_grad)):
        effect = call.operation.input_gradient(output_grad, change, call.inputs)
        assert effect.square().sum() <= bound * change.square().sum() * (1 + 1e-12)


@pytest.mark.parametrize(("stride", "dilation"), [(1, 1), (2, 1), (2, 2), (4, 2), (3, 2)])
def test_transposed_norm_is_all_but_reached(stride, dilation):
    """Of a long input, when everything is alike."""
    module = nn.ConvTranspose1d(1, 1, 12, stride=stride, dilation=dilation).double()
    call = called(module, torch.ones(1, 1, 5000, dtype=torch.float64))
    space = call.operation.output_space([5000])
    met = torch.arange(space[0]) % gcd(stride, dilation) == 0  # at other positions no tap meets a pixel
    output_grad = met.double().view(1, 1, -1)
    change = torch.ones(1, 1, 12, dtype=torch.float64)
    ratio = call.operation.input_gradient(output_grad, change, call.inputs).square().sum()
    ratio /= call.operation.transposed_norm(output_grad) * change.square().sum()
    assert 0.99 < ratio <= 1


@pytest.mark.parametrize("ones", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_interference_is_summed_over_positions(name, ones):
    module, inputs = build(name)
    call = called(module, inputs)
    rows = naive_rows(module, inputs)
    rows = torch.cat([*rows, rows.new_ones(rows.shape[1], 1)], dim=-1) if ones else torch.cat([*rows], dim=-1)
    per_sample = rows.reshape(call.samples, rows.numel() // max(call.samples, 1))
    close(call.operation.interference(call.inputs, call.samples, ones=ones), per_sample @ per_sample.T)


@pytest.mark.parametrize(
    ("name", "output_size"),
    [
        ("1d-output-padding", [14]),
        ("1d-output-padding", [13]),
        ("1d-output-padding", [2, 3, 15]),
        ("1d-unbatched", [12]),
        ("1d-unbatched", [3, 12]),
        ("2d-doubling-3", [8, 9]),
        ("2d-doubling-3", [2, 2, 7, 10]),
        ("3d-doubling", torch.Size([4, 3, 6])),
    ],
)
def test_output_size_is_followed(name, output_size):
    module, inputs = build(name)
    expected = module(inputs, output_size)
    call = called(module, inputs, output_size)
    outputs = call.operation.apply(call.inputs, module.weight, module.bias)
    assert torch.equal(outputs.reshape(expected.shape), expected)
    assert call.output_shape in (None, expected.shape)
    rows = call.operation.input_rows(call.inputs)
    close(call.operation.second_moment(call.inputs, ones=False), rows.mT @ rows)


@pytest.mark.parametrize("output_size", [[12], [17], [3, 14], [2, 2, 2, 14]])
def test_output_sizes_that_torch_refuses_are_not_canonical(output_size):
    module, inputs = build("1d-output-padding")
    with pytest.raises(ValueError, match="output"):
        module(inputs, output_size)
    assert TransposedConvolution.of(module).canonical(inputs, output_size) is None


def test_calls_with_an_output_size_stay_plain():
    module, inputs = build("1d-output-padding")
    operation = TransposedConvolution.of(module)
    for args, kwargs in (((inputs,), {}), ((inputs, None), {}), ((), {"input": inputs, "output_size": None})):
        assert operation.inputs_in(args, kwargs) is inputs
    assert operation.inputs_in((inputs, [14]), {}) is None
    assert operation.inputs_in((inputs,), {"output_size": [14]}) is None


def test_inputs_that_torch_refuses_are_not_canonical():
    operation = TransposedConvolution.of(nn.ConvTranspose1d(2, 3, 2, padding=4))
    assert operation.canonical(torch.randn(3, 2, 7)) is None  # no outputs
    assert operation.canonical(torch.randn(7)) is None
    assert operation.canonical(torch.randn(1, 3, 2, 70)) is None


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("2d")])
def test_calls_of_the_function_are_recognised(name):
    module, inputs = build(name)
    other = TransposedConvolution.of(type(module)(*module.weight.shape[:2], module.kernel_size))  # another geometry
    operation = other if module.groups == 1 else TransposedConvolution.of(module)
    positional = (inputs, module.weight, module.bias, module.stride, module.padding, module.output_padding)
    positional = (*positional, module.groups, module.dilation)
    for call in (
        operation.product_called(F.conv_transpose2d, positional, {}),
        operation.product_called(
            F.conv_transpose2d,
            (inputs, module.weight),
            {
                "dilation": module.dilation,
                "groups": module.groups,
                "output_padding": list(module.output_padding),
                "padding": module.padding,
                "stride": module.stride,
            },
        ),
    ):
        outputs = call.operation.apply(call.inputs, module.weight, module.bias)
        assert torch.equal(outputs.reshape(module(inputs).shape), module(inputs))
    assert operation.product_called(F.conv2d, positional, {}) is None
    assert operation.product_called(F.conv_transpose1d, positional, {}) is None


def test_calls_of_the_function_have_its_defaults():
    module, inputs = build("2d-doubling-4")
    call = TransposedConvolution.of(module).product_called(F.conv_transpose2d, (inputs, module.weight), {"stride": 2})
    outputs = call.operation.apply(call.inputs, module.weight, None)
    assert torch.equal(outputs, F.conv_transpose2d(inputs, module.weight, stride=2))


def test_other_groups_are_another_product():
    module, inputs = build("2d-groups-no-bias")
    assert TransposedConvolution.of(module).product_called(F.conv_transpose2d, (inputs, module.weight), {}) is None


@pytest.mark.parametrize("setting", ["stride", "padding", "output_padding", "dilation"])
def test_changed_settings_are_seen(setting):
    module, _ = build("2d-mixed")
    operation = TransposedConvolution.of(module)
    assert operation.is_current(module)
    setattr(module, setting, (1, 1))
    assert not operation.is_current(module)
    assert TransposedConvolution.of(module).is_current(module)


def test_taps_that_never_meet_are_not_multiplied():
    """A 4 × 4 kernel with stride 2 is four 2 × 2 kernels: of 256 blocks for pairs of taps, 64 are not zero."""
    module, inputs = build("2d-doubling-4")
    moment = called(module, inputs).operation.second_moment(inputs, ones=False)
    assert (moment != 0).sum() == 3 * 3 * 64


def test_sharing_a_weight_needs_the_same_shape():
    first, second = (TransposedConvolution.of(build(name)[0]) for name in ("2d-doubling-4", "2d-doubling-3"))
    assert first.shape != second.shape
    assert first.shape == called(*build("2d-doubling-4")).operation.shape
