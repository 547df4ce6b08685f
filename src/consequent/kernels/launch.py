"""Launches without Triton's look at every argument, which takes the host longer than the launch itself."""

from typing import Any

__all__ = ["launch"]

_compiled: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    arguments: tuple[Any, ...],
    constants: tuple[Any, ...] = (),
    **options: Any,
) -> None:
    """Launch a kernel on the current device, compiled once for all arguments of it.

    Args:
        kernel: declared with ``do_not_specialize`` for all its arguments and with a type for its integers: compiled for
            some values, it then serves all others.
        grid: how many programs there are.
        arguments: tensors and integers, a tensor first.
        constants: what the kernel is compiled for; its last parameters.
        options: how it is compiled, such as ``num_warps``.
    """
    place = (kernel.fn, arguments[0].get_device(), constants, *options.items())
    compiled = _compiled.get(place)
    if compiled is None:  # the first time; always in Triton's interpreter
        _compiled[place] = kernel[grid](*arguments, *constants, **options)
    else:
        compiled[grid](*arguments, *constants)
