"""Launching kernels, and numbers that they read: at little cost for the host."""

import sys
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

_compiled: dict[Any, Any] = {}


def launch(kernel: Any, programs: int, arguments: tuple[Any, ...], constants: tuple[Any, ...], **options: int) -> None:
    """Launch a kernel; from the second time on without Triton's look at every argument, which takes the host longer.

    Args:
        kernel: its constants are its last parameters, and it is compiled alike for all arguments.
        programs: how many there are.
        arguments: tensors, and numbers that are not specialised on; a tensor first.
        constants: what the kernel is compiled for.
        options: how it is compiled.
    """
    key = (kernel, arguments[0].device, constants)
    known = _compiled.get(key)
    if known is None or not _takes_constants():
        _compiled[key] = kernel[(programs,)](*arguments, *constants, **options)
    else:
        known[(programs, 1, 1)](*arguments, *constants)


def on_device(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers of the host, there, without waiting for it.

    What a CUDA graph copies from the host it would copy again at each replay, from memory that is another's by then. So
    while one is captured, numbers come as arguments of launches.
    """
    table = torch.tensor(values, dtype=dtype)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return by_launches(table, device)
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table.to(device)


@cache
def _takes_constants() -> bool:
    """Whether what has been compiled is launched with all arguments, as since Triton 3.3."""
    from triton import __version__

    return tuple(int(part) for part in __version__.split(".")[:2]) >= (3, 3)


@lru_cache(maxsize=256)
def index_of(places: tuple[int, ...], device: torch.device) -> Tensor:
    """Places as a tensor: they are the same at most steps."""
    return on_device(places, torch.int64, device)


class Addresses:
    """Tables of addresses. Memory is reused, so that from the second step on they are known."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, addresses: Sequence[int], device: torch.device) -> Tensor:
        """The addresses on the device."""
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return on_device(addresses, torch.int64, device)  # a graph has memory of its own
        key = tuple(addresses)
        table = self._known.get(key)
        if table is None:
            if len(self._known) >= 64:
                self._known.clear()
            table = self._known[key] = on_device(key, torch.int64, device)
        return table


def by_launches(table: Tensor, device: torch.device) -> Tensor:
    """A table of the host on the device, where it comes as arguments of launches, eight bytes each."""
    from consequent.gpu.table_kernels import AT_ONCE, fill

    content = bytes(table.contiguous().view(torch.uint8).flatten().tolist()) if table.numel() else b""
    padded = content + bytes(-len(content) % 8)
    numbers = [int.from_bytes(padded[at : at + 8], sys.byteorder, signed=True) for at in range(0, len(padded), 8)]
    count = -(-len(numbers) // AT_ONCE) * AT_ONCE
    filled = torch.empty(count, dtype=torch.int64, device=device)
    for place in range(0, count, AT_ONCE):
        eight = [*numbers[place : place + AT_ONCE], *[0] * AT_ONCE][:AT_ONCE]
        fill[(1,)](filled, place, *eight)
    return filled.view(table.dtype)[: table.numel()].view(table.shape)


@cache
def has_triton() -> bool:
    """Whether Triton is there."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def takes(tensor: Tensor) -> bool:
    """Whether kernels take the tensor: in float32, on a GPU with Triton."""
    return tensor.dtype is torch.float32 and is_on_gpu(tensor) and has_triton()


def is_in_reach(tensor: Tensor) -> bool:
    """Whether kernels run where the tensor is."""
    return is_on_gpu(tensor) and has_triton()


def is_dense(tensor: Tensor) -> bool:
    """Whether its numbers lie together in memory, in a usual order."""
    return tensor.is_contiguous() or (tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last))


def is_on_gpu(tensor: Tensor) -> bool:
    """Whether it lies on one."""
    return tensor.is_cuda


def precision() -> str:
    """In which products of float32 are computed: as the user allows torch to."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3"
