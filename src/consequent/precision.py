"""Autocast and TF32 are for the user's model, not for the mathematics here."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def in_full_precision(function: Callable[P, R]) -> Callable[P, R]:
    """Compute in the tensors' own precision, also inside ``autocast`` and where the user has TF32 products allowed.

    A triangular solve with TF32 products inside has three correct digits where it should have six.
    """

    @wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        autocast, rounds = torch._C._is_any_autocast_enabled(), _products_are_rounded()
        if not autocast and not rounds:
            return function(*args, **kwargs)
        with ExitStack() as stack:
            for device_type in ("cpu", "cuda", "mps", "xpu") if autocast else ():
                if torch.is_autocast_enabled(device_type):
                    stack.enter_context(torch.autocast(device_type, enabled=False))
            if rounds:
                stack.enter_context(_unrounded_products())
            return function(*args, **kwargs)

    return wrapper


def _products_are_rounded() -> bool:
    return torch.cuda.is_initialized() and bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


@contextmanager
def _unrounded_products() -> Iterator[None]:
    matmul = torch.backends.cuda.matmul
    # What is inherited goes on following what it is inherited from.
    inherited = bool(torch.backends.fp32_precision == "tf32")  # type: ignore[attr-defined]
    matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = "none" if inherited else "tf32"
