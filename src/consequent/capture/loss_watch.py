"""What is seen of a loss when its gradient comes to the model's outputs: signs of what it was divided by."""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from consequent.capture.loss_reductions import (
    is_behind_products,
    is_mean_over_elements,
    is_mean_over_labels,
    is_sum,
    picked_numbers,
)
from consequent.capture.torch_internals import graph_is_being_captured, running_node, transforms_are_active
from consequent.capture.use import Entry

MOST = 0.9  # of all tokens: if fewer have labels it is told


class LossWatch:
    """Looks at what the outputs of forward passes come to.

    Args:
        taken_over: what the loss is taken for a mean over: ``"samples"``, ``"positions"``, ``"elements"``, or None: it
            is not looked at.
    """

    def __init__(self, taken_over: Callable[[], str | None]) -> None:
        self._taken_over = taken_over

    def look_at(self, entry: Entry, outputs: Tensor) -> None:
        """Note in the entry what its outputs come to, in the backward pass that is going to be."""
        taken_over = self._taken_over()
        if taken_over is None:
            return
        if taken_over == "elements":
            outputs.register_hook(partial(_look_at_way, entry))
            return
        if taken_over == "samples":
            if _has_positions(entry):
                outputs.register_hook(partial(_look_at_logits, entry))
            outputs.register_hook(partial(_look_at_reduction, entry))
        outputs.register_hook(partial(_look_at_labels, entry, taken_over))


def _has_positions(entry: Entry) -> bool:
    """Whether the outputs may have several vectors for each sample: of tokens, time steps or pixels."""
    inputs, outputs = entry.input_shape, entry.output_shape
    return inputs is not None and outputs is not None and len(outputs) > 2 and outputs[0] == inputs[0]


def _look_at_logits(entry: Entry, grad: Tensor) -> None:
    """See from the gradient of the logits whether the loss is a cross-entropy, and a mean over more than samples.

    A cross-entropy divided by d gives each of its positions a vector ``(p − y) / d``: it sums up to 0, and its positive
    part to at most 1 / d, so that the positive parts of all vectors of a mean sum up to at most 1. Classes are last, or
    in the second dimension as torch's own losses have them.
    """
    if not _can_be_read(grad):
        return
    for vectors in (grad.detach().float(), grad.detach().float().movedim(1, -1)):
        is_of_softmax = vectors.sum(-1).abs().max() < 0.01 * vectors.abs().max()
        is_mean = vectors.clamp(min=0).sum() < 1.01
        positions = (vectors != 0).any(-1).sum()
        if is_of_softmax & is_mean & (positions > entry.samples):
            entry.positions = int(positions)


def _look_at_reduction(entry: Entry, grad: Tensor) -> None:
    """See from autograd's graph whether the loss is a sum, or a mean over all elements of the outputs."""
    outputs = running_node()
    if outputs is None or transforms_are_active():
        return
    if entry.samples > 1:
        entry.has_sum |= is_sum(outputs)
        entry.has_scaled_sum |= is_sum(outputs, scaled=True)
    if grad.numel() > 2 * entry.samples:  # of two numbers a sample a mean is half of the sum
        entry.has_mean_over_elements |= is_mean_over_elements(outputs, grad.numel())
    picked = picked_numbers(outputs)
    if picked is not None and 0 < picked < entry.samples:
        entry.counted = picked


def _look_at_way(entry: Entry, grad: Tensor) -> None:
    """See whether the outputs come to the loss by another network alone."""
    outputs = running_node()
    if outputs is not None and not transforms_are_active():
        entry.is_behind_products |= is_behind_products(outputs, grad.numel())


def _look_at_labels(entry: Entry, taken_over: str, grad: Tensor) -> None:
    """See whether a mean over labels leaves some of them out: their rows of the gradient are all zeros.

    In float16 that may be rounding.
    """
    outputs = running_node()
    if outputs is None or not _can_be_read(grad) or grad.dtype is torch.float16 or grad.ndim < 2:
        return
    if taken_over == "samples" and grad.size(0) != entry.samples:
        return
    if not is_mean_over_labels(outputs):
        return
    counts = (grad.detach() != 0).any(-1)
    if taken_over == "samples":
        counts = counts.reshape(entry.samples, -1).any(1)
    counted, least = int(counts.sum()), counts.numel()
    if taken_over == "positions":
        if counts.ndim > 1 and not counts[:, -1].any():  # the last token of a sequence has no next one for a label
            least -= counts.size(0)
        least = math.ceil(MOST * least)
    if 0 < counted < least:
        entry.counted = counted


def _can_be_read(grad: Tensor) -> bool:
    if grad.is_sparse or grad.is_nested or graph_is_being_captured() or transforms_are_active():
        return False
    return grad.numel() > 0
