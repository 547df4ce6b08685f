"""What users choose: the arguments of ``attach``, checked."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral, Real

from torch import nn
from torch.optim import Optimizer

from consequent.maths.bound import DEFAULT as BOUND
from consequent.maths.checks import check_nonnegative, check_positive
from consequent.maths.damping import Damping
from consequent.maths.ridge import LossReduction

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

GONE_METHODS = {
    "step": "optimizer.step() does all there is to do, and with own inputs .grad is corrected after backward()",
    "foresight": "consequent.foresight(optimizer, model, closure) looks at one step",
    "communication": "nothing is sent with own inputs, and one all-reduce of moments every refresh steps with averages",
    "counters": "correction.failed counts failed factorisations; all else is as autograd has it",
}

GONE_REDUCTIONS = {
    "mse": "F.mse_loss divides by samples × outputs and has no ½: loss_reduction=lambda n: n * outputs / 2",
    "tokens": "a mean over tokens: loss_reduction=lambda n: n * tokens, with the tokens of a sample",
}


AUTO = "auto"
BETA = 0.95  # of "auto"


@dataclass(frozen=True)
class Settings:
    """The arguments of ``attach`` that are not about which layers.

    Attributes:
        damping: λ; None: the default of each layer's optimiser.
        loss_reduction: how the loss sums up over samples.
        averaging: β; 0: own inputs; "auto": the cheaper of the two for each layer; None: the library's choice.
        refresh: T.
        bound: β of the bound; None: no bound.
    """

    damping: Damping | None
    loss_reduction: LossReduction
    averaging: float | str | None
    refresh: int
    bound: float | None

    @property
    def is_auto(self) -> bool:
        """Whether each layer gets what is cheaper for it."""
        return self.averaging == AUTO

    @property
    def beta(self) -> float:
        """β of the averages, where there are any."""
        return BETA if isinstance(self.averaging, str) else self.averaging or 0.0

    def __post_init__(self) -> None:
        check_loss_reduction(self.loss_reduction)
        if self.averaging is not None and not self.is_auto:
            remedy = '0.95 keeps 95 % of the old average, 0 is own inputs, "auto" what is cheaper for each layer'
            check_nonnegative("averaging", self.averaging, remedy)  # type: ignore[arg-type]
            if self.beta >= 1:
                raise ValueError(f"averaging must be below 1, got {self.averaging!r}; 0.95 is usual")
        if isinstance(self.refresh, bool) or not isinstance(self.refresh, Integral) or self.refresh < 1:
            raise ValueError(f"refresh must be a whole number of steps ≥ 1, got {self.refresh!r}; 10 is usual")
        if self.bound is not None:
            check_positive("bound", self.bound, f"{BOUND} is usual, None is no bound")


def refuse_gone(arguments: Iterable[str], known: Iterable[str], of: str = "attach") -> None:
    """Raise for arguments that are none of the known ones, with what to do instead of those that once were."""
    for name in arguments:
        if name in GONE:
            raise TypeError(f"{name}= is gone since the third edition; instead: {GONE[name]}")
        close = difflib.get_close_matches(name, list(known), n=1)
        raise TypeError(f"{of}() has no argument {name!r}{f'; did you mean {close[0]}?' if close else ''}")


def refuse_gone_in_groups(optimizers: Iterable[Optimizer]) -> None:
    """Raise for options of the second edition in parameter groups, which would do nothing."""
    for group in [group for optimizer in optimizers for group in optimizer.param_groups]:
        for name in ("damping", "relative_damping", "largest_block"):
            if name in group:
                raise ValueError(
                    f"{name!r} in a parameter group does nothing since the third edition; give layers a damping of "
                    "their own by attach(…, include=…), once for each damping"
                )


def check_loss_reduction(reduction: LossReduction) -> None:
    """Raise unless it says how a loss sums up over samples."""
    if isinstance(reduction, str):
        if reduction in GONE_REDUCTIONS:
            raise ValueError(
                f'loss_reduction="{reduction}" is gone since the third edition; {GONE_REDUCTIONS[reduction]}'
            )
        if reduction not in ("mean", "sum"):
            raise ValueError(f'loss_reduction must be "mean", "sum", a number or a function of N, got {reduction!r}')
    elif isinstance(reduction, nn.Module):
        raise TypeError(
            f"loss_reduction={type(reduction).__name__} is gone since the third edition: losses are not looked into. "
            "Say what it divides by: a number, or a function of N"
        )
    elif isinstance(reduction, Real):
        check_positive("loss_reduction", reduction, "it is what the loss divides a sum over samples by")
    elif not callable(reduction):
        raise TypeError(f'loss_reduction must be "mean", "sum", a number or a function of N, got {reduction!r}')
