"""Autocast is for the user's model, not for the mathematics here."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def full_precision() -> Iterator[None]:
    """Compute in the tensors' own precision, also where ``backward()`` or ``step()`` is called inside ``autocast``."""
    with ExitStack() as stack:
        for device_type in ("cpu", "cuda", "mps", "xpu"):
            if torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        yield
