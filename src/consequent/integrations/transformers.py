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
AVERAGES = "consequent_averages"  # in the first parameter group of the optimiser's state, which the Trainer saves


class ConsequentialismCallback(TrainerCallback, ExportableState):
    """Makes the optimiser of a ``transformers.Trainer`` consequentialist while ``Trainer.train`` runs.

    Its counters are saved in the Trainer's checkpoints, and go on from there when a training is resumed; its settings
    are those of the script that resumes it. What ``averaging`` and ``refresh`` keep is in the optimiser's saved state.

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
        options: all further arguments of :class:`consequent.Consequentialism`, ``relative_damping`` among them.

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
        self._hooks: list[RemovableHandle] = []
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
        averages = optimizer.param_groups[0].pop(AVERAGES, None)
        if state.global_step > 0:
            loaded = {"counters": counters, "averages": averages}
            known = {name: value for name, value in loaded.items() if value is not None}
            self.correction.load_state_dict({**self.correction.state_dict(), **known})
        self._hooks = [model.register_forward_pre_hook(self._note_items, with_kwargs=True)]
        if self.correction.optimizer is not None:  # the Trainer may have wrapped it
            self._hooks.append(self.correction.optimizer.register_state_dict_post_hook(self._add_averages))

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

    def _add_averages(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        assert self.correction is not None
        averages = self.correction.state_dict().get("averages")
        if averages is not None:
            state["param_groups"][0][AVERAGES] = averages

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
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def _is_plain(value: Any) -> bool:
    """Whether JSON can hold it."""
    if isinstance(value, list | tuple):
        return all(_is_plain(one) for one in value)
    return value is None or isinstance(value, bool | int | float | str)
