"""What users are told: every step that was not ordinary is counted, and each cause is warned of once."""

import contextlib
import sys
import warnings
from pathlib import Path

import torch
from torch import Tensor

from consequent.autograd import graph_is_being_captured
from consequent.counters import Tally
from consequent.errors import ConsequentWarning, LinAlgError, NonFiniteError
from consequent.update import Update

_NOT_THE_USERS = (*(str(Path(file).parent) for file in (__file__, torch.__file__)), contextlib.__file__)


def shown(name: str) -> str:
    """A layer's name in a message."""
    return f"layer {name!r}" if name else "the model itself"


class Reports(Tally):
    """Counts and warnings; errors instead of some of them where ``check`` asks for it."""

    def __init__(self, *, check: bool) -> None:
        super().__init__()
        self.check = check
        self._warned: set[str] = set()
        self._skipped_in_a_row = 0

    def add_step(self, device: torch.device) -> None:
        """A step is corrected; one that a CUDA graph records happens each time the graph is replayed."""
        if graph_is_being_captured():
            self.on_device(device)[0].add_(1)
        else:
            self.add("steps")

    def non_finite(self, layers: list[str]) -> None:
        """NaN or inf was met in these layers: the step is not taken."""
        where = ", ".join(layers[:3]) + (" …" if len(layers) > 3 else "")
        message = f"NaN or inf in the inputs or gradients of {where}"
        if self.check:
            raise NonFiniteError(message + ". No weight was changed. Look at this batch and at the loss.")
        self.add("skipped")
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row == 1:
            self._warn_once("skipped", message + ". The step was skipped, with all weights left as they were.")
        elif self._skipped_in_a_row in (10, 100, 1000):
            self._warn(f"{message}: the last {self._skipped_in_a_row} steps were all skipped, nothing is being trained")

    def step_taken(self) -> None:
        """A step was not skipped."""
        self._skipped_in_a_row = 0

    def updated(self, name: str, update: Update) -> None:
        """A layer is about to get this update."""
        if not isinstance(update.fallen_back, Tensor) and update.fallen_back:
            message = (
                f"{shown(name)}: the Gram matrix plus damping could not be factorised, not even in float64; "
                "raise the damping"
            )
            if self.check:
                raise LinAlgError(message + ". No weight was changed.")
            self._warn_once(f"fallen back {name}", message + ". It got a shortened plain gradient instead.")
        self.add("rescued", update.rescued)
        self.add("fallen_back", update.fallen_back)
        self.add("edited", update.edited)
        if not isinstance(update.edited, Tensor) and update.edited:
            self._warn_once(
                f"edited {name}",
                f"{shown(name)}: its gradient is not the one its inputs explain (clipped by value, a penalty on the "
                "weights or on gradients, a second use of the weight outside of the layer, zero_grad() forgotten?). It "
                "is corrected as it is; the part that no input explains is divided by the damping, which may make it "
                "large. Use weight_decay instead of a penalty, clip_grad_norm_ instead of clip_grad_value_, or exclude "
                "the layer.",
            )

    def ranks_left_out(self, size: int) -> None:
        """There are other ranks, and nothing says that they train the same model."""
        self._warn_once(
            "ranks",
            f"{size} ranks are running, but this model is in no DistributedDataParallel and not sharded: it is "
            "corrected with this process's own inputs only. If the ranks train one model and average its gradients by "
            "hand, pass process_group=torch.distributed.group.WORLD; if each trains its own, pass across_ranks=False.",
        )

    def all_frozen(self, optimizer: str) -> None:
        """There is nothing to correct, for now."""
        self._warn_once(
            "frozen", f"all layers to correct are frozen: {optimizer} stays as it is until one of them is trained"
        )

    def left_plain(self, name: str, reason: str) -> None:
        """A layer that was to be corrected keeps its plain gradient."""
        self._warn_once(f"plain {name}", f"{shown(name)} keeps its plain gradient: {reason}")

    def _warn_once(self, key: str, message: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            self._warn(message)

    def _warn(self, message: str) -> None:
        """Warn at the user's own line: the nearest one outside of this package and of torch."""
        level, frame = 1, sys._getframe()
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
            level, frame = level + 1, frame.f_back
        warnings.warn(message, ConsequentWarning, stacklevel=level)
