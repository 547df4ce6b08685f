"""What ``repr(correction)`` shows: which layers are corrected and how, which are not and why."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from consequent.layers import joint_of, kind_of
from consequent.options.loss_divisor import named
from consequent.options.parameter_groups import Groups
from consequent.options.settings import why_unbounded
from consequent.reports.reports import REMEDY
from consequent.statistics.average import WIDEST
from consequent.statistics.averages import Averages

if TYPE_CHECKING:
    from consequent.correction import Consequentialism

_WHY_NOT_AVERAGED = (
    "solved for batch by batch, as are recurrent layers, attention, embeddings, and of the layers with fewer samples "
    f"than inputs those with more than {WIDEST:,} inputs (all of them where averaging is 0)"
)
_IF_SHORTENED = "If the loss does not fall as it should, try a third of the learning rate; if it does, leave it"


def describe(
    correction: "Consequentialism",
    groups: Groups,
    sides: Mapping[str, str],
    averages: Averages,
    divisor: float | None,
    source: str,
) -> str:
    """A readable listing.

    Args:
        correction: the correction.
        groups: what its optimiser's parameter groups say.
        sides: for each layer, the side on which it was solved last.
        averages: of the inputs' moments.
        divisor: what the last step's loss was taken to be divided by; None before the first step.
        source: where that comes from.
    """
    corrected, plain = correction.corrected, correction.plain
    rows = {name: _how(layer, groups, sides.get(name, "")) for name, layer in corrected.items()}
    not_averaged = _not_averaged(corrected, sides, averages)
    rows |= {name: f"{rows[name]}, {dampings}" for name, dampings in _dampings(corrected, groups).items()}
    rows |= {name: f"{rows[name]}; not averaged" for name in not_averaged}
    width = max(len(_shown(name)) for name in (*corrected, *plain))
    lines = [_heading(correction, groups), f"  corrected ({len(corrected)}):"]
    lines += [f"    {_shown(name):{width}}  {row}" for name, row in rows.items()]
    lines.append(f"  plain ({len(plain)}):")
    lines += [f"    {_shown(name):{width}}  {reason}" for name, reason in plain.items()]
    if not_averaged:
        lines.append(f"  not averaged: {_WHY_NOT_AVERAGED}")
    return "\n".join(lines + _notes(correction, groups, divisor, source))


def _not_averaged(corrected: Mapping[str, nn.Module], sides: Mapping[str, str], averages: Averages) -> list[str]:
    """The layers that are solved for batch by batch, although moments are averaged."""
    if not averages.are_used:
        return []
    solved = {name: _weights_of(layer) for name, layer in corrected.items() if name in sides}
    return [name for name, weights in solved.items() if not any(map(averages.is_averaged, weights))]


def _dampings(corrected: Mapping[str, nn.Module], groups: Groups) -> dict[str, str]:
    """λ of each layer, where it is not the same for all; none where a group's is unusable, as the heading says."""
    try:
        if len(groups.dampings()) == 1:
            return {}
        of = {name: map(groups.damping_of, _trained(layer, groups)) for name, layer in corrected.items()}
        return {name: " and ".join(dict.fromkeys(map(str, dampings))) for name, dampings in of.items()}
    except (TypeError, ValueError):
        return {}


def _shown(name: str) -> str:
    return name or "(the model itself)"


def _heading(correction: "Consequentialism", groups: Groups) -> str:
    """The settings, and what it is attached to."""
    names = " and ".join(type(optimizer).__name__ for optimizer in correction.optimizers)
    where = f"attached to {names}" if names else "not attached"
    if groups.lost_its_optimizer:
        where = "its optimiser was thrown away"
    try:
        dampings = " and ".join(map(str, groups.dampings()))
    except (TypeError, ValueError) as error:  # which the next step will raise
        dampings = f"unusable: {error}"
    settings = [dampings, f"loss_reduction={named(correction.loss_reduction)!r}"]
    if correction.at != "step":
        settings.append(f"at={correction.at!r}")
    if correction.averaging > 0 or correction.refresh > 1:
        settings += [f"averaging={correction.averaging:g}", f"refresh={correction.refresh}"]
    if correction.largest_block is not None:
        settings.append(f"largest_block={correction.largest_block}")
    if correction.bound is None or _why_unbounded(correction) is None:
        settings.append(f"bound={correction.bound}")
    if correction.promise is not None:
        settings.append(f"promise={correction.promise:g}")
    return f"Consequentialism({', '.join(settings)}), {where}"


