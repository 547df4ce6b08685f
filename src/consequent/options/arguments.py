"""Arguments and attributes that are not there are refused by name, with the one that was probably meant."""

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
    return f"{whose}; {_guess(name, known) or 'it has ' + ', '.join(known)}"


def _guess(name: str, known: list[str]) -> str | None:
    """Which one may be meant."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else None


def refuse_unknown_attribute(cls: type, name: str) -> None:
    """Raise if setting this attribute would have no effect: it is unknown, or an argument that counts only at first.

    Args:
        cls: whose attributes may be set where they are properties with a setter. Its methods may be replaced, and
            names with an underscore are its own.
        name: of the attribute.
    """
    known = getattr(cls, name, None)
    if name.startswith("_") or (isinstance(known, property) and known.fset is not None):
        return
    if name in inspect.signature(cls).parameters:
        raise AttributeError(
            f"{name} of a {cls.__name__} cannot be changed any more; call detach(), and attach anew with {name}=…"
        )
    if known is None:
        settable = [key for key, value in vars(cls).items() if isinstance(value, property) and value.fset is not None]
        meant = _guess(name, settable) or f"those that can are {', '.join(settable)}"
        raise AttributeError(f"{cls.__name__} has no attribute {name!r} that can be set; {meant}")
