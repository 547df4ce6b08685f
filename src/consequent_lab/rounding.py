"""Whether a GPU may round the inputs of float32 products to TF32."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def tf32(*, allowed: bool) -> Iterator[None]:
    """Lets a GPU round the inputs of float32 products and convolutions to TF32, or forbids it."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
