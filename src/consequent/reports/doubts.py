"""Signs that the loss is not the mean it is taken for: told of at the first step, and not acted upon."""

import math
from collections.abc import Iterable

from torch import nn

from consequent.capture.use import Entry

_REMEDY = (
    "Where it is a mean over something else, the learning rate does not mean what it should: say "
    'loss_reduction=criterion, the loss module that you call, or "mse", "tokens", "sum", or the divisor itself, a '
    "number or lambda samples: …; where the count is right, say loss_reduction=lambda samples: samples"
)
_NOT_ADAM = "(not those of Adam, which have a length of their own)"
_LEFT_OUT = (
    "Say loss_reduction=criterion, the loss module that you call (nn.CrossEntropyLoss()), which counts at every step, "
    "or give the divisor: a number, or lambda samples: …"
)


def doubt_about_loss(
    passes: Iterable[Iterable[Entry]], model: nn.Module, taken_over: str, *, is_scaled: bool
) -> str | None:
    """What is suspicious about what the loss is taken to be divided by, if something is.

    Args:
        passes: for each backward pass the entries that took part in it.
        model: the whole model; calls of its parts say nothing.
        taken_over: what the loss is taken for a mean over: ``"samples"``, or ``"positions"`` or ``"elements"`` of the
            outputs.
        is_scaled: whether the loss was multiplied by a scaler.
    """
    if taken_over == "elements":
        return next((doubt for its in passes if (doubt := _doubt_about_elements(list(its))) is not None), None)
    entries = [entry for its in passes for entry in its if entry.module is model]
    if taken_over == "samples":
        doubts = (_doubt_about_samples(entry, is_scaled=is_scaled) for entry in entries)
    else:
        doubts = (_doubt_about_positions(entry) for entry in entries)
    return next((doubt for doubt in doubts if doubt is not None), None)


def _doubt_about_samples(entry: Entry, *, is_scaled: bool) -> str | None:
    """What is suspicious about one forward pass; outputs of a single sample may have no leading dimension."""
    inputs, outputs = entry.input_shape, entry.output_shape
    if inputs is None or not outputs or (entry.samples == len(outputs) == 1):
        return None
    if entry.samples == 0 or 0 in outputs:
        return None  # the mean of nothing
    counted = (
        f"the loss is taken for a mean over {_counted(entry.samples)}, the leading dimension of the first tensor that "
        f"entered the model, which has shape {list(inputs)}"
    )
    if entry.has_sum or (is_scaled and entry.has_scaled_sum):
        return (
            f"{counted}; but it is a sum over them, by autograd's graph, and steps are {entry.samples} times too long "
            f'{_NOT_ADAM}: say loss_reduction="sum", or loss_reduction=criterion, the loss module that you call'
        )
    if outputs[0] != entry.samples and not entry.is_counted_by_layer:
        return (
            f"{counted}; but the outputs have shape {list(outputs)}: if it is one over these {outputs[0]}, "
            f"{_wrong_by(entry.samples, outputs[0])}. {_REMEDY}"
        )
    if entry.positions is not None:
        return (
            f"{counted}; but it is one over all positions (tokens, time steps, pixels) of the outputs {list(outputs)}, "
            f"by its gradient, and {_wrong_by(entry.samples, entry.positions)}: say loss_reduction=criterion, the loss "
            'module that you call, or loss_reduction="tokens" where classes are last and no targets are ignored'
        )
    if entry.has_mean_over_elements:
        elements = math.prod(outputs)
        return (
            'pass loss_reduction="mse" if the loss is F.mse_loss or squares by hand, otherwise '
            f"loss_reduction=criterion, the loss module or function that you call: {counted}; but it is one over all "
            f"elements of the outputs {list(outputs)}, and {_wrong_by(entry.samples, elements)}, of squares without a "
            f"½ {elements / entry.samples / 2:.3g} times. A learning rate that was chosen with such steps must come "
            "down as much"
        )
    if entry.counted is not None:
        return f"{counted}; but it is one over {_few(entry.counted, entry.samples)}"
    return None


def _doubt_about_positions(entry: Entry) -> str | None:
    """What is suspicious about one forward pass whose loss is taken for a mean over tokens or labels."""
    if entry.counted is None or not entry.output_shape:
        return None
    positions = math.prod(entry.output_shape[:-1])
    return (
        f"the loss is taken for a mean over all {positions} positions of the outputs {list(entry.output_shape)}; but "
        f"it is one over {_few(entry.counted, positions)}"
    )


def _doubt_about_elements(entries: list[Entry]) -> str | None:
    """What is suspicious about the forward passes of one backward pass, whose loss is taken for one of outputs."""
    if not entries or not all(entry.is_behind_products for entry in entries):
        return None
    return (
        f"the loss is taken for a mean over the elements of the outputs {list(entries[0].output_shape or ())}; but "
        "these come to it only through another network, or another product, by autograd's graph, and it is a mean over "
        "what comes out of that: give the divisor, a number or lambda samples: … (of mse_loss half of the elements "
        "that it compares)"
    )


def _few(counted: int, taken: int) -> str:
    """What is said of labels of which not all count."""
    return f"{counted} of them only: the others are ignored or left out, and {_wrong_by(taken, counted)}. {_LEFT_OUT}"


def _wrong_by(taken: int, counted: int) -> str:
    """How long the steps are if the loss is taken for a mean over so many, and is one over so many others."""
    factor, how = (counted / taken, "short") if counted > taken else (taken / counted, "long")
    return f"steps are {factor:.3g} times too {how} {_NOT_ADAM}"


def _counted(samples: int) -> str:
    return "1 sample" if samples == 1 else f"{samples} samples"
