"""Hugging Face: ``Trainer(…, callbacks=[ConsequentialismCallback()])``."""

from dataclasses import asdict
from typing import Any, Unpack

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from consequent.correction import Consequentialism, attach
from consequent.maths.damping import Damping
from consequent.options.settings import Options

__all__ = ["ConsequentialismCallback"]


LOST = "options_that_a_checkpoint_cannot_hold"


class ConsequentialismCallback(TrainerCallback, ExportableState):
    """Makes the optimiser of a ``transformers.Trainer`` consequentialist while ``Trainer.train`` runs.

    Its counters are saved in the Trainer's checkpoints, and go on from there when a training is resumed; its settings
    are those of the script that resumes it.

    The Trainer tells a model what to divide its loss by (``num_items_in_batch``: the samples or tokens of all
    accumulated micro-batches), and with ``loss_reduction="mean"`` the correction takes the same number. (It is on the
    model's device, so on a GPU each step waits for it; a ``loss_reduction`` of your own does not.) Where a model is
    told nothing, it is the number of samples as everywhere.

    Some models are told and divide by their micro-batch nevertheless (``BertForSequenceClassification`` in transformers
    5.22). With gradient accumulation all gradients are then too large, plain ones too, as many times as there are
    micro-batches: ``trainer.loss_is_scaled_for_ga = False`` helps.

    A loss without a mean over samples or tokens (the ``MSELoss`` of regression heads, a ``compute_loss_func`` with a
    divisor of its own) needs an explicit ``loss_reduction``.

    Args:
        damping: λ, if it is not to be relative.
        options: all further arguments of :class:`consequent.Consequentialism`, ``relative_damping`` among them. What
            ``averaging`` and ``refresh`` keep is not in the Trainer's checkpoints: a resumed training begins it anew.

    Attributes:
        correction: None before the first training; after one it is detached, and its counters can still be
            read.
    """

    def __init__(self, damping: float | None = None, **options: Unpack[Options]) -> None:
        lost: Any = options.get(LOST)
        if lost is not None:
            raise ValueError(
                "restore_callback_states_from_checkpoint=True makes the callback anew from the checkpoint, which "
                f"cannot hold its {', '.join(lost)}; leave it out: the counters are restored anyway"
            )
        Damping.chosen(damping, options.get("relative_damping"))  # raises now, not when the training begins
        self.damping = damping
        self.options = options
        self.correction: Consequentialism | None = None
        self._hook: RemovableHandle | None = None
        self._items: Any = None  # num_items_in_batch of the last micro-batch
        self._micro_batches = 1  # that are accumulated

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: nn.Module, optimizer: Optimizer, **others: Any
    ) -> None:
        """The optimiser exists now, and a checkpoint was loaded if there is one."""
        self._detach()  # after a training that raised
        self._micro_batches = args.gradient_accumulation_steps
        options = self.options
        if options.get("loss_reduction", "mean") == "mean":
            options = {**options, "loss_reduction": self._divisor}
        self.correction = attach(optimizer, model, self.damping, **options)
        saved = state.stateful_callbacks.get(type(self).__name__)
        counters = saved["attributes"]["counters"] if isinstance(saved, dict) else None  # a list if there are two of us
        if state.global_step > 0 and counters is not None:
            self.correction.load_state_dict({**self.correction.state_dict(), "counters": counters})
        self._hook = model.register_forward_pre_hook(self._note_items, with_kwargs=True)

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Training is over."""
        self._detach()

    def state(self) -> dict[str, Any]:
        """What the Trainer saves in a checkpoint."""
        counters = None if self.correction is None else asdict(self.correction.counters)
        kept = {name: value for name, value in self.options.items() if _is_plain(value)}
        lost = sorted(self.options.keys() - kept.keys())
        arguments = {"damping": self.damping, **kept, **({LOST: lost} if lost else {})}
        return {"args": arguments, "attributes": {"counters": counters}}

    def _note_items(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._items = kwargs.get("num_items_in_batch")

    def _divisor(self, samples: int) -> float:
        if self._items is None:
            return float(samples)
        in_a_pass = self._micro_batches if self.options.get("at") == "backward" else 1
        return float(self._items) / in_a_pass

    def _detach(self) -> None:
        if self.correction is not None and self.correction.optimizer is not None:
            self.correction.detach()
        if self._hook is not None:
            self._hook.remove()


def _is_plain(value: Any) -> bool:
    """Whether JSON can hold it."""
    if isinstance(value, list | tuple):
        return all(_is_plain(one) for one in value)
    return value is None or isinstance(value, bool | int | float | str)
