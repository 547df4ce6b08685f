"""From a layer's input to its second moment ``Σ x xᵀ``: all that the feature side needs to know of the inputs."""

import torch
from torch import Tensor

from consequent.layers import Layer, features, groups, input_row_chunks

__all__ = ["second_moment"]


def second_moment(layer: Layer, inputs: Tensor, *, ones: bool) -> Tensor:
    r"""``Σ x xᵀ`` over the rows of the layer's input matrix (``X Xᵀ`` in the paper's orientation).

    Args:
        layer: a Linear or convolutional layer.
        inputs: its inputs, of any leading shape.
        ones: whether every row gets a last entry 1, whose weight is the bias.

    Returns:
        ``[groups, D, D]``, or ``[groups, D + 1, D + 1]`` with ``ones``, in float32 or better.

    Example:
        >>> import torch
        >>> second_moment(torch.nn.Linear(2, 1), torch.tensor([[1.0, 2.0], [0.0, 3.0]]), ones=True)
        tensor([[[ 1.,  2.,  1.],
                 [ 2., 13.,  5.],
                 [ 1.,  5.,  2.]]])
    """
    dtype = torch.promote_types(inputs.dtype, torch.float32)
    size = features(layer)
    moment = torch.zeros(groups(layer), size + ones, size + ones, dtype=dtype, device=inputs.device)
    for chunk in input_row_chunks(layer, inputs):
        rows = chunk.to(dtype)
        moment[:, :size, :size] += rows.mT @ rows
        if ones:
            sums = rows.sum(-2)
            moment[:, :size, size] += sums
            moment[:, size, :size] += sums
            moment[:, size, size] += rows.shape[-2]
    return moment
