"""Number formats of matrix units, emulated: inputs are rounded, products are added up in float32.

The product of two TF32 or bfloat16 numbers fits a float32 exactly, so a float32 matrix product of rounded inputs does
what the hardware does, up to the order of its additions.
"""

from collections.abc import Callable

import torch
from torch import Tensor

_DROPPED_BITS = 23 - 10  # TF32 keeps 10 of float32's 23 bits after the point, and all of its exponent


def to_tf32(tensor: Tensor) -> Tensor:
    """Returns the nearest TF32 numbers, as float32; ties go away from zero, as in the hardware's conversion.

    >>> to_tf32(torch.tensor([1.0, 1 + 2**-10, 1 + 2**-11, 1 + 2**-12, -(1 + 2**-11)])).sub(1)[:4] * 2**10
    tensor([0., 1., 1., 0.])
    """
    bits = tensor.float().contiguous().view(torch.int32)
    rounded = (bits + (1 << (_DROPPED_BITS - 1))) & -(1 << _DROPPED_BITS)
    return torch.where(tensor.isfinite(), rounded.view(torch.float32), tensor.float())


def to_bfloat16(tensor: Tensor) -> Tensor:
    """Returns the nearest bfloat16 numbers, as float32."""
    return tensor.bfloat16().float()


# How the inputs of a Gram matrix are rounded; the matrix itself is added up in the type that comes out.
FORMATS: dict[str, Callable[[Tensor], Tensor]] = {
    "float64": Tensor.double,  # leaves the error of the solve in float32 alone
    "float32": Tensor.float,
    "tf32": to_tf32,
    "bfloat16": to_bfloat16,
}