def _how(layer: nn.Module, groups: Groups, side: str) -> str:
    """How a layer is corrected."""
    kind = kind_of(layer)
    besides = "".join(f"; its {name} stays plain" for name in _parameters_besides(layer))
    if kind is None:
        solves = len(_weights_of(layer))
        return f"{type(layer).__name__}, {solves} {'solve' if solves == 1 else 'solves'}, by features{besides}"
    operation = kind.of(layer)
    layer_type = type(layer).__name__ + (f" × {operation.groups} groups" if operation.groups > 1 else "")
    weight, bias = layer.weight, getattr(layer, "bias", None)
    assert isinstance(weight, Tensor)
    if not weight.requires_grad:
        return f"{layer_type}, its bias alone: the weight is frozen{besides}"
    columns = operation.features + (bias is not None)
    solved = {
        "samples": "solved on the sample side",
        "features": f"solved on the feature side, {columns} × {columns}",
        "blocks": "solved on the feature side, in blocks",
    }.get(side, "side chosen at the first step")
    for part, parameter in (("weight", weight), ("bias", bias)):
        if isinstance(parameter, Tensor) and parameter.requires_grad and not groups.owns(parameter):
            besides = f"; its {part} is in none of the optimisers{besides}"
            break
    return f"{layer_type}, {columns} input columns, {solved}{besides}"


def _notes(correction: "Consequentialism", groups: Groups, divisor: float | None, source: str) -> list[str]:
    """What is said below the layers."""
    notes = []
    inside = set(correction.model.parameters())
    outside = [list(parameter.shape) for parameter in groups.parameters() if parameter not in inside]
    if outside:
        shapes = ", ".join(map(str, outside[:3])) + (", …" if len(outside) > 3 else "")
        notes.append(f"  not in the model, and plain: {len(outside)} of the optimiser's parameters, of shape {shapes}")
    if any(isinstance(getattr(layer, "bias", None), Tensor) for layer in correction.corrected.values()):
        notes.append("  input columns: those of the layer's inputs, and one of ones for its bias if it has one")
    if correction.bound is not None:
        why_off = _why_unbounded(correction)
        limit = f"one step of SGD changes a layer's outputs by at most {correction.bound:g} of the size of its inputs"
        notes.append(f"  bound: {limit}" if why_off is None else f"  bound: off {why_off}")
    if correction.promise is not None:
        notes.append(f"  promise: one step takes at most {correction.promise:g} of the loss away, to first order")
    norms = sum(isinstance(module, _BatchNorm) for module in correction.model.modules())
    if norms:
        notes.append(
            f"  BatchNorm layers: {norms}; the paper found that they conflict with the correction, try without"
        )
    counters = correction.counters
    notes.append("  counters: " + ", ".join(f"{name} {count}" for name, count in asdict(counters).items()))
    if counters.bounded:
        updates = (counters.steps - counters.skipped) * len(_trained_weights(correction))
        share = f"about {min(counters.bounded / updates, 1):.1%} of all updates" if updates > 0 else "some updates"
        notes.append(f"  the bound has shortened {share}. {_IF_SHORTENED}")
    if counters.skipped:
        notes.append(f"  NaN or inf was met in {counters.skipped} steps, which were skipped. {REMEDY}")
    if divisor is not None:
        notes.append(
            f"  samples at the last step: {correction.samples}; its loss was taken for a sum divided by {divisor:g} "
            f"({source})"
        )
    return notes


def _parameters_besides(layer: nn.Module) -> list[str]:
    """The names of a corrected layer's own parameters that are no part of its products."""
    joint = joint_of(layer)
    parts = layer._parameters.items()
    if joint is None:
        return [name for name, p in parts if p is not None and name not in ("weight", "bias")]
    solved = {p for unit in joint.parameters(layer) for p in unit}
    return [name for name, p in parts if p is not None and p not in solved]


def _units_of(layer: nn.Module) -> list[Sequence[Any]]:
    """The parameters of a layer that are solved for together, for each of its solves."""
    joint = joint_of(layer)
    return [(layer.weight, getattr(layer, "bias", None))] if joint is None else list(joint.parameters(layer))


def _weights_of(layer: nn.Module) -> list[Any]:
    """What the solves of a layer are known by."""
    return [unit[0] for unit in _units_of(layer)]


def _trained(layer: nn.Module, groups: Groups) -> list[Tensor]:
    """Of each solve of a layer the first parameter that is trained, whose damping counts."""
    trained = [[p for p in unit if p is not None and p.requires_grad and groups.owns(p)] for unit in _units_of(layer)]
    return [unit[0] for unit in trained if unit]


def _why_unbounded(correction: "Consequentialism") -> str | None:
    """Why the bound does nothing, where it does nothing."""
    why = why_unbounded(correction.at, correction.optimizers)
    if why is not None:
        return why
    if len(_trained_weights(correction)) < 2:
        return "where one weight alone is corrected, which lands where it should"
    return None


def _trained_weights(correction: "Consequentialism") -> set[Any]:
    """What the solves of a step are known by."""
    trained = [layer for layer in correction.corrected.values() if any(p.requires_grad for p in layer.parameters())]
    return {weight for layer in trained for weight in _weights_of(layer)}
