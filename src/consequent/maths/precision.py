"""Autocast and TF32 are for the user's model, not for the mathematics here."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

from consequent.capture.torch_internals import autocast_is_on

P = ParamSpec("P")
R = TypeVar("R")


def in_full_precision(function: Callable[P, R]) -> Callable[P, R]:
    """Compute in the tensors' own precision, also inside ``autocast`` and where the user has TF32 products allowed.

    A triangular solve with TF32 products inside has three correct digits where it should have six.
    """
    uncast = without_autocast(function)

    @wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        if not _products_are_rounded():
            return uncast(*args, **kwargs)
        with _unrounded_products():
            return uncast(*args, **kwargs)

    return wrapper


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """Compute with the tensors as they are, also inside ``autocast``; TF32 products stay allowed where they are."""

    @wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        if not autocast_is_on():
            return function(*args, **kwargs)
        with ExitStack() as stack:
            for device_type in ("cpu", "cuda", "mps", "xpu"):
                if torch.is_autocast_enabled(device_type):
                    stack.enter_context(torch.autocast(device_type, enabled=False))
            return function(*args, **kwargs)

    return wrapper


def tf32_is_allowed() -> bool:
    """Whether the user allows TF32 products on a GPU; also inside of what is computed in full precision."""
    return _withheld > 0 or _are_tf32_on_gpu()


@contextmanager
def tf32_products() -> Iterator[None]:
    """TF32 products again inside of what is computed in full precision, where :func:`tf32_is_allowed`."""
    if _are_tf32_on_gpu():
        yield
        return
    backend, before = torch.backends.cuda.matmul, torch.backends.cuda.matmul.fp32_precision
    level = _common_level()
    if level is None:
        backend.fp32_precision = "tf32"
    else:
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        if level is not None:
            torch.set_float32_matmul_precision(level)
        else:
            backend.fp32_precision = before


_withheld = 0  # how many computations in full precision are under way although TF32 is allowed


def _are_tf32_on_gpu() -> bool:
    return bool(torch.cuda.is_initialized() and torch.backends.cuda.matmul.fp32_precision == "tf32")


def _products_are_rounded() -> bool:
    on_gpu = _are_tf32_on_gpu()
    return bool(on_gpu or torch.backends.mkldnn.matmul.fp32_precision in ("tf32", "bf16"))  # type: ignore[attr-defined]


def _common_level() -> str | None:
    """What the older of torch's two ways says of products; None where the user has mixed them.

    Whoever reads the one while only the other was changed gets an error: so the older one, which changes both, is used
    where it can be.
    """
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


@contextmanager
def _unrounded_products() -> Iterator[None]:
    """Products of float32 numbers as they are, on GPUs and CPUs."""
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    common = torch.backends.fp32_precision  # type: ignore[attr-defined]
    before = [backend.fp32_precision for backend in backends]
    level = _common_level()
    global _withheld
    withheld = int(_are_tf32_on_gpu())
    _withheld += withheld
    if level is None:
        for backend in backends:
            backend.fp32_precision = "ieee"
    else:
        torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        _withheld -= withheld
        if level is not None:
            torch.set_float32_matmul_precision(level)
        for backend, precision in zip(backends, before, strict=True):
            # What is inherited goes on following what it is inherited from.
            backend.fp32_precision = "none" if precision == common else precision
