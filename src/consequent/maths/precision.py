"""In which precision to compute, and whether the host may look at the numbers."""

import torch
from torch import Tensor


def at_least_float32(tensor: Tensor) -> Tensor:
    """The tensor in float32, or as it is if that is better."""
    return tensor if tensor.dtype.itemsize >= 4 else tensor.float()


def may_sync(tensor: Tensor) -> bool:
    """Whether looking at its numbers costs nothing: not on a GPU, which would be waited for, nor while compiling."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()
