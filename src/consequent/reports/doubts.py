"""Signs that N is not what the loss was averaged over: told of at the first step, and not acted upon."""

from collections.abc import Iterable

from torch import nn

from consequent.capture.use import Entry

_REMEDY = (
    "Where it is a mean over something else, the learning rate does not mean what it should: say "
    'loss_reduction=criterion, the loss module that you call, or "mse", "tokens", "sum", or the divisor itself, a '
    "number or lambda samples: …; where the count is right, say loss_reduction=lambda samples: samples"
)


def doubt_about_samples(passes: Iterable[Iterable[Entry]], model: nn.Module) -> str | None:
    """What is suspicious about the number of samples, if something is.

    Args:
        passes: for each backward pass the entries that took part in it.
        model: the whole model; calls of its parts say nothing.
    """
    doubts = (_doubt(entry) for entries in passes for entry in entries if entry.module is model)
    return next((doubt for doubt in doubts if doubt is not None), None)


def _doubt(entry: Entry) -> str | None:
    """What is suspicious about one forward pass; outputs of a single sample may have no leading dimension."""
    inputs, outputs = entry.input_shape, entry.output_shape
    if inputs is None or not outputs or entry.samples == 0 or (entry.samples == len(outputs) == 1):
        return None
    counted = (
        f"the loss is taken for a mean over {_counted(entry.samples)}, the leading dimension of the first tensor that "
        f"entered the model, which has shape {list(inputs)}"
    )
    if outputs[0] != entry.samples and not entry.is_counted_by_layer:
        return f"{counted}; but the outputs have shape {list(outputs)}. {_REMEDY}"
    if entry.has_mean_over_positions:
        return (
            f"{counted}; but it is one over all positions (tokens, time steps, pixels) of the outputs {list(outputs)}, "
            "by its gradient, and steps are that much too short: say loss_reduction=criterion, the loss module that "
            'you call, or loss_reduction="tokens" where classes are last and no targets are ignored'
        )
    if entry.has_mean_over_elements:
        return (
            f"{counted}; but it is one over all elements of the outputs {list(outputs)}, and steps are that much too "
            "short (not those of Adam, which have a length of their own): say loss_reduction=criterion, the loss "
            'module that you call, "mse" for F.mse_loss, or the function, as loss_reduction=F.huber_loss'
        )
    return None


def _counted(samples: int) -> str:
    return "1 sample" if samples == 1 else f"{samples} samples"
