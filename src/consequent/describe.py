"""What ``print(correction)`` shows: which layers are corrected and how, which are not and why."""

from typing import TYPE_CHECKING, Any

from consequent.layers import kind_of
from consequent.selection import display_name

if TYPE_CHECKING:
    from consequent.correction import Correction


def describe(correction: "Correction") -> str:
    """A readable listing."""
    settings = correction.settings
    dampings = [own.damping for own in correction.own_inputs.values()]
    dampings += [layer.damping for layer in correction.averaged.values()]
    said = [*dict.fromkeys(map(str, dampings)), f"loss_reduction={_named(settings.loss_reduction)}"]
    if correction.averaged:
        said += [f"averaging={settings.beta:g}", f"refresh={settings.refresh}"]
    lines = [f"Correction of {' and '.join(correction.optimizers)}: {', '.join(said)}"]
    width = max(len(display_name(name)) for name in (*correction.corrected, *correction.plain))
    lines.append(f"  corrected ({len(correction.corrected)}):")
    lines += [f"    {display_name(name):{width}}  {_how(correction, name)}" for name in correction.corrected]
    if correction.plain:
        lines.append(f"  plain ({len(correction.plain)}):")
        lines += [f"    {display_name(name):{width}}  {reason}" for name, reason in correction.plain.items()]
    if correction.holds_bound:
        lines.append(f"  bound: a step changes outputs by at most {settings.bound:g} of the size of a layer's inputs")
    elif settings.bound is not None:
        lines.append("  bound: off; it is for torch.optim.SGD, for several layers, and for own inputs on one rank")
    if correction.failed:
        lines.append(f"  {correction.failed} factorisations failed and were solved in another way: raise the damping")
    return "\n".join(lines)


def _how(correction: "Correction", name: str) -> str:
    layer = correction.corrected[name]
    kind = kind_of(layer)
    assert kind is not None
    operation = kind.of(layer)
    bias = getattr(layer, "bias", None) is not None
    groups = f" × {operation.groups} groups" if operation.groups > 1 else ""
    size = (
        f"{type(layer).__name__}, {operation.features + bias} columns{groups} → {operation.outputs // operation.groups}"
    )
    if name in correction.averaged:
        if correction.is_undecided(name):
            return f"{size}, averages, or own inputs if fewer rows than features come in at the first step"
        return f"{size}, averages"
    why = correction.why_own_inputs[name] if correction.settings.averaging else ""
    return f"{size}, own inputs{f' ({why})' if why else ''}"


def _named(reduction: Any) -> str:
    return getattr(reduction, "__name__", None) or repr(reduction)
