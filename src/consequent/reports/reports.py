"""What users are told: every step that was not ordinary is counted, and each cause is warned of once."""

import contextlib
import copy
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from consequent.capture.torch_internals import graph_is_being_captured
from consequent.reports.counters import NAMES, Counters, Tally
from consequent.reports.errors import ConsequentWarning, LinAlgError, NonFiniteError, StandstillError
from consequent.reports.skipped_on_device import SkippedOnDevice
from consequent.statistics.solution import Solution

_NOT_THE_USERS = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent), contextlib.__file__, copy.__file__)


# Steps in a row on which NaN or inf was met; so many are an error.
MOST_SKIPPED_IN_A_ROW = 100
# NaN or inf in one of the first steps is rather a divergence than a bad batch.
FIRST_STEPS = 1000

REMEDY = (
    "Lower the learning rate, raise the damping, or check loss_reduction: print(correction) shows what N and the "
    "loss's divisor were taken for."
)


def _remedy(step: int) -> str:
    """What to do about NaN or inf at this step."""
    batch = "Look at this batch and at the loss."
    return f"{batch} Where training has diverged: {REMEDY[0].lower()}{REMEDY[1:]}" if step <= FIRST_STEPS else batch


def shown(name: str) -> str:
    """A layer's name in a message."""
    return f"layer {name!r}" if name else "the model itself"


