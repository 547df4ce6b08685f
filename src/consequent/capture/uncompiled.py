"""Functions of ours that ``torch.compile`` calls as they are.

To mark one imports ``torch._dynamo``, which takes a second. torch itself imports it when an optimiser is made, so they
are marked when a model is first watched, and importing this package stays cheap.
"""

import sys
from typing import Any

import torch

_NOT_YET: list[tuple[str, str, str, str | None]] = []  # module, class (or nothing), function, reason


def leave_uncompiled(module: str, function: str, *, of_class: str = "", reason: str | None = None) -> None:
    """Let a function be called as it is, from the first model on that is watched.

    Args:
        module: in which it is.
        function: its name there.
        of_class: the class whose static method it is, if it is one.
        reason: what ``torch.compile(fullgraph=True)`` says where it meets the function.
    """
    _NOT_YET.append((module, of_class, function, reason))


def mark_uncompiled_functions() -> None:
    """Mark what is to be left uncompiled; before a model is watched."""
    while _NOT_YET:
        module, of_class, function, reason = _NOT_YET.pop()
        owner: Any = sys.modules[module]
        if of_class:
            owner = getattr(owner, of_class)
        marked = torch.compiler.disable(getattr(owner, function), reason=reason)
        setattr(owner, function, staticmethod(marked) if of_class else marked)
