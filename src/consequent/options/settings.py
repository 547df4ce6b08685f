"""What users choose by keyword: when gradients are corrected, and how the loss sums up over samples."""

import inspect
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from torch import nn
from torch.optim import SGD, Optimizer

from consequent.maths.bound import DEFAULT as BOUND
from consequent.maths.checks import check_nonnegative, check_positive
from consequent.options.criteria import check_criterion, is_loss_function
from consequent.options.selection import Patterns
from consequent.ranks.process_group import check_process_group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from consequent.statistics.averages import Averages

# "mean", "sum", "mse", "tokens"; a divisor; a function of N; or a loss of torch, as a function or as a module.
LossReduction = str | float | Callable[..., Any]


class Options(TypedDict, total=False):
    """The keyword arguments of :class:`consequent.Consequentialism`, for functions that pass them on."""

    relative_damping: float | None
    loss_reduction: LossReduction
    include: Patterns | None
    exclude: Patterns
    averaging: float
    refresh: int
    largest_block: int | None
    bound: float | None
    promise: float | None
    check: bool
    foresight: bool
    process_group: "ProcessGroup | None"
    across_ranks: bool
    at: str


def check_at(at: str) -> None:
    """Raise unless it says when gradients are corrected."""
    if at not in ("step", "backward"):
        raise ValueError(f'at must be "step" (at optimizer.step()) or "backward" (in the backward pass), got {at!r}')


def check_averaging(averaging: float, refresh: int, *, at: str, foresight: bool) -> None:
    """Raise unless moments can be averaged so."""
    check_nonnegative("averaging", averaging, "0.9 keeps nine tenths of the old average, 0 is each step's own moment")
    if averaging >= 1:
        raise ValueError(f"averaging must be below 1, got {averaging!r}; 0.9 keeps nine tenths of the old average")
    if isinstance(refresh, bool) or not isinstance(refresh, int) or refresh < 1:
        raise ValueError(f"refresh must be a whole number of steps ≥ 1, got {refresh!r}")
    if averaging == 0 and refresh == 1:
        return
    if at == "backward":
        raise ValueError('averaging= and refresh= need at="step", the default: a backward pass does not know the step')
    if foresight:
        raise ValueError("foresight=True compares with a step's own inputs: leave averaging= and refresh= out")


def check_what_needs_the_step(
    at: str, *, foresight: bool, process_group: "ProcessGroup | None", across_ranks: bool
) -> None:
    """Raise where gradients are corrected in the backward pass and something is chosen that is for the step."""
    if at == "backward" and foresight:
        raise ValueError(
            'foresight=True compares gradients at the step with those before: it needs at="step", the default'
        )
    if process_group is None:
        return
    check_process_group(process_group)
    if at == "backward":
        raise ValueError(
            'process_group= is for at="step": with at="backward" each rank corrects with its own inputs, and '
            "who averages the gradients averages the corrections"
        )
    if not across_ranks:
        raise ValueError("process_group names ranks, and across_ranks=False says to ignore them: give one")


def check_bound(bound: float | None) -> None:
    """Raise unless it is a fraction of the outputs' size, or None: no bound."""
    if bound is not None:
        check_positive("bound", bound, "0.2 is usual, None is no bound")


def check_promise(promise: float | None) -> None:
    """Raise unless it is a fraction of the loss, or None: no limit."""
    if promise is not None:
        check_positive("promise", promise, "1 is all of the loss, None is no limit")


def why_unbounded(at: str, optimizers: Sequence[Optimizer]) -> str | None:
    """Why no bound does anything for these optimisers, where none does."""
    if at == "backward":
        return 'with at="backward", where the step is not known yet'
    if len(optimizers) > 1:
        return "with several optimisers: when the first of them steps, what the others will apply is not known"
    for optimizer in optimizers:
        if not isinstance(optimizer, SGD):
            return f"under {type(optimizer).__name__}, whose steps may have a length of their own: it is for SGD alone"
    return None


