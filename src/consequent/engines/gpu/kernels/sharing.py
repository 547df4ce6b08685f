"""Whether a GPU runs kernels of several processes at the same time: NVIDIA's Multi-Process Service, MPS."""

import ctypes
import sys
from functools import lru_cache

__all__ = ["is_shared"]

_MPS_ENABLED = 133  # CU_DEVICE_ATTRIBUTE_MPS_ENABLED, of drivers from CUDA 12.3 on


@lru_cache
def is_shared(index: int) -> bool:
    """Whether kernels of other processes may run beside this one's; False where the driver is too old to tell.

    Args:
        index: of the device, as PyTorch counts.
    """
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return False
    device, value = ctypes.c_int(), ctypes.c_int()
    if driver.cuDeviceGet(ctypes.byref(device), index) != 0:
        return False
    return driver.cuDeviceGetAttribute(ctypes.byref(value), _MPS_ENABLED, device) == 0 and value.value == 1
