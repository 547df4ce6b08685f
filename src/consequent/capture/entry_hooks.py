"""The hooks on modules that contain layers, by which samples are seen to enter the model."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from consequent.capture.uncompiled import leave_uncompiled


def _call_uncompiled(function: Callable[..., None], args: tuple[Any, ...]) -> None:
    """Keep torch.compile out of a hook: it breaks the graph here and goes on behind it."""
    function(*args)


leave_uncompiled(
    __name__,
    "_call_uncompiled",
    reason="consequent counts the samples that enter this module: compile without fullgraph=True; before "
    "torch.export call correction.detach()",
)


def _inert_hook(*_: Any) -> None:
    """What a copied or unpickled model has in place of a hook: the copy must not feed the original's correction."""


def _make_inert_hook() -> Callable[..., None]:
    return _inert_hook


def drop_inert_hooks(module: nn.Module) -> None:
    """Copies of copies would gather them, and what torch notes beside them."""
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        for key in [key for key, hook in hooks.items() if hook is _inert_hook]:
            hooks.pop(key)
            for notes in (
                module._forward_hooks_with_kwargs,
                module._forward_hooks_always_called,
                module._forward_pre_hooks_with_kwargs,
            ):
                notes.pop(key, None)


class EntryHook:
    """A hook on a module that contains layers. It stays behind when its model is copied or pickled."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> None:
        """Pass the call on."""
        if torch.compiler.is_dynamo_compiling():
            _call_uncompiled(self.function, args)
        elif torch.compiler.is_exporting() or torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]
            raise RuntimeError(
                "consequent watches this model, and what it sees cannot be exported or traced: call "
                "correction.detach() first, and attach again after"
            )
        else:
            self.function(*args)

    def __reduce__(self) -> Any:
        return _make_inert_hook, ()
