"""What users choose: the arguments of ``attach``, checked, and how the loss sums up over samples."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from consequent.maths.bound import DEFAULT as BOUND
from consequent.maths.checks import check_nonnegative, check_positive
from consequent.maths.damping import Damping

# "mean" or "sum" over samples, or the loss's own divisor: a number, or a function of the number of samples.
LossReduction = str | float | Callable[[Any], Any]

# Arguments of the second edition, and what to do instead.
GONE = {
    "at": "gradients are corrected in the backward pass (averaging=0), or by averages at the step (averaging=0.95)",
    "promise": "a lower learning rate, and bound=, keep steps short",
    "largest_block": "leave very wide layers out with exclude=",
    "check": "torch.autograd.set_detect_anomaly(True) finds NaN; print(correction) counts failed factorisations",
    "foresight": "consequent.foresight(optimizer, model, closure) looks at one step",
    "process_group": "nothing is sent with own inputs, and averages are those of all ranks",
    "across_ranks": "nothing is sent with own inputs, and averages are those of all ranks",
}

GONE_REDUCTIONS = {
    "mse": "F.mse_loss divides by samples × outputs and has no ½: loss_reduction=lambda n: n * outputs / 2",
    "tokens": "a mean over tokens: loss_reduction=lambda n: n * tokens, with the tokens of a sample",
}


@dataclass(frozen=True)
class Settings:
    """The arguments of ``attach`` that are not about which layers.

    Attributes:
        damping: λ; None: the default of each layer's optimiser.
        loss_reduction: how the loss sums up over samples.
        averaging: β; 0: own inputs; None: the library's choice.
        refresh: T.
        bound: β of the bound; None: no bound.
    """

    damping: Damping | None
    loss_reduction: LossReduction
    averaging: float | None
    refresh: int
    bound: float | None

    def __post_init__(self) -> None:
        check_loss_reduction(self.loss_reduction)
        if self.averaging is not None:
            check_nonnegative("averaging", self.averaging, "0.95 keeps 95 % of the old average, 0 is own inputs")
            if self.averaging >= 1:
                raise ValueError(f"averaging must be below 1, got {self.averaging!r}; 0.95 is usual")
        if isinstance(self.refresh, bool) or not isinstance(self.refresh, int) or self.refresh < 1:
            raise ValueError(f"refresh must be a whole number of steps ≥ 1, got {self.refresh!r}; 10 is usual")
        if self.bound is not None:
            check_positive("bound", self.bound, f"{BOUND} is usual, None is no bound")


def refuse_gone(arguments: Mapping[str, Any]) -> None:
    """Raise for arguments that are none, with what to do instead of those that once were."""
    for name in arguments:
        if name in GONE:
            raise TypeError(f"{name}= is gone since the third edition; instead: {GONE[name]}")
        raise TypeError(f"attach() has no argument {name!r}")


def check_loss_reduction(reduction: LossReduction) -> None:
    """Raise unless it says how a loss sums up over samples."""
    if isinstance(reduction, str):
        if reduction in GONE_REDUCTIONS:
            raise ValueError(
                f'loss_reduction="{reduction}" is gone since the third edition; {GONE_REDUCTIONS[reduction]}'
            )
        if reduction not in ("mean", "sum"):
            raise ValueError(f'loss_reduction must be "mean", "sum", a number or a function of N, got {reduction!r}')
    elif isinstance(reduction, Real):
        check_positive("loss_reduction", float(reduction), "it is what the loss divides a sum over samples by")
    elif not callable(reduction):
        raise TypeError(f'loss_reduction must be "mean", "sum", a number or a function of N, got {reduction!r}')


def loss_divisor(reduction: LossReduction, samples: Any) -> Any:
    """What a loss over so many samples is divided by.

    Example:
        >>> loss_divisor("mean", 32), loss_divisor("sum", 32), loss_divisor(lambda n: n * 10 / 2, 32)
        (32, 1, 160.0)
    """
    if reduction == "mean":
        return samples
    if reduction == "sum":
        return 1
    return reduction(samples) if callable(reduction) else reduction
