"""What users are told: every step that was not ordinary is counted, and each cause is warned of once."""

import warnings

from torch import Tensor

from consequent.counters import Tally
from consequent.errors import ConsequentWarning, LinAlgError, NonFiniteError
from consequent.update import Update


class Reports(Tally):
    """Counts and warnings; errors instead of some of them where ``check`` asks for it."""

    def __init__(self, *, check: bool) -> None:
        super().__init__()
        self.check = check
        self._warned: set[str] = set()

    def non_finite(self, names: list[str]) -> None:
        """NaN or inf was met in these layers: the step is not taken."""
        where = ", ".join(names[:3]) + (" …" if len(names) > 3 else "")
        message = f"NaN or inf in the inputs or gradients of layer {where}"
        if self.check:
            raise NonFiniteError(message + ". No weight was changed. Look at this batch and at the loss.")
        self.add("skipped")
        self._warn_once("skipped", message + ". The step was skipped, with all weights left as they were.")

    def updated(self, name: str, update: Update) -> None:
        """A layer is about to get this update."""
        if not isinstance(update.fallen_back, Tensor) and update.fallen_back:
            message = (
                f"layer {name!r}: the Gram matrix plus damping could not be factorised, not even in float64; "
                "raise the damping"
            )
            if self.check:
                raise LinAlgError(message + ". No weight was changed.")
            self._warn_once(f"fallen back {name}", message + ". It got a shortened plain gradient instead.")
        self.add("rescued", update.rescued)
        self.add("fallen_back", update.fallen_back)
        if update.edited:
            self.add("edited")
            self._warn_once(
                f"edited {name}",
                f"layer {name!r}: its gradient is not the one its inputs explain (clipped by value, a penalty on the "
                "weights, a second use of the weight outside of the layer?). It is corrected as it is; the part that "
                "no input explains is divided by the damping, which makes it large. Use weight_decay instead of a "
                "penalty, clip_grad_norm_ instead of clip_grad_value_, or exclude the layer.",
            )

    def left_plain(self, name: str, reason: str) -> None:
        """A layer that was to be corrected keeps its plain gradient."""
        self._warn_once(f"plain {name}", f"layer {name!r} keeps its plain gradient: {reason}")

    def _warn_once(self, key: str, message: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            warnings.warn(message, ConsequentWarning, stacklevel=2)
