"""Random numbers by which a matrix is looked at without being read more than once."""

from functools import cache

import torch
from torch import Tensor

PROBES = 3  # as many as a CPU multiplies by in the time that it takes to read the matrix


@cache  # never forgotten: recorded launches read them
def random_numbers(size: int, dtype: torch.dtype, device: torch.device, family: int) -> Tensor:
    """``[probes, size]``, normally distributed: no two of them are alike, so that nothing cancels out by design.

    Args:
        size: how many for each probe.
        dtype: of the numbers.
        device: where they are wanted.
        family: numbers of different families have nothing to do with each other.
    """
    generator = torch.Generator("cpu").manual_seed(3 * size + family)  # not the user's random numbers
    return torch.randn(PROBES, size, generator=generator, device="cpu", dtype=torch.float64).to(device, dtype)
