# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""A table of integers on the device, written without waiting for it.

One launch can serve all layers of a model if it finds their addresses and sizes in such a table. It is copied from
pinned memory, except in a CUDA graph: there the source would have to stay alive and unchanged for as long as the graph
does, whereas the arguments of a kernel travel with its launch, and the graph keeps them.
"""

import linecache
import struct
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["device_guard", "device_table", "float_pair", "int_pair"]

_STEP, _LARGEST = 16, 256  # integers per launch: a launch may carry 4 KB of arguments
_last_tables: dict[tuple[str, int, int], tuple[list[int], Tensor]] = {}


def device_table(values: Sequence[int], device: torch.device | str, *, key: str = "") -> Tensor:
    """The integers as an int64 tensor on the device; never waits for it, and may be captured in a CUDA graph.

    Args:
        values: any integers of 64 bits, such as addresses; the table does not keep alive what they point to.
        device: where the table is wanted.
        key: whose table it is. The last one of every key is kept, and returned again for the same values.
    """
    device = torch.device(device)
    wanted = list(values)
    if device.type == "cpu":  # Triton's interpreter
        return torch.tensor(wanted, dtype=torch.int64, device="cpu")
    if torch.cuda.is_current_stream_capturing():
        return _written(wanted, device)  # a graph owns its memory, and its launches have not run yet: not to be shared
    place = (key, *_stream_of(device))
    last = _last_tables.get(place)
    if last is not None and last[0] == wanted:
        return last[1]
    # The allocator of pinned memory keeps the source until the copy is done.
    table = torch.tensor(wanted, dtype=torch.int64, device="cpu", pin_memory=True).to(device, non_blocking=True)
    _last_tables[place] = (wanted, table)
    return table


def int_pair(low: int, high: int) -> int:
    """Two integers of at most 31 bits in one entry of a table; :func:`low_int` and :func:`high_int` take them out."""
    return low | high << 32


def float_pair(low: float, high: float) -> int:
    """Two float32 in one entry of a table; :func:`low_float` and :func:`high_float` take them out."""
    packed: int = _INT64.unpack(_TWO_FLOATS.pack(low, high))[0]
    return packed


def device_guard(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the tensors'."""
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return nullcontext()
    return torch.cuda.device(device)


_INT64, _TWO_FLOATS = struct.Struct("<q"), struct.Struct("<2f")


def _stream_of(device: torch.device) -> tuple[int, int]:
    """A table is ready for launches on the stream that wrote it, and for no others."""
    stream = torch.cuda.current_stream(device)
    return stream.device_index, stream.cuda_stream


def _written(values: list[int], device: torch.device) -> Tensor:
    padded = values + [0] * (-len(values) % _STEP)
    table = torch.empty(len(padded), dtype=torch.int64, device=device)
    with device_guard(table.device):
        for start in range(0, len(padded), _LARGEST):
            _write(table, start, padded[start : start + _LARGEST])
    return table[: len(values)]


def _write(table: Tensor, start: int, values: list[int]) -> None:
    """A compiled kernel is called as it is: to look it up, Triton would look at every argument."""
    place = (len(values), table.get_device())
    kernel = _compiled.get(place)
    if kernel is None:
        _compiled[place] = _writer(len(values))[(1,)](table, start, *values, num_warps=1)
    else:
        kernel[(1, 1, 1)](table, start, *values)


_compiled: dict[tuple[int, int], Any] = {}


@cache
def _writer(width: int) -> Any:
    """The kernel that stores its ``width`` arguments.

    Its source is generated, since Triton takes no variable number of arguments. Each is declared as int64: Triton
    otherwise compiles anew for every pattern of small, large, round and unit values.
    """
    names = [f"value_{place}" for place in range(width)]
    head = f"def write_{width}(table, start: tl.int64, {', '.join(f'{name}: tl.int64' for name in names)}):\n"
    body = "".join(f"    tl.store(table + start + {place}, {name})\n" for place, name in enumerate(names))
    file = f"<consequent table of {width}>"
    linecache.cache[file] = (len(head + body), None, (head + body).splitlines(keepends=True), file)
    scope: dict[str, Any] = {"tl": tl, "__name__": __name__}
    exec(compile(head + body, file, "exec"), scope)
    return triton.jit(scope[f"write_{width}"], do_not_specialize=["start", *names])


@triton.jit
def low_int(entry):
    """The first of an :func:`int_pair`."""
    return entry.to(tl.int32)


@triton.jit
def high_int(entry):
    """The second of an :func:`int_pair`."""
    return (entry >> 32).to(tl.int32)


@triton.jit
def low_float(entry):
    """The first of a :func:`float_pair`."""
    return entry.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def high_float(entry):
    """The second of a :func:`float_pair`."""
    return (entry >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def floats_at(address):
    """A pointer from an address in a table."""
    return address.to(tl.pointer_type(tl.float32))


@triton.jit
def aligned_floats_at(address):
    """The same for an address that four floats can be moved at."""
    return tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16)


@triton.jit
def in_fours(number):
    """A number that four divides, which the compiler thereby knows."""
    return number // 4 * 4


@triton.jit
def is_finite(values):
    """Neither infinity nor NaN."""
    return tl.abs(values) < float("inf")


@triton.jit
def shortening(energy, allowed):
    """:func:`consequent.maths.bound.shortening`; neither infinity nor NaN is above anything."""
    return tl.where(energy > allowed, tl.sqrt(allowed / energy), 1.0)
