"""What of a correction is saved and loaded: settings, counters and averaged moments."""

import warnings
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from consequent.correction.layers import weights_of
from consequent.correction.parts import Parts
from consequent.maths.bound import DEFAULT as BOUND
from consequent.maths.damping import Damping
from consequent.options.settings import (
    check_bound,
    check_largest_block,
    check_promise,
    refuse_averaged_blocks,
    refuse_promise_in_vain,
)
from consequent.reports.counters import Counters
from consequent.reports.errors import ConsequentWarning

if TYPE_CHECKING:
    from consequent.correction.consequentialism import Consequentialism

VERSION = 3  # of state dicts


def state_of(correction: "Consequentialism", parts: Parts) -> dict[str, Any]:
    """A state dict; dampings of parameter groups are in the optimiser's own."""
    reduction, averages = correction.loss_reduction, parts.rewriter.averages
    is_chosen = parts.groups.chosen is not None
    kept = {"averages": averages.state_dict(weights_of(parts.capture))} if averages.are_used else {}
    return {
        **kept,
        "version": VERSION,
        "damping": correction.damping if is_chosen else None,
        "relative_damping": correction.relative_damping if is_chosen else None,
        "bound": correction.bound,
        "promise": correction.promise,
        "largest_block": correction.largest_block,
        "loss_reduction": None if callable(reduction) else reduction,
        "counters": asdict(correction.counters),
    }


def load(state: dict[str, Any], correction: "Consequentialism", parts: Parts) -> None:
    """Take a state dict over; nothing is changed where it is none."""
    if not isinstance(state, Mapping):
        raise TypeError(f"expected a state dict of Consequentialism, got {type(state).__name__}")
    missing = {"damping", "relative_damping", "loss_reduction", "counters"} - set(state)
    if missing:
        raise ValueError(f"not a state dict of Consequentialism: {sorted(missing)} missing")
    version = state.get("version", 1)
    if version not in range(1, VERSION + 1):
        raise ValueError(f"a state dict of version {version!r}: this library knows versions up to {VERSION}")
    damping, averages = _damping_of(state), parts.rewriter.averages
    bound = state.get("bound")  # in the first version there was none
    check_bound(bound)
    promise = state.get("promise", correction.promise)  # not in older states
    check_promise(promise)
    refuse_promise_in_vain(promise, correction.at, correction.optimizers)
    largest_block = state.get("largest_block", correction.largest_block)  # not in older states
    check_largest_block(largest_block)
    refuse_averaged_blocks(largest_block, averages)
    counters = Counters(**state["counters"])
    if "averages" in state and averages.are_used:
        averages.load_state_dict(state["averages"], weights_of(parts.capture))
    if state["loss_reduction"] is not None:
        correction.loss_reduction = state["loss_reduction"]
    is_chosen = parts.groups.chosen is not None
    _warn_of_replaced(correction, parts.groups.default if is_chosen else None, damping, bound, promise)
    if state.get("averages") and not averages.are_used:
        warnings.warn(
            "the state that is loaded has averaged moments, which are left out: this correction does not average "
            "(averaging=, refresh=)",
            ConsequentWarning,
            stacklevel=3,
        )
    if damping is not None:
        parts.groups.change_default(damping)
    parts.rewriter.bound = bound  # also where it does nothing: earlier versions took any
    correction.promise = promise
    correction.largest_block = largest_block
    parts.reports.restore(counters)


def _warn_of_replaced(
    correction: "Consequentialism",
    damping: Damping | None,
    loaded: Damping | None,
    bound: float | None,
    promise: float | None,
) -> None:
    """Tell where something that the user chose gives way to what a state has.

    Args:
        correction: into which it is loaded.
        damping: the one that was chosen for it, if one was.
        loaded: the one of the state, if it has one.
        bound: likewise.
        promise: likewise.
    """
    replaced = []
    if damping is not None and loaded is not None and damping != loaded:
        replaced.append((f"{loaded}", f"{damping}"))
    if correction.bound not in (bound, BOUND):
        replaced.append((f"bound={bound}", f"bound={correction.bound}"))
    if correction.promise not in (promise, None):
        replaced.append((f"promise={promise}", f"promise={correction.promise}"))
    for new, old in replaced:
        warnings.warn(
            f"the state that is loaded has {new}, which takes the place of {old}: set it on the correction after "
            "loading, if you want another",
            ConsequentWarning,
            stacklevel=4,
        )


def _damping_of(state: dict[str, Any]) -> Damping | None:
    """λ of a state dict; None if it was the default, which versions before the third had as a number.

    The first version had a relative one beside an absolute one, and in another unit.
    """
    damping, relative = state["damping"], state["relative_damping"]
    if state.get("version", 1) == 1 and relative is not None:
        warnings.warn(
            f"this state's relative_damping={relative!r} was meant as a fraction of the inputs' mean squared norm, "
            "trace(XXᵀ)/N; now it is one of trace(XXᵀ)/min(N, D), which is more where a layer has more rows than "
            "columns. It is taken as it is: set correction.relative_damping to what you want",
            ConsequentWarning,
            stacklevel=4,
        )
        damping = None
    chosen = Damping.chosen(damping, relative)
    if chosen is None and state.get("version", 1) < VERSION:
        raise ValueError("a state dict of Consequentialism has a damping or a relative_damping, this one has neither")
    return chosen
