"""Whether a gradient is still the tensor, and at the version, that it was."""

from dataclasses import dataclass, field

from torch import Tensor

from consequent.capture.torch_internals import version_of

_KEY = "_consequent_mark"


@dataclass(slots=True, eq=False)
class GradMark:
    """Tells whether a ``.grad`` was replaced or written to since the mark was made.

    The mark is put on the tensor itself: a weak reference would keep torch from exchanging the tensor's content.

    No proof: ``GradScaler.unscale_`` and writing through ``.data`` leave no trace.
    """

    version: int = -1
    token: object = field(default_factory=object)

    @classmethod
    def of(cls, grad: Tensor | None) -> "GradMark":
        """A mark on the gradient as it is now."""
        mark = cls()
        if grad is not None:
            mark.version = version_of(grad)
            tokens = getattr(grad, _KEY, ())
            setattr(grad, _KEY, (*tokens[-3:], mark.token))  # corrections, and passes, have marks of their own
        return mark

    def renew(self, grad: Tensor | None) -> None:
        """Let it be a mark on the gradient as it is now."""
        if grad is not None and self.is_same_tensor(grad):
            self.version = version_of(grad)
        else:
            new = GradMark.of(grad)
            self.version, self.token = new.version, new.token

    @property
    def is_of_nothing(self) -> bool:
        """Whether there was no gradient."""
        return self.version == -1

    def is_same_tensor(self, grad: Tensor | None) -> bool:
        """Whether the gradient is the very tensor, its numbers aside."""
        return grad is not None and any(token is self.token for token in getattr(grad, _KEY, ()))

    def holds(self, grad: Tensor | None) -> bool:
        """Whether nobody touched the gradient since."""
        return grad is not None and self.is_same_tensor(grad) and version_of(grad) == self.version
