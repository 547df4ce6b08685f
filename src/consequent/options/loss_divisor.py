"""What a loss was divided by, from what was seen of it: the model's outputs, or the calls of a criterion.

``"mean"``, ``"sum"``, numbers and functions of N need nothing but N. For the others each forward pass of the model, an
:class:`Entry`, gets a divisor of its own; these are put together as N is: the largest of a backward pass, and passes
add up.
"""

import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from consequent.capture.arriving import Arriving
from consequent.capture.entry_hooks import EntryHook, drop_inert_hooks
from consequent.capture.samples import Entries, joined
from consequent.capture.torch_internals import graph_is_being_captured, transforms_are_active
from consequent.capture.use import Entry
from consequent.options.criteria import divisor_of_call, divisor_of_outputs, is_loss_function, is_loss_of_classes
from consequent.options.settings import LossReduction


class LossDivisor:
    """How a loss sums up over samples, and what was seen of it.

    Args:
        reduction: as the user gave it, checked.
        entries: the forward passes of the model.
    """

    def __init__(self, reduction: LossReduction, entries: Entries) -> None:
        self._entries = entries
        self._hook: RemovableHandle | None = None
        self.change(reduction)

    def change(self, reduction: LossReduction) -> None:
        """From now on it sums up so."""
        self.remove()
        self.reduction = reduction
        if isinstance(reduction, nn.Module):
            drop_inert_hooks(reduction)
            self._hook = reduction.register_forward_hook(EntryHook(self._criterion_called), with_kwargs=True)

    def remove(self) -> None:
        """See no more of the criterion."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    @property
    def is_seen(self) -> bool:
        """Whether more than N is needed: outputs or calls of a criterion."""
        reduction = self.reduction
        return reduction in ("mse", "tokens") or isinstance(reduction, nn.Module) or is_loss_function(reduction)

    @property
    def taken_over(self) -> str | None:
        """What the loss is taken for a mean over, where that may be doubted: samples, positions or elements."""
        if self.reduction == "mean":
            return "samples"
        if self.reduction == "tokens" or is_loss_of_classes(self.reduction):
            return "positions"
        return "elements" if self.reduction == "mse" or is_loss_function(self.reduction) else None

    @property
    def source(self) -> str:
        """In words, where the divisor comes from."""
        if isinstance(self.reduction, nn.Module):
            return f"what {type(self.reduction).__name__} was called with"
        if is_loss_function(self.reduction):
            return f"as F.{named(self.reduction)} divides outputs of the model's shape"
        words = {
            "mean": "N, a mean over samples",
            "sum": "a sum over samples",
            "mse": "half of the elements of the outputs",
            "tokens": "the positions of the outputs",
        }
        if isinstance(self.reduction, str):
            return words[self.reduction]
        return "your function of N" if callable(self.reduction) else "as you gave it"

    def seen(self, passes: list[set[Entry]]) -> float:
        """What the loss of these backward passes was divided by, where it is seen.

        Args:
            passes: each with the entries that took part in it.
        """
        if isinstance(self.reduction, nn.Module):
            return sum(self._of_calls(entries) for entries in joined(passes))
        return sum(self._of_outputs(entries) for entries in self._entries.joined_passes(passes))

    def _of_calls(self, entries: set[Entry]) -> float:
        """What the criterion divided by after these entries: the most, where it was called several times."""
        calls = [float(count) for entry in entries for count in entry.loss_divisors]
        if not calls:
            raise RuntimeError(
                f"loss_reduction={self.reduction!r} was not called between the forward and the backward pass: it must "
                "be the very object that computes the loss, after each call of the model (or, where parts of it are "
                "called by themselves, of one that is trained here). Otherwise give the loss's divisor: a number, or a "
                "function of the number of samples."
            )
        return max(calls)

    def _of_outputs(self, entries: set[Entry]) -> float:
        """What a loss over the outputs of these entries divides by: the most, where one module was called often."""
        seen = [entry.output_shape for entry in entries if entry.output_shape is not None]
        found = {divisor_of_outputs(self.reduction, shape) for shape in seen}
        if not found or (len(found) > 1 and len({entry.module for entry in entries}) > 1):
            which = "outputs of several parts" if found else "none that were seen"
            raise RuntimeError(
                f"loss_reduction={named(self.reduction)!r} takes the divisor from the model's outputs, and one "
                f"backward pass went through {which}. Compute the loss by a module and pass that "
                "(loss_reduction=criterion), or give the divisor."
            )
        return max(found)

    def _criterion_called(self, criterion: nn.Module, args: Any, kwargs: Any, loss: Any) -> None:
        entry = self._entries.latest
        if entry is None or not isinstance(loss, Tensor) or not loss.requires_grad or transforms_are_active():
            return  # an evaluation
        named = dict(zip(("input", "target"), args, strict=False)) | kwargs
        with torch.no_grad():
            divisor = divisor_of_call(criterion, named["input"], named["target"])
        arrives_later = isinstance(divisor, Tensor) and divisor.is_cuda
        if arrives_later and graph_is_being_captured():
            raise RuntimeError(
                "how many targets a loss counts is not known while a CUDA graph is captured, and the step needs it: "
                "give the loss's divisor as a number or as a function of the number of samples"
            )
        entry.loss_divisors.append(Arriving(torch.as_tensor(divisor)) if arrives_later else float(divisor))


def sum_over_ranks(number: float, gather: Callable[[list[int]], list[list[int]]]) -> float:
    """Every rank's number, added up.

    Args:
        number: this rank's.
        gather: hands over integers to all ranks, and returns theirs.
    """
    as_integer: int = struct.unpack("<q", struct.pack("<d", number))[0]
    everyones: list[float] = [struct.unpack("<d", struct.pack("<q", theirs))[0] for (theirs,) in gather([as_integer])]
    return sum(everyones)


def named(reduction: LossReduction) -> str | float:
    """A setting in a message."""
    if isinstance(reduction, nn.Module):
        return repr(reduction)
    if is_loss_function(reduction):
        return str(getattr(reduction, "__name__", reduction))
    return "a function of the samples" if callable(reduction) else reduction
