"""What torch's own losses divide by, so that times it they are sums over samples whose targets are the targets.

A squared error has no ½ in torch, and so half as many elements are its divisor.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

# Means over all elements.
ELEMENTWISE: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.MSELoss: F.mse_loss,
    nn.L1Loss: F.l1_loss,
    nn.SmoothL1Loss: F.smooth_l1_loss,
    nn.HuberLoss: F.huber_loss,
    nn.BCELoss: F.binary_cross_entropy,
    nn.BCEWithLogitsLoss: F.binary_cross_entropy_with_logits,
    nn.KLDivLoss: F.kl_div,
    nn.PoissonNLLLoss: F.poisson_nll_loss,
    nn.GaussianNLLLoss: F.gaussian_nll_loss,
    nn.SoftMarginLoss: F.soft_margin_loss,
    nn.HingeEmbeddingLoss: F.hinge_embedding_loss,
}
# Means over targets that are classes.
OF_CLASSES: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.CrossEntropyLoss: F.cross_entropy,
    nn.NLLLoss: F.nll_loss,
}
_MODULES = (*ELEMENTWISE, *OF_CLASSES)
_FUNCTIONS = (*ELEMENTWISE.values(), *OF_CLASSES.values())


def is_loss_function(value: object) -> bool:
    """Whether it is a loss of ``torch.nn.functional`` whose divisor is known."""
    return any(value is function for function in _FUNCTIONS)


def is_loss_of_classes(value: object) -> bool:
    """Whether it is one of those that are means over labels, of which some may be ignored."""
    return any(value is function for function in OF_CLASSES.values())


def check_criterion(criterion: nn.Module) -> None:
    """Raise unless it is a loss module whose divisor is known."""
    known = [cls for cls in _MODULES if isinstance(criterion, cls)]
    remedy = "Give the loss's divisor instead: a number, or a function of the number of samples."
    if not known or type(criterion).forward is not known[0].forward:
        names = ", ".join(cls.__name__ for cls in _MODULES)
        raise TypeError(
            f"loss_reduction={criterion!r}: what it divides by is not known; it is for {names}, as they are. {remedy}"
        )
    if criterion.reduction not in ("mean", "sum", "batchmean"):
        raise ValueError(
            f"loss_reduction={criterion!r} has reduction={criterion.reduction!r}: what its values are summed up to is "
            f"not seen. {remedy}"
        )


def divisor_of_call(criterion: nn.Module, outputs: Tensor, targets: Tensor) -> float | Tensor:
    """What a call of a loss module divided by; a tensor where it depends on the targets' values.

    Args:
        criterion: a module that :func:`check_criterion` accepts.
        outputs: its first argument, the model's.
        targets: its second.
    """
    unit = 0.5 if isinstance(criterion, nn.MSELoss) else 1.0
    reduction: Any = criterion.reduction
    if reduction == "sum":
        return unit
    if reduction == "batchmean":
        return float(outputs.size(0))
    if isinstance(criterion, tuple(ELEMENTWISE)):
        return unit * float(math.prod(torch.broadcast_shapes(outputs.shape, targets.shape)))
    if targets.is_floating_point():  # probabilities of the classes
        return outputs.numel() / outputs.size(1 if outputs.ndim > 1 else 0)
    ignored: Any = criterion.ignore_index
    weight: Any = criterion.weight
    counted: Tensor = targets.ne(ignored)
    if weight is None:
        return counted.sum()
    weights: Tensor = weight[targets.where(counted, 0)]
    return (weights * counted).sum()


def divisor_of_outputs(reduction: object, shape: tuple[int, ...]) -> float:
    """What a loss over a model's outputs divides by, as far as their shape tells.

    Args:
        reduction: ``"mse"``, ``"tokens"``, or a function of ``torch.nn.functional``, called with its defaults.
        shape: of the outputs.
    """
    elements = float(math.prod(shape))
    if reduction == "mse" or reduction is F.mse_loss:
        return elements / 2
    if reduction == "tokens":
        return elements / max(shape[-1], 1)
    if not is_loss_of_classes(reduction):
        return elements
    if len(shape) > 2:
        name = getattr(reduction, "__name__", "")
        raise ValueError(
            f"loss_reduction=F.{name}, and the model's outputs have shape {list(shape)}: which dimension the classes "
            'are in is not seen. Where they are the last one, say loss_reduction="tokens"; or compute the loss by a '
            "module, criterion = nn.CrossEntropyLoss(), and say loss_reduction=criterion."
        )
    return float(shape[0]) if len(shape) == 2 else 1.0
