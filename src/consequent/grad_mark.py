"""Whether a gradient is still the tensor, and at the version, that it was."""

import weakref
from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class GradMark:
    """Tells whether a ``.grad`` was replaced or written to since the mark was made.

    No proof: ``GradScaler.unscale_`` and writing through ``.data`` leave no trace.
    """

    tensor: "weakref.ref[Tensor] | None"
    version: int

    @classmethod
    def of(cls, grad: Tensor | None) -> "GradMark":
        """A mark on the gradient as it is now."""
        return cls(None, -1) if grad is None else cls(weakref.ref(grad), grad._version)

    def renew(self, grad: Tensor | None) -> None:
        """Let it be a mark on the gradient as it is now."""
        if grad is not None and self.is_same_tensor(grad):
            self.version = grad._version
        else:
            new = GradMark.of(grad)
            self.tensor, self.version = new.tensor, new.version

    def is_same_tensor(self, grad: Tensor | None) -> bool:
        """Whether the gradient is the very tensor, its numbers aside."""
        return grad is not None and self.tensor is not None and self.tensor() is grad

    def holds(self, grad: Tensor | None) -> bool:
        """Whether nobody touched the gradient since."""
        return self.is_same_tensor(grad) and grad is not None and grad._version == self.version
