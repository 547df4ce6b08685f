"""What ``repr(correction)`` shows: which layers are corrected and how, which are not and why."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import SGD

from consequent.layers import joint_of, kind_of
from consequent.options.loss_divisor import named
from consequent.options.parameter_groups import Groups
from consequent.reports.reports import REMEDY

if TYPE_CHECKING:
    from consequent.correction import Consequentialism


def describe(
    correction: "Consequentialism",
    groups: Groups,
    sides: Mapping[str, str],
    divisor: float | None,
    source: str,
) -> str:
    """A readable listing.

    Args:
        correction: the correction.
        groups: what its optimiser's parameter groups say.
        sides: for each layer, the side on which it was solved last.
        divisor: what the last step's loss was taken to be divided by; None before the first step.
        source: where that comes from.
    """
    reduction = named(correction.loss_reduction)
    names = " and ".join(type(optimizer).__name__ for optimizer in correction.optimizers)
    where = f"attached to {names}" if names else "not attached"
    if groups.lost_its_optimizer:
        where = "its optimiser was thrown away"
    try:
        dampings = " and ".join(map(str, groups.dampings()))
    except (TypeError, ValueError) as error:  # which the next step will raise
        dampings = f"unusable: {error}"
    others = [] if correction.at == "step" else [f"at={correction.at!r}"]
    if correction.averaging > 0 or correction.refresh > 1:
        others += [f"averaging={correction.averaging:g}", f"refresh={correction.refresh}"]
    if correction.largest_block is not None:
        others.append(f"largest_block={correction.largest_block}")
    others.append(f"bound={correction.bound}")
    further = "".join(f", {other}" for other in others)
    lines = [f"Consequentialism({dampings}, loss_reduction={reduction!r}{further}), {where}"]
    corrected, plain = correction.corrected, correction.plain
    width = max(len(name) for name in (*corrected, *plain, ""))

    def line(name: str, text: str) -> str:
        return f"    {name or '(the model itself)':{width}}  {text}"

    lines.append(f"  corrected ({len(corrected)}):")
    for name, layer in corrected.items():
        kind = kind_of(layer)
        if kind is None:
            solves = len(_weights_of(layer))
            lines.append(
                line(name, f"{type(layer).__name__}, {solves} {'solve' if solves == 1 else 'solves'}, by features")
            )
            continue
        operation = kind.of(layer)
        layer_type = type(layer).__name__ + (f" × {operation.groups} groups" if operation.groups > 1 else "")
        if not layer.weight.requires_grad:
            lines.append(line(name, f"{layer_type}, its bias alone: the weight is frozen"))
            continue
        columns = operation.features + (getattr(layer, "bias", None) is not None)
        side = {
            "samples": "solved on the sample side",
            "features": f"solved on the feature side, {columns} × {columns}",
            "blocks": "solved on the feature side, in blocks",
        }.get(sides.get(name, ""), "side chosen at the first step")
        parts: dict[str, Any] = {"weight": layer.weight, "bias": getattr(layer, "bias", None)}
        missing = [part for part, p in parts.items() if p is not None and p.requires_grad and not groups.owns(p)]
        without = f"; its {missing[0]} is in none of the optimisers" if missing else ""
        lines.append(line(name, f"{layer_type}, {columns} input columns, {side}{without}"))
    lines.append(f"  plain ({len(plain)}):")
    lines += [line(name, reason) for name, reason in plain.items()]
    if any(isinstance(getattr(layer, "bias", None), Tensor) for layer in corrected.values()):
        lines.append("  input columns: those of the layer's inputs, and one of ones for its bias if it has one")
    if correction.bound is not None:
        lines.append(f"  bound: {_bound_in_words(correction)}")
    norms = sum(isinstance(module, _BatchNorm) for module in correction.model.modules())
    if norms:
        lines.append(
            f"  BatchNorm layers: {norms}; the paper found that they conflict with the correction, try without"
        )
    counters = correction.counters
    counts = ", ".join(f"{name} {count}" for name, count in asdict(counters).items())
    lines.append(f"  counters: {counts}")
    if counters.skipped:
        lines.append(f"  NaN or inf was met in {counters.skipped} steps, which were skipped. {REMEDY}")
    if divisor is not None:
        lines.append(
            f"  samples at the last step: {correction.samples}; its loss was taken for a sum divided by {divisor:g} "
            f"({source})"
        )
    return "\n".join(lines)


def _weights_of(layer: nn.Module) -> list[Any]:
    """What the solves of a layer are known by."""
    joint = joint_of(layer)
    return [layer.weight] if joint is None else [unit[0] for unit in joint.parameters(layer)]


def _bound_in_words(correction: "Consequentialism") -> str:
    """What it does, or why it does nothing."""
    optimizer = correction.optimizer
    if correction.at == "backward":
        return 'off with at="backward", where the step is not known yet'
    if len(correction.optimizers) > 1:
        return "off with several optimisers: when the first of them steps, what the others will apply is not known"
    if optimizer is not None and not isinstance(optimizer, SGD):
        return f"off, as it is for SGD alone: steps of {type(optimizer).__name__} may have a length of their own"
    trained = [layer for layer in correction.corrected.values() if any(p.requires_grad for p in layer.parameters())]
    if len({weight for layer in trained for weight in _weights_of(layer)}) < 2:
        return "off where one weight alone is corrected, which lands where it should"
    return f"one step of SGD changes a layer's outputs by at most {correction.bound:g} of the size of its inputs"