def refuse_bound_in_vain(bound: float | None, at: str, optimizers: Sequence[Optimizer]) -> None:
    """Raise if a bound was chosen that does nothing for these optimisers; the default is no choice."""
    why = why_unbounded(at, optimizers)
    if why is not None and bound not in (None, BOUND):
        raise ValueError(
            f"bound={bound!r} would do nothing {why}. Leave bound= out, or say bound=None; a lower learning rate makes "
            "any optimiser's steps shorter"
        )


def refuse_promise_in_vain(promise: float | None, at: str, optimizers: Sequence[Optimizer]) -> None:
    """Raise if what a step promises is to be limited, and that would do nothing for these optimisers."""
    why = why_unbounded(at, optimizers)
    if why is not None and promise is not None:
        raise ValueError(f"promise={promise!r} would do nothing {why}. Leave promise= out")


def refuse_averaged_blocks(largest_block: int | None, averages: "Averages") -> None:
    """Raise if wide layers are to be solved for in blocks, and moments to be averaged."""
    if largest_block is not None and averages.are_used:
        raise ValueError(
            f"largest_block={largest_block}: blocks are not averaged; leave it out, or averaging= and refresh="
        )


def refuse_shared_blocks(largest_block: int | None) -> None:
    """Raise if wide layers are to be solved for in blocks, on several ranks."""
    if largest_block is not None:
        raise RuntimeError(
            f"largest_block={largest_block}: blocks are not exchanged between ranks; leave it out, or attach with "
            'at="backward"'
        )


def check_largest_block(largest_block: int | None, where: str = "") -> None:
    """Raise unless it is a number of features that are solved for together, or None: all of them."""
    if largest_block is None:
        return
    if isinstance(largest_block, bool) or not isinstance(largest_block, int) or largest_block < 1:
        raise ValueError(
            f"largest_block{where} must be a whole number of features ≥ 1, or None for no blocks, got "
            f"{largest_block!r}; 2048 cuts only layers that are wider"
        )


def check_loss_reduction(loss_reduction: LossReduction) -> None:
    """Raise unless it says how a loss sums up over samples."""
    if isinstance(loss_reduction, str):
        if loss_reduction not in ("mean", "sum", "mse", "tokens"):
            raise ValueError(
                'loss_reduction must be "mean", "sum", "mse", "tokens", a number, a function of the samples or a loss '
                f"of torch, got {loss_reduction!r}"
            )
    elif isinstance(loss_reduction, type) and issubclass(loss_reduction, nn.Module):
        raise TypeError(
            f"loss_reduction={loss_reduction.__name__} is a class: pass the loss that you call, criterion = "
            f"{loss_reduction.__name__}(…) and loss_reduction=criterion"
        )
    elif isinstance(loss_reduction, nn.Module):
        check_criterion(loss_reduction)
    elif is_loss_function(loss_reduction):
        pass
    elif not callable(loss_reduction):
        _check_divisor(loss_reduction, "loss_reduction")
    elif not _takes_one_argument(loss_reduction):
        raise TypeError(
            f"loss_reduction must take the number of samples, got {loss_reduction!r}; "
            "write lambda samples: …, also where it does not matter (of loss functions those of torch are known)"
        )


def _takes_one_argument(function: Callable[..., Any]) -> bool:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of C
        return True
    try:
        signature.bind(1)
    except TypeError:
        return False
    return True


def loss_divisor(loss_reduction: LossReduction, samples: int) -> float:
    """What the loss was divided by, where N is all that it depends on: N itself for a mean over samples."""
    if loss_reduction == "sum":
        return 1.0
    if loss_reduction == "mean":
        return float(samples)
    if samples == 0:
        return 1.0  # nothing came in, and all gradients are zero
    assert not isinstance(loss_reduction, str)
    divisor = loss_reduction(samples) if callable(loss_reduction) else loss_reduction
    _check_divisor(divisor, f"loss_reduction({samples})")
    return float(divisor)


def _check_divisor(divisor: Any, name: str) -> None:
    if isinstance(divisor, bool) or not isinstance(divisor, int | float) or not math.isfinite(divisor) or divisor <= 0:
        raise ValueError(f"{name} must be a finite number > 0 (what the loss is divided by), got {divisor!r}")
