"""Putting another ``forward`` on a module, and taking it off again.

It is an attribute of the instance. Hooks would be compiled by ``torch.jit.script`` and switch off the fast paths of
torch's transformers; another class would not be what ``type(layer)`` and pickles expect. Copies and pickles of the
module are plain, and ``torch.compile`` notices when the attribute comes and goes.
"""

from abc import ABC, abstractmethod
from functools import lru_cache, update_wrapper
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn


class Replacement(ABC):
    """Another ``forward`` of one module.

    Args:
        module: whose.

    Attributes:
        is_on: whether it is called instead of the plain one.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module
        self.is_on = False
        self._is_placed = False  # perhaps below what others have put on top of it
        self._before: Any = None  # what was there instead of the class's own
        self._method = MethodType(_with_source_of(module.forward, self._forward()), module)
        self._method.__func__.replacement = self  # type: ignore[attr-defined]

    @abstractmethod
    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the module computes with these arguments."""

    def put_on(self) -> None:
        """From now on it is called."""
        self.is_on = True
        if not self._is_placed or "forward" not in self.module.__dict__:
            self._is_placed, self._before = True, self.module.__dict__.get("forward")
            self.module.forward = self._method

    def take_off(self) -> None:
        """From now on the one before is called again."""
        self.is_on = False  # where it stays below others, it only calls the plain one
        if self.module.__dict__.get("forward") is not self._method:
            return
        self._is_placed = False
        del self.module.forward
        if self._before is not None:
            self.module.forward = self._before
            below = _replacement_of(self.module)
            if below is not None and not below.is_on:  # was taken off while it was below this one
                below.take_off()

    def plain(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the module, or a copy of it, would compute without this."""
        if self._before is None:
            return type(module).forward(module, *args, **kwargs)
        function = getattr(self._before, "__func__", None)
        return self._before(*args, **kwargs) if function is None else function(module, *args, **kwargs)

    def _forward(self) -> Any:
        replacement = self

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:  # refers to its closure alone
            if self is replacement.module and replacement.is_on:
                return replacement.call(args, kwargs)
            return replacement.plain(self, args, kwargs)

        return forward


def clean_copies(model: nn.Module) -> None:
    """Take off what copies and pickles of corrected modules have left: it only calls the plain forward."""
    for module in model.modules():
        function = getattr(module.__dict__.get("forward"), "__func__", None)
        replacement = _replacement_of(module)
        is_copied = replacement is not None and replacement.module is not module
        if is_copied or (function is not None and function is type(module).forward):
            del module.forward


def _replacement_of(module: nn.Module) -> Replacement | None:
    """What has replaced the module's forward, if it was one of ours."""
    return getattr(getattr(module.__dict__.get("forward"), "__func__", None), "replacement", None)


def _with_source_of(plain: Any, forward: Any) -> Any:
    """A function that is taken for the plain one by those who read source code.

    ``torch.jit.script`` compiles the plain one's source, and ``torch.compile`` goes by the file that a forward is from.
    """
    plain = getattr(plain, "__func__", plain)
    code, scope = forward.__code__, getattr(plain, "__globals__", forward.__globals__)
    if hasattr(plain, "__code__"):
        code = _from_file(code, plain.__code__.co_filename)
    return update_wrapper(FunctionType(code, scope, "forward", None, forward.__closure__), plain)


@lru_cache(maxsize=256)
def _from_file(code: CodeType, name: str) -> CodeType:
    """The code as if it were from another file: one object for all modules, as ``torch.compile`` goes by that."""
    return code.replace(co_filename=name)
