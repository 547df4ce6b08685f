"""Layers as matrix products, one for each group: rows of inputs and outputs, and the weight's matrix."""

import torch
import torch.nn.functional as F  # noqa: N812

CONVOLVE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
CONVOLVE_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def dims_of(layer):
    """Of space; 0 for a dense layer."""
    return len(getattr(layer, "kernel_size", ()))


def is_transposed(layer):
    return getattr(layer, "transposed", False)


def input_matrices(layer, x):
    """The rows that the layer multiplies by its weight: what weights of zeros and a single 1 make of the inputs."""
    dims = dims_of(layer)
    if dims == 0:
        return [x.reshape(-1, x.shape[-1])]
    x = padded(layer, x if x.ndim == dims + 2 else x[None])
    channels = layer.in_channels // layer.groups
    single = torch.eye(channels * torch.Size(layer.kernel_size).numel(), dtype=x.dtype)
    single = single.view(-1, channels, *layer.kernel_size)
    matrices = []
    for group in x.chunk(layer.groups, dim=1):
        if is_transposed(layer):
            more = (layer.padding, layer.output_padding, 1, layer.dilation)
            patches = CONVOLVE_TRANSPOSED[dims](group, single.transpose(0, 1), None, layer.stride, *more)
        else:
            patches = CONVOLVE[dims](group, single, None, layer.stride, 0, layer.dilation)
        matrices.append(patches.flatten(2).transpose(1, 2).flatten(0, 1))
    return matrices


def padded(layer, x):
    if is_transposed(layer):
        return x
    sides = []
    for place, (k, d) in enumerate(zip(layer.kernel_size, layer.dilation, strict=True)):
        before = d * (k - 1) // 2 if layer.padding == "same" else layer.padding[place]
        sides.append((before, d * (k - 1) - before if layer.padding == "same" else before))
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    return F.pad(x, [side for pair in reversed(sides) for side in pair], mode=mode)


def output_matrices(layer, z):
    dims = dims_of(layer)
    if dims == 0:
        return [z.reshape(-1, z.shape[-1])]
    z = z if z.ndim == dims + 2 else z[None]
    return list(z.flatten(2).transpose(1, 2).flatten(0, 1).chunk(layer.groups, dim=1))


def weight_matrices(layer, weight, bias):
    """Gradients as matrices [outputs, features (and 1)]."""
    groups = getattr(layer, "groups", 1)
    parts = [(part.transpose(0, 1) if is_transposed(layer) else part).flatten(1) for part in weight.chunk(groups)]
    if bias is None:
        return parts
    return [torch.cat([part, b[:, None]], 1) for part, b in zip(parts, bias.chunk(groups), strict=True)]


def gradients(layer, matrices, ones):
    """The inverse: gradients of the weight, and of the bias if there is one."""
    parts = [matrix[:, :-1] if ones else matrix for matrix in matrices]
    if is_transposed(layer):
        parts = [part.unflatten(1, (-1, *layer.kernel_size)).transpose(0, 1) for part in parts]
    weight = torch.cat(parts).reshape(layer.weight.shape)
    return [weight, torch.cat([matrix[:, -1] for matrix in matrices])] if ones else [weight]


def with_ones(X, ones=True):
    return torch.cat([X, X.new_ones(len(X), int(ones))], 1)
