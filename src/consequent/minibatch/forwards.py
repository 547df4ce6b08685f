"""Putting another ``forward`` on a module, and taking it off again.

It is an attribute of the instance. Hooks would be compiled by ``torch.jit.script`` and switch off the fast paths of
torch's transformers; another class would not be what ``type(layer)`` and pickles expect. Copies and pickles of the
module are plain, and ``torch.compile`` notices when the attribute comes and goes.
"""

from abc import ABC, abstractmethod
from functools import update_wrapper
from types import FunctionType, MethodType
from typing import Any

from torch import nn


class Replacement(ABC):
    """Another ``forward`` of one module.

    Args:
        module: whose.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module
        self._before: Any = None  # what was there instead of the class's own
        self._method: Any = None

    @abstractmethod
    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the module computes with these arguments."""

    def put_on(self) -> None:
        """From now on it is called."""
        self._before = self.module.__dict__.get("forward")
        self._method = MethodType(_with_source_of(self.module.forward, self._forward()), self.module)
        self.module.forward = self._method

    def take_off(self) -> None:
        """From now on the one before is called again."""
        if self.module.__dict__.get("forward") is self._method:
            del self.module.forward
            if self._before is not None:
                self.module.forward = self._before
        self._method = None  # if others have put theirs on top, it only calls the plain one

    def plain(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the module, or a copy of it, would compute without this."""
        if self._before is None:
            return type(module).forward(module, *args, **kwargs)
        function = getattr(self._before, "__func__", None)
        return self._before(*args, **kwargs) if function is None else function(module, *args, **kwargs)

    def _forward(self) -> Any:
        replacement = self

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:  # refers to its closure alone
            if self is replacement.module and replacement._method is not None:
                return replacement.call(args, kwargs)
            return replacement.plain(self, args, kwargs)

        return forward


def _with_source_of(plain: Any, forward: Any) -> Any:
    """A function that is taken for the plain one by those who read source code (``torch.jit.script``)."""
    plain = getattr(plain, "__func__", plain)
    scope = getattr(plain, "__globals__", forward.__globals__)
    return update_wrapper(FunctionType(forward.__code__, scope, "forward", None, forward.__closure__), plain)
