"""Which modules of a model are corrected, which keep their plain gradient, and why."""

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from consequent.layers import JOINTS, KINDS, joint_of, kind_of
from consequent.ranks.sharded_tensors import is_sharded, why_not_by_rows

Pattern = type[nn.Module] | str | re.Pattern[str]
Patterns = Pattern | Iterable[Pattern]


@dataclass
class Selection:
    """The modules with parameters of a model, by name."""

    corrected: dict[str, nn.Module]
    plain: dict[str, str]  # name -> why


def select_layers(model: nn.Module, include: Patterns | None, exclude: Patterns) -> Selection:
    """Sort the modules of a model into corrected and plain ones.

    Args:
        model: the model.
        include: types, names or compiled regular expressions; None is every layer that can be corrected, embeddings
            aside. A name stands for the module and everything inside it; a regular expression is searched in the name.
        exclude: the same, to leave out.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"expected a torch.nn.Module, got {type(model).__name__}; the layers' inputs are needed, so pass the model "
            "itself and not its parameters or its optimiser"
        )
    named = {readable_name(name): module for name, module in model.named_modules()}
    wanted = None if include is None else _matches(include, named, "include")
    unwanted = _matches(exclude, named, "exclude")
    corrected: dict[str, nn.Module] = {}
    plain: dict[str, str] = {}
    reason: str | None
    for name, module in named.items():
        if not _has_parameters(module):
            continue
        parent = named.get(name.rpartition(".")[0]) if name else None
        if isinstance(parent, nn.MultiheadAttention) and name.rpartition(".")[0] in corrected:
            continue  # its parameters are those of the attention
        kind, joint = kind_of(module), joint_of(module)
        if kind is None and joint is None:
            reason = _no_layer(module)
        elif name in unwanted:
            reason = "excluded"
        elif wanted is not None and name not in wanted:
            reason = "not included"
        elif joint is not None:
            inside = [inner for inner in unwanted if inner.startswith(name + "." if name else "")]
            reason = f"{inside[0]!r}, a part of it, is excluded" if inside else joint.why_not(module)
        elif wanted is None and kind is not None and not kind.corrected_by_default:
            reason = (
                f"{type(module).__name__} is corrected only where include= names it, beside the others that should be"
            )
        else:
            reason = _why_not(name, module, parent)
        if reason is None:
            corrected[name] = module
        else:
            plain[name] = reason
    _leave_out_shared(corrected, plain, named)
    if not corrected:
        listed = "\n".join(f"  {name or '(the model itself)'}: {reason}" for name, reason in plain.items())
        raise ValueError(
            f"nothing in this model can be corrected: it needs a layer ({_names_of_kinds()}) that is neither "
            f"excluded nor left out by include=…\n{listed or '  (the model has no parameters)'}"
        )
    return Selection(corrected, plain)


def readable_name(name: str) -> str:
    """A module's name without what ``torch.compile`` and other wrappers put before it."""
    return re.sub(r"(^|\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.|$)", "", name).lstrip(".")


def _has_parameters(module: nn.Module) -> bool:
    return any(p is not None for p in module._parameters.values()) or hasattr(module, "parametrizations")


def _no_layer(module: nn.Module) -> str:
    """Why parameters stay plain whose module is none of the kinds."""
    reason = f"{type(module).__name__} is none of the layers that can be corrected"
    names = [name for name, parameter in module._parameters.items() if parameter is not None]
    if not names or "weight" in names:
        return reason
    shown = ", ".join(names if len(names) <= 4 else [*names[:3], f"… ({len(names)} in all)"])
    if any(True for _ in module.children()):
        return f"bare parameters, in none of its layers, stay plain: {shown}"
    return f"{reason}; its parameters stay plain: {shown}"


def _names_of_kinds() -> str:
    kinds = [*(kind.module_types for kind in KINDS), *(joint.module_types for joint in JOINTS)]
    return ", ".join(cls.__name__ for types in kinds for cls in types)


