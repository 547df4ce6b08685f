"""Whether a gradient is still the tensor, and at the version, that it was."""

from torch import Tensor

from consequent.capture.torch_internals import version_of

_KEY = "_consequent_mark"


class GradMark:
    """Tells whether a ``.grad`` was replaced or written to since the mark was made.

    The mark is put on the tensor itself: a weak reference would keep torch from exchanging the tensor's content.

    No proof: ``GradScaler.unscale_`` and writing through ``.data`` leave no trace.

    Args:
        grad: the gradient as it is now, if there is one.
    """

    __slots__ = ("version",)

    def __init__(self, grad: Tensor | None) -> None:
        self.version = -1
        if grad is not None:
            self.version = version_of(grad)
            marks = getattr(grad, _KEY, ())
            setattr(grad, _KEY, (*marks[-3:], self))  # corrections, and passes, have marks of their own

    def renewed(self, grad: Tensor | None) -> "GradMark":
        """A mark on the gradient as it is now: this one, if it is on the very tensor."""
        if not self.is_same_tensor(grad):
            return GradMark(grad)
        assert grad is not None
        self.version = version_of(grad)
        return self

    @property
    def is_of_nothing(self) -> bool:
        """Whether there was no gradient."""
        return self.version == -1

    def is_same_tensor(self, grad: Tensor | None) -> bool:
        """Whether the gradient is the very tensor, its numbers aside."""
        return grad is not None and self in getattr(grad, _KEY, ())

    def holds(self, grad: Tensor | None) -> bool:
        """Whether nobody touched the gradient since."""
        return grad is not None and version_of(grad) == self.version and self in getattr(grad, _KEY, ())