class Reports(Tally):
    """Counts and warnings; errors instead of some of them where ``check`` asks for it.

    Args:
        check: whether NaN, inf and failed factorisations raise.
        numbers: in words, the numbers of the present step: learning rate, λ, N.
    """

    def __init__(self, *, check: bool, numbers: Callable[[], str] = str) -> None:
        super().__init__()
        self.check = check
        self.causes = "NaN or inf"  # why a device may have skipped steps
        self._numbers = numbers
        self._warned: set[str] = set()
        self._skipped_in_a_row = 0
        self._read = Counters()  # when somebody last asked
        self._skipped_on_device = SkippedOnDevice(every=MOST_SKIPPED_IN_A_ROW)

    def add_step(self, device: torch.device) -> None:
        """A step is corrected; one that a CUDA graph records happens each time the graph is replayed."""
        if graph_is_being_captured():
            self.on_device(device)[0].add_(1)
        else:
            self.add("steps")

    def non_finite(self, layers: list[str]) -> None:
        """NaN or inf was met in these layers: the step is not taken."""
        where = ", ".join(layers[:3]) + (" …" if len(layers) > 3 else "")
        step = self._counters.steps + 1
        message = f"NaN or inf in the inputs or gradients of {where} (step {step}{self._numbers()})"
        if self.check:
            raise NonFiniteError(f"{message}. No weight was changed. {_remedy(step)}")
        self.add("skipped")
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row == 1:
            self._warn_once(
                "skipped", f"{message}. The step was skipped, with all weights left as they were. {_remedy(step)}"
            )
        elif self._skipped_in_a_row % MOST_SKIPPED_IN_A_ROW == 0:
            self.add("steps")  # which nobody else will count
            raise StandstillError(
                f"{message}: the last {self._skipped_in_a_row} steps were all skipped, nothing is being trained "
                f"(counters.skipped is {self._counters.skipped} of {step} steps). {REMEDY}"
            )
        elif self._skipped_in_a_row == 10:
            self._warn(f"{message}: the last 10 steps were all skipped, nothing is being trained. {REMEDY}")

    def read(self) -> Counters:
        """All counts; waits for the devices."""
        counters = super().read()
        steps, skipped = counters.steps - self._read.steps, counters.skipped - self._read.skipped
        if self._on_device and steps == skipped >= MOST_SKIPPED_IN_A_ROW:
            self._warn_of_standstill(steps)
        self._read = counters
        return counters

    def restore(self, counters: Counters) -> None:
        """Start again from saved counts."""
        super().restore(counters)
        self._read = replace(counters)
        self._skipped_on_device.start_again()

    def step_taken(self) -> None:
        """A step was not skipped, as far as the host knows; a device may have, and tells of it much later."""
        self._skipped_in_a_row = 0
        if not self._on_device:
            return
        skipped = self._skipped_on_device.after_step(
            on_device[NAMES.index("skipped")] for on_device in self._on_device.values()
        )
        if skipped is None or skipped <= 0:
            return
        if skipped >= MOST_SKIPPED_IN_A_ROW:
            self._warn_of_standstill(skipped)
        else:
            self._warn_once(
                "skipped",
                f"{self.causes} in {skipped} of {MOST_SKIPPED_IN_A_ROW} steps up to about step {self._counters.steps}"
                f"{self._numbers()}. They were skipped: the device has put zeros in the place of all gradients. "
                f"{_remedy(self._counters.steps)}",
            )

    def _warn_of_standstill(self, steps: int) -> None:
        """All of the last steps were skipped by a device."""
        self._warn_once(
            "standstill",
            f"{self.causes} in each of the last {steps} steps{self._numbers()}: all were skipped, nothing is being "
            f"trained. {REMEDY}",
        )

    def updated(self, name: str, update: Solution) -> None:
        """A layer is about to get this update."""
        self._note_failures(name, update.rescued, update.fallen_back)
        if update.edited is False:
            return
        self.add("edited", update.edited)
        if not isinstance(update.edited, Tensor) and update.edited:
            self._warn_once(
                f"edited {name}",
                f"{shown(name)}: its gradient is not the one its inputs explain (clipped by value, written to by "
                "hand or by a hook, zero_grad() forgotten?). It was used as it is, only shortened until it cannot "
                'overshoot. Use clip_grad_norm_ instead of clip_grad_value_, attach with at="backward", which edits '
                "come after, or exclude the layer.",
            )

    def held_unseen(self, name: str) -> None:
        """A layer's gradient is of more than the backward passes that were seen, and its inputs are not."""
        self._warn_once(
            f"unseen {name}",
            f"{shown(name)}: its gradient held something before the first backward pass that was seen (one before "
            "attaching, or before the optimiser held the layer?). It was solved for as if the inputs of the passes "
            "that were seen explained all of it. Call zero_grad() first.",
        )

    def _note_failures(self, name: str, rescued: int | Tensor, fallen_back: int | Tensor) -> None:
        if isinstance(fallen_back, int) and fallen_back:
            message = (
                f"{shown(name)}: the Gram matrix plus damping could not be factorised, not even in float64; "
                "raise the damping"
            )
            if self.check:
                raise LinAlgError(message + ". No weight was changed.")
            self._warn_once(f"fallen back {name}", message + ". It got a shortened plain gradient instead.")
        self.add("rescued", rescued)
        self.add("fallen_back", fallen_back)

    def solved(self, name: str, finite: bool | Tensor, rescued: int | Tensor, fallen_back: int | Tensor) -> None:
        """A layer's gradient was corrected in a backward pass; where NaN or inf was met it is NaN."""
        if self.check and not bool(finite):
            raise NonFiniteError(
                f"NaN or inf in the inputs or output gradients of {shown(name)} (backward pass {self._counters.steps}"
                f"{self._numbers()}). {_remedy(self._counters.steps)}"
            )
        self._note_failures(name, rescued, fallen_back)

    def ranks_left_out(self, size: int) -> None:
        """There are other ranks, and nothing says that they train the same model."""
        self._warn_once(
            "ranks",
            f"{size} ranks are running, but this model is in no DistributedDataParallel and not sharded: it is "
            "corrected with this process's own inputs only. If the ranks train one model and average its gradients by "
            "hand, pass process_group=torch.distributed.group.WORLD; if each trains its own, pass across_ranks=False.",
        )

    def optimizer_gone(self) -> None:
        """A backward pass went through a model whose optimiser was thrown away."""
        self._warn_once(
            "gone",
            "the optimiser that consequent was attached to no longer exists, and with it the correction: this model's "
            "gradients are plain ones. Keep a reference to the optimiser, or attach to the one that steps now; if "
            "plain gradients are what you want, call correction.detach() before you throw the optimiser away.",
        )

    def nothing_promised(self, steps: int) -> None:
        """A step's promise is limited, and nothing was left of the last ones."""
        self._warn_once(
            "nothing promised",
            f"promise= limits steps by the loss, which was zero in the last {steps} of them, and its gradient was not: "
            "nothing is being trained. It is for a loss that backward() is called on and whose least value is zero, "
            "and not for something else with its gradient. Otherwise leave promise= out.",
        )

    def copied(self) -> None:
        """Somebody copies or pickles the correction itself."""
        self._warn_once(
            "copied",
            "a correction cannot be copied or pickled: there is None in its place, and the copy of its optimiser is a "
            "plain one, with the learning rate of this. Attach to the copies, and load correction.state_dict().",
        )

    def all_frozen(self, optimizer: str) -> None:
        """There is nothing to correct, for now."""
        self._warn_once(
            "frozen", f"all layers to correct are frozen: {optimizer} stays as it is until one of them is trained"
        )

    def half_held(self, name: str, optimizers: str, held: Sequence[str], missing: Sequence[str]) -> None:
        """Of a layer's parameters, only some lie in an optimiser that this is attached to."""
        self._warn_once(
            "half held",
            f"{shown(name)}: {optimizers} holds its {' and '.join(held)} and not its {' and '.join(missing)}, which "
            "requires a gradient, too. What it holds is corrected as if the rest stood still. If another optimiser "
            "holds that, attach both at once: consequent.attach([optimizer, the_other], model); if it is not trained, "
            "freeze it.",
        )

    def samples_in_doubt(self, doubt: str | None) -> None:
        """N may not be what the loss was averaged over."""
        if doubt is not None:
            self._warn_once("samples", doubt)

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
