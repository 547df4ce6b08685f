"""Autocast is for the user's model, not for the mathematics here."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def in_full_precision(function: Callable[P, R]) -> Callable[P, R]:
    """Compute in the tensors' own precision, also where ``backward()`` or ``step()`` is called inside ``autocast``."""

    @wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch._C._is_any_autocast_enabled():
            return function(*args, **kwargs)
        with ExitStack() as stack:
            for device_type in ("cpu", "cuda", "mps", "xpu"):
                if torch.is_autocast_enabled(device_type):
                    stack.enter_context(torch.autocast(device_type, enabled=False))
            return function(*args, **kwargs)

    return wrapper
