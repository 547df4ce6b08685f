"""The library's own warning and error types."""

from torch.linalg import LinAlgError  # type: ignore[attr-defined]

__all__ = ["ConsequentWarning", "LinAlgError", "NonFiniteError", "StandstillError"]


class ConsequentWarning(UserWarning):
    """Something was done differently from what was asked, and counted; the message says what and what to do."""


class NonFiniteError(FloatingPointError):
    """NaN or inf in a layer's inputs or output gradients, raised only with ``check=True``. No weight was changed."""


class StandstillError(RuntimeError):
    """NaN or inf in each of the last hundred steps: all were skipped, and nothing is being trained."""


CAPTURED_TOO_EARLY = (
    "a CUDA graph is being captured before the first ordinary training step, in which kernels are compiled. "
    "Take a few steps (forward, backward, step) before the capture, as torch.cuda.graph needs them anyway."
)
