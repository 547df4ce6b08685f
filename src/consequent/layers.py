"""How a layer is the matrix product ``Z = W X``: its inputs and outputs as rows of matrices, its weight as a matrix.

Linear and convolutional layers meet here and nowhere else. (So does the ``Conv1D`` of transformers, from which GPT-2 is
made: a Linear layer whose weight lies the other way round, ``[features, out_features]``.) Everything is laid out per
group (``groups`` of a convolution; 1 otherwise), since each group is a matrix product of its own:

=============  ===============================  =============================================================
inputs         ``[groups, rows, features]``     a row per sample (times position, times token)
outputs        ``[groups, rows, out_features]`` in the same order of rows
weight         ``[groups, out_features, features]``
=============  ===============================  =============================================================
"""

from math import prod
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from consequent.patches import pad_sides, patch_rows, positions

if TYPE_CHECKING:
    from typing_extensions import TypeIs

Layer = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
LAYER_TYPES = (nn.Linear, *_CONVOLUTIONS)


def kind_of(module: nn.Module) -> type[nn.Module] | None:
    """The class that says how the module is a matrix product; None if it is none."""
    return next((kind for kind in type(module).__mro__ if kind in LAYER_TYPES or _is_conv1d(kind)), None)


def is_layer(module: nn.Module) -> "TypeIs[Layer]":
    """Whether it is a matrix product by its class."""
    return kind_of(module) is not None


def overrides_forward(layer: Layer) -> bool:
    """Whether a subclass computes something of its own."""
    kind = kind_of(layer)
    assert kind is not None
    return type(layer).forward is not kind.forward


def is_dense(layer: Layer) -> "TypeIs[nn.Linear]":
    """Whether each row of inputs is a sample's, or a token's, as it is: no convolution."""
    return not isinstance(layer, _CONVOLUTIONS)


def is_transposed(layer: Layer) -> bool:
    """Whether the weight is ``[features, out_features]``."""
    return is_dense(layer) and not isinstance(layer, nn.Linear)


def _is_conv1d(kind: type) -> bool:
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def spatial_dims(layer: Layer) -> int:
    """0 for Linear, otherwise the d of Conv·d."""
    return 0 if is_dense(layer) else len(layer.kernel_size)


def groups(layer: Layer) -> int:
    """Independent matrix products in the layer."""
    return 1 if is_dense(layer) else layer.groups


def features(layer: Layer) -> int:
    """Columns of X per group (D in the paper), the bias's constant 1 not counted."""
    return layer.weight.shape[0] if is_transposed(layer) else prod(layer.weight.shape[1:])


def is_batched(layer: Layer, inputs: Tensor) -> bool:
    """Whether the inputs have a leading sample dimension."""
    return inputs.ndim > spatial_dims(layer) + 1


def as_batch(layer: Layer, tensor: Tensor) -> Tensor:
    """The inputs or outputs with a leading sample dimension."""
    return tensor if is_batched(layer, tensor) else tensor.unsqueeze(0)


def outputs(layer: Layer) -> int:
    """Columns of the layer's output matrix, of all groups together."""
    return layer.weight.shape[1 if is_transposed(layer) else 0]


def input_rows(layer: Layer, inputs: Tensor) -> Tensor:
    """The inputs as ``[groups, rows, features]``; for convolutions the rows are patches."""
    inputs = as_batch(layer, inputs)
    if is_dense(layer):
        return inputs.reshape(1, -1, inputs.shape[-1])
    return patch_rows(pad(layer, inputs), layer.kernel_size, layer.stride, layer.dilation, layer.groups)


def output_rows(layer: Layer, outputs: Tensor) -> Tensor:
    """The outputs, or their gradients, as ``[groups, rows, out_features]``."""
    outputs = as_batch(layer, outputs)
    if is_dense(layer):
        return outputs.reshape(1, -1, outputs.shape[-1])
    per_group: Tensor = outputs.flatten(2).unflatten(1, (layer.groups, -1))  # [images, groups, channels, positions]
    return per_group.permute(1, 0, 3, 2).flatten(1, 2)


