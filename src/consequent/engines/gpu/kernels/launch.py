"""Launches without Triton's look at every argument, which takes the host several times as long as the launch itself."""

from typing import Any

from torch import Tensor

__all__ = ["launch"]

_compiled: dict[tuple[Any, ...], Any] = {}


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
    alike = tuple([_kind(argument) for argument in arguments])
    place = (kernel.fn, arguments[0].get_device(), alike, constants, *options.items())
    compiled = _compiled.get(place)
    if compiled is None:  # the first time; always in Triton's interpreter
        _compiled[place] = kernel[grid](*arguments, *constants, **options)
    else:
        compiled[(*grid, 1, 1)[:3]](*arguments, *constants)


def _kind(argument: Any) -> Any:
    """What Triton may compile a kernel of its own for: the type, alignment, and a one (or less, to be simple)."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16
    if isinstance(argument, int):
        return argument == 1, argument % 16 == 0, -(2**31) <= argument < 2**31
    return type(argument)
