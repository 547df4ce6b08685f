"""Triton kernels that take the place of many small torch calls on a GPU; the plain-torch form is their reference."""

from functools import lru_cache
from importlib.util import find_spec

import torch


def run_on(device: torch.device) -> bool:
    """Whether there are kernels for this device; otherwise the plain-torch form does the same, more slowly."""
    return device.type == "cuda" and _run_on_gpu(device.index or 0)


@lru_cache
def _run_on_gpu(index: int) -> bool:
    # Triton comes with torch's CUDA builds, not everywhere. From Ampere on there are TF32 products.
    is_nvidia = torch.version.cuda is not None
    return is_nvidia and find_spec("triton") is not None and torch.cuda.get_device_capability(index) >= (8, 0)