def weight_matrix(layer: Layer, weight: Tensor) -> Tensor:
    """The weight, or its gradient, as ``[groups, out_features, features]``."""
    if is_transposed(layer):
        return weight.mT.unsqueeze(0)
    return weight.reshape(groups(layer), -1, features(layer))


def shaped_like_weight(layer: Layer, matrix: Tensor) -> Tensor:
    """The inverse of :func:`weight_matrix`, also for some rows of the weight only."""
    return matrix.squeeze(0).mT if is_transposed(layer) else matrix.reshape(-1, *layer.weight.shape[1:])


def apply(layer: Layer, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What the layer's class does, with the given weight and bias, whatever its own ``forward`` may do."""
    if is_dense(layer):
        return F.linear(inputs, weight.mT if is_transposed(layer) else weight, bias)
    convolve = (F.conv1d, F.conv2d, F.conv3d)[spatial_dims(layer) - 1]
    padded = pad(layer, as_batch(layer, inputs))
    outputs = convolve(padded, weight, bias, layer.stride, 0, layer.dilation, layer.groups)
    return outputs if is_batched(layer, inputs) else outputs.squeeze(0)


def weight_gradient(layer: Layer, inputs: Tensor, output_grad: Tensor) -> Tensor:
    """``ΔZᵀX`` in the shape of the weight, in float32 or better: what backpropagation computes."""
    dtype = torch.promote_types(output_grad.dtype, torch.float32)
    with torch.enable_grad():
        # Its numbers do not matter; a sharded weight's are not even there between forward and backward pass.
        weight = torch.zeros(layer.weight.shape, dtype=dtype, device=inputs.device, requires_grad=True)
        outputs = apply(layer, inputs.to(dtype), weight, None)
    (gradient,) = torch.autograd.grad(outputs, weight, output_grad.to(dtype))
    return gradient


def bias_gradient(layer: Layer, output_grad: Tensor) -> Tensor:
    """The sum of ``ΔZ`` over samples and positions: what backpropagation computes."""
    return output_rows(layer, output_grad.to(torch.promote_types(output_grad.dtype, torch.float32))).sum(1).flatten()


def interference(layer: Layer, inputs: Tensor, *, ones: bool) -> Tensor:
    r"""The samples' correlation matrix ``XᵀX``, one entry per pair of samples.

    For convolutions and sequences, entry ``(a, b)`` is the sum over positions of ``x_a · x_b`` at the same position:
    ``Σₚ x_{a,p} · x_{b,p}``. No positions × positions matrix and no patches are formed: a pixel that is seen by m
    patch entries counts m times.

    Args:
        layer: the layer.
        inputs: its inputs.
        ones: whether the layer has a trained bias, the weight of a constant input 1.
    """
    inputs = as_batch(layer, inputs)
    if is_dense(layer):
        count = prod(inputs.shape[1:-1])
        weighted = inputs
    else:
        inputs = pad(layer, inputs)
        output_size = positions(inputs.shape[2:], layer.kernel_size, layer.stride, layer.dilation)
        count = prod(output_size)
        weighted = inputs
        for dim in range(spatial_dims(layer)):
            seen = inputs.new_zeros(inputs.shape[2 + dim])
            for tap in range(layer.kernel_size[dim]):
                start = tap * layer.dilation[dim]
                seen[start : start + (output_size[dim] - 1) * layer.stride[dim] + 1 : layer.stride[dim]] += 1
            weighted = weighted * seen.view(-1, *[1] * (spatial_dims(layer) - 1 - dim))
    correlations = weighted.flatten(1) @ inputs.flatten(1).T
    return correlations + count if ones else correlations


def padding_sides(layer: Layer) -> list[tuple[int, int]]:
    """The padding before and after the image, in each spatial dimension of a convolution."""
    assert not is_dense(layer)
    if layer.padding == "same":
        totals = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    if layer.padding == "valid":
        return [(0, 0)] * spatial_dims(layer)
    return [(int(p), int(p)) for p in layer.padding]


def pad(layer: Layer, inputs: Tensor) -> Tensor:
    """The convolution's inputs as its kernel sees them: padded as ``padding`` and ``padding_mode`` say."""
    assert not is_dense(layer)
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    return pad_sides(inputs, padding_sides(layer), mode)
