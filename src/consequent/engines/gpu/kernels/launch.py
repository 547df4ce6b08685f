"""Launches without Triton's look at every argument, which takes the host several times as long as the launch itself.

The first launch of a kernel compiles it, for a second or several. So what is going to be launched is rehearsed before:
other threads then compile it, all of it at the same time (Triton lets go of Python's lock for most of the time).
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["launch", "rehearse"]

_compiled: dict[tuple[Any, ...], Any] = {}
_being_compiled: dict[tuple[Any, ...], "Future[Any]"] = {}


class _Mode(threading.local):
    is_rehearsal = False


_mode = _Mode()


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: tuple[Any, ...],
    constants: tuple[Any, ...] = (),
    **options: Any,
) -> None:
    """Launch a kernel on the current device, compiled once for all arguments that Triton takes for alike.

    Args:
        kernel: its constants are its last parameters.
        grid: how many programs there are.
        arguments: tensors and numbers, a tensor first.
        constants: what the kernel is compiled for.
        options: how it is compiled, such as ``num_warps``.
    """
    alike = tuple([look(argument) for look, argument in zip(_looks_at(kernel), arguments, strict=False)])
    place = (kernel.fn, arguments[0].get_device(), alike, constants, *options.items())
    if _mode.is_rehearsal:
        _compile_aside(place, kernel, arguments, constants, options)
        return
    compiled = _compiled.get(place)
    if compiled is not None:
        compiled[(*grid, 1, 1)[:3]](*arguments, *constants)
        return
    # The first time; always in Triton's interpreter.
    under_way = _being_compiled.pop(place, None)
    if under_way is not None:
        under_way.exception()  # waits; what went wrong does so again in the next line
    _compiled[place] = _parsed(kernel, lambda: kernel[grid](*arguments, *constants, **options))


def rehearse(work: Callable[[], object]) -> None:
    """Have all that the work launches compiled by other threads, without waiting for them.

    Nothing is launched in it, so what it computes is what happened to be in memory.
    """
    _mode.is_rehearsal = True
    try:
        work()
    finally:
        _mode.is_rehearsal = False


def _compile_aside(
    place: tuple[Any, ...], kernel: Any, arguments: tuple[Any, ...], constants: tuple[Any, ...], options: dict[str, Any]
) -> None:
    if place in _compiled or place in _being_compiled:
        return
    device = arguments[0].device
    # Keys of Triton's cache depend on the order in which functions are first asked for them: so that is not left to
    # the threads. (The interpreter has none.)
    _parsed(kernel, lambda: getattr(kernel, "cache_key", None))
    # Their types stand for tensors that are aligned, as far as Triton looks: memory is not held on to.
    stand_ins = [one.dtype if isinstance(one, Tensor) and one.data_ptr() % 16 == 0 else one for one in arguments]

    def compiled() -> Any:
        with torch.cuda.device(device):
            return kernel.warmup(*stand_ins, *constants, grid=(1,), **options)

    _being_compiled[place] = _threads().submit(compiled)


def _parsed(kernel: Any, work: Callable[[], Any]) -> Any:
    """What comes of work that reads the kernel's source.

    Python's parser may fail while other threads parse (python/cpython#106905): it is then tried again without them.
    Triton is left with keys that it had only begun to make, and would take them for whole.
    """
    try:
        return work()
    except SystemError:
        for under_way in list(_being_compiled.values()):
            under_way.exception()
        for function in _functions_of(kernel):
            if str(getattr(function, "hash", "")).startswith("recursion:"):
                function.hash = None
        return work()


def _functions_of(kernel: Any) -> list[Any]:
    """The kernel, and all that it may call."""
    found, waiting = [], [kernel]
    while waiting:
        function = waiting.pop()
        if function in found:
            continue
        found.append(function)
        names = getattr(getattr(function, "fn", None), "__globals__", {})
        waiting += [one for one in names.values() if isinstance(one, type(kernel))]
    return found


@cache
def _threads() -> ThreadPoolExecutor:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return ThreadPoolExecutor(cores, thread_name_prefix="compiles kernels")


_looks: dict[Any, tuple[Callable[[Any], Any], ...]] = {}


def _looks_at(kernel: Any) -> tuple[Callable[[Any], Any], ...]:
    """For each argument, what Triton may compile a kernel of its own for."""
    known = _looks.get(kernel.fn)
    if known is None:
        parameters = [one for one in getattr(kernel, "params", ()) if not one.is_constexpr]
        known = tuple([_look_at(parameter) for parameter in parameters])
        _looks[kernel.fn] = known
    return known


def _look_at(parameter: Any) -> Callable[[Any], Any]:
    if parameter.do_not_specialize:
        return _type
    return _type_and_one if parameter.do_not_specialize_on_alignment else _type_one_and_alignment


def _type(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return argument.dtype
    return -(2**31) <= argument < 2**31 if isinstance(argument, int) else type(argument)


def _type_and_one(argument: Any) -> Any:
    return (argument == 1, -(2**31) <= argument < 2**31) if isinstance(argument, int) else _type(argument)


def _type_one_and_alignment(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return argument == 1, argument % 16 == 0, -(2**31) <= argument < 2**31
    return type(argument)
