"""Keyword arguments that a function does not have are refused by name, with the one that was probably meant."""

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch.optim import SGD, Adam, AdamW, RMSprop

P = ParamSpec("P")
R = TypeVar("R")


def refusing_unknown(function: Callable[P, R]) -> Callable[P, R]:
    """The function, with an error that helps where Python's own would only say that an argument is unexpected."""
    known = [name for name in inspect.signature(function).parameters if name != "self"]
    called = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in known:
                raise TypeError(f"{called}() has no argument {name!r}{_explained(name, known)}")
        return function(*args, **kwargs)

    return checked


def _explained(name: str, known: list[str]) -> str:
    """Whose argument it is, and which one may be meant."""
    theirs = [cls.__name__ for cls in (SGD, Adam, AdamW, RMSprop) if name in inspect.signature(cls).parameters]
    whose = f", which is one of torch.optim.{theirs[0]}" if theirs else ""
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"{whose}; did you mean {close[0]}?"
    return f"{whose}; it has {', '.join(known)}"