def _why_not(name: str, module: nn.Module, parent: nn.Module | None) -> str | None:
    weight = module._parameters.get("weight")
    if weight is None:
        return "its weight is not a parameter of its own (parametrised, weight-normalised or pruned)"
    if isinstance(weight, UninitializedParameter):
        raise ValueError(  # noqa: TRY004
            f"layer {name!r} is lazy and has no weight yet: run one forward pass before attaching"
        )
    not_by_rows = why_not_by_rows(weight)
    if not_by_rows is not None:
        return not_by_rows
    kind = kind_of(module)
    assert kind is not None
    if is_sharded(weight) and kind.is_transposed:
        return "its weight is sharded by its inputs, not by its outputs"
    if not weight.is_floating_point():
        return f"its weight is {weight.dtype}"
    if isinstance(parent, nn.MultiheadAttention):
        return "nn.MultiheadAttention uses its weight without calling it, and is not corrected itself"
    if getattr(module, "bias", None) is not None and "bias" not in module._parameters:
        return "its bias is not a parameter of its own"
    return kind.why_not(module)


def _leave_out_shared(corrected: dict[str, nn.Module], plain: dict[str, str], named: dict[str, nn.Module]) -> None:
    """A shared weight is corrected only if all its uses are seen, and are matrix products of one shape."""
    owners: dict[Tensor | None, list[str]] = {}
    for name, module in named.items():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(parameter, []).append(name)
    while True:  # what is left out may be shared in turn
        left_out: dict[str, str] = {}
        for name, layer in corrected.items():
            joint = joint_of(layer)
            if joint is not None:
                units = [tuple([p for p in unit if p is not None]) for unit in joint.parameters(layer)]
                its = [p for unit in units for p in unit]
                if len(set(its)) < sum([len(unit) for unit in set(units)]):
                    left_out[name] = "some of its own parameters are one and the same"
                for other in [other for p in its for other in owners[p] if named[other] not in layer.modules()]:
                    left_out[name] = f"its parameters are shared with {other!r}"
                continue
            for other in owners[_weight(layer)]:
                if other not in corrected:
                    left_out[name] = f"its weight is shared with {other!r}, which is not corrected"
                elif _shape(layer) != _shape(corrected[other]):
                    left_out[name] = f"its weight is shared with {other!r}, which uses it in another shape"
            for other in owners.get(_bias(layer), []):
                if named[other]._parameters.get("weight") is not layer.weight:
                    left_out[name] = f"its bias is shared with {other!r}, which has another weight"
        plain |= left_out
        for name in left_out:
            del corrected[name]
        if not left_out:
            return


def _weight(layer: nn.Module) -> Tensor:
    weight = layer._parameters["weight"]
    assert weight is not None
    return weight


def _bias(layer: nn.Module) -> Tensor | None:
    return layer._parameters.get("bias")


def _shape(layer: nn.Module) -> Any:
    kind = kind_of(layer)
    return joint_of(layer) if kind is None else kind.of(layer).shape


def listed(patterns: Patterns, argument: str) -> list[Pattern]:
    """One pattern or several, as a list."""
    if isinstance(patterns, str | re.Pattern | type):
        return [patterns]
    if not isinstance(patterns, Iterable):
        raise TypeError(f"{argument} takes module types, names or compiled regular expressions, got {patterns!r}")
    return list(patterns)


def _matches(patterns: Patterns, named: dict[str, nn.Module], argument: str) -> set[str]:
    matched: set[str] = set()
    for pattern in listed(patterns, argument):
        if isinstance(pattern, str):
            found = {name for name in named if name == pattern or name.startswith(pattern + ".")}
        elif isinstance(pattern, re.Pattern):
            found = {name for name in named if pattern.search(name)}
        elif isinstance(pattern, type) and issubclass(pattern, nn.Module):
            found = {name for name, module in named.items() if isinstance(module, pattern)}
        else:
            raise TypeError(f"{argument} takes module types, names or compiled regular expressions, got {pattern!r}")
        if not found:
            close = difflib.get_close_matches(str(pattern), named, n=3) if isinstance(pattern, str) else []
            names = [name for name in named if name]
            if isinstance(pattern, type):
                names = sorted({type(module).__name__ for module in named.values()})
            hint = f"there are {names[:8]}" + (" …" if len(names) > 8 else "")
            if close:
                hint = f"did you mean {' or '.join(map(repr, close))}?"
            raise ValueError(f"{argument}={pattern!r} matches no module of the model; {hint}")
        matched |= found
    return matched
