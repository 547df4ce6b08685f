"""Which modules of a model are corrected, which keep their plain gradient, and why."""

import difflib
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from consequent.layers import KINDS, Operation, kind_of

Pattern = type[nn.Module] | str | re.Pattern[str]
Patterns = Pattern | Iterable[Pattern]


@dataclass
class Selection:
    """The modules with parameters of a model, by name."""

    corrected: dict[str, nn.Module]
    plain: dict[str, str]  # name -> why


def select_layers(
    model: nn.Module, include: Patterns | None, exclude: Patterns, taken: Collection[nn.Module] = ()
) -> Selection:
    """Sort the modules of a model into corrected and plain ones.

    Args:
        model: the model.
        include: types, names or compiled regular expressions; None is every layer that can be corrected. A name stands
            for the module and everything inside it; a regular expression is searched in the name.
        exclude: the same, to leave out.
        taken: the layers that are corrected already.
    """
    named = {readable_name(name): module for name, module in model.named_modules()}
    wanted = None if include is None else _matches(include, named, "include")
    unwanted = _matches(exclude, named, "exclude")
    corrected: dict[str, nn.Module] = {}
    plain: dict[str, str] = {}
    for name, module in named.items():
        if not _has_parameters(module):
            continue
        kind = kind_of(module)
        parent = named.get(name.rpartition(".")[0]) if name else None
        if kind is None:
            reason: str | None = _no_layer(module)
        elif name in unwanted:
            reason = "excluded"
        elif wanted is not None and name not in wanted:
            reason = "not included"
        elif module in taken:
            reason = "corrected by an earlier attach(): detach() that one, or give attach() a list of all optimisers"
        else:
            reason = _why_not(name, module, kind, parent) or _why_not_sharded(name, module, named)
        if reason is None:
            corrected[name] = module
        else:
            plain[name] = reason
    _leave_out_shared(corrected, plain, named)
    if not corrected:
        kinds = ", ".join(cls.__name__ for kind in KINDS for cls in kind.module_types)
        listed = "\n".join(f"  {display_name(name)}: {reason}" for name, reason in plain.items())
        raise ValueError(
            f"nothing in this model can be corrected: it needs a layer ({kinds}) that is neither excluded nor left out "
            f"by include=…\n{listed or '  (the model has no parameters)'}"
        )
    return Selection(corrected, plain)


def display_name(name: str) -> str:
    """A module's name as messages have it."""
    return name or "(the model itself)"


def readable_name(name: str) -> str:
    """A module's name without what ``torch.compile`` and other wrappers put before it."""
    return re.sub(r"(^|\.)(_orig_mod|_checkpoint_wrapped_module)(?=\.|$)", "", name).lstrip(".")


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that a module has by itself, by name."""
    return dict(module.named_parameters(recurse=False, remove_duplicate=False))


def _has_parameters(module: nn.Module) -> bool:
    return bool(own_parameters(module)) or hasattr(module, "parametrizations")


def _no_layer(module: nn.Module) -> str:
    """Why parameters stay plain whose module is none of the kinds."""
    if any(True for _ in module.children()):
        return f"parameters of its own, in none of its layers, stay plain: {', '.join(own_parameters(module))}"
    return f"{type(module).__name__} is none of the layers that can be corrected"


def _why_not(name: str, module: Any, kind: type[Operation], parent: nn.Module | None) -> str | None:
    """Why a layer of this kind is not corrected; None if it is."""
    parameters = own_parameters(module)
    weight = parameters.get("weight")
    if weight is None:
        return "its weight is not a parameter of its own (parametrised, weight-normalised or pruned)"
    if isinstance(weight, UninitializedParameter):
        raise ValueError(  # noqa: TRY004
            f"layer {name!r} is lazy and has no weight yet: run one forward pass before attaching"
        )
    if type(weight) is not nn.Parameter and not hasattr(weight, "placements"):
        return f"its weight is of a class of its own, {type(weight).__name__}"
    if not weight.is_floating_point():
        return f"its weight is {weight.dtype}"
    if getattr(module, "bias", None) is not None and "bias" not in parameters:
        return "its bias is not a parameter of its own"
    if isinstance(parent, nn.MultiheadAttention):
        return "nn.MultiheadAttention uses its weight without calling it"
    own = kind.class_of(module)
    if type(module).forward is not own.forward:  # type: ignore[union-attr]
        return f"{type(module).__name__} has a forward of its own, which may not be that of {own.__name__}"  # type: ignore[union-attr]
    if "forward" in module.__dict__:
        return "its forward was replaced by other code"
    return None


def _why_not_sharded(name: str, module: Any, named: dict[str, nn.Module]) -> str | None:
    """Why a layer with a weight on several ranks is not corrected; None if it is, as with ``fully_shard``."""
    if not hasattr(module.weight, "placements"):
        return None
    parents = [other for path, other in named.items() if path in ("", name) or name.startswith(path + ".")]
    if any(cls.__name__ == "FSDPModule" for other in parents for cls in type(other).__mro__):
        return None
    return "its weight is a part of one on several ranks also while it is used (tensor parallelism)"


def _leave_out_shared(corrected: dict[str, nn.Module], plain: dict[str, str], named: dict[str, nn.Module]) -> None:
    """A shared weight is corrected only if all its uses are seen, and are matrix products of one shape."""
    owners: dict[Tensor | None, list[str]] = {}
    for name, module in named.items():
        for parameter in own_parameters(module).values():
            owners.setdefault(parameter, []).append(name)
    while True:  # what is left out may be shared in turn
        left_out: dict[str, str] = {}
        for name, layer in corrected.items():
            its = own_parameters(layer)
            for other in owners[its["weight"]]:
                if other not in corrected:
                    left_out[name] = f"its weight is shared with {other!r}, which is not corrected"
                elif _shape(layer) != _shape(corrected[other]):
                    left_out[name] = f"its weight is shared with {other!r}, which uses it in another shape"
            for other in owners.get(its.get("bias"), []):
                if own_parameters(named[other]).get("weight") is not its["weight"]:
                    left_out[name] = f"its bias is shared with {other!r}, which has another weight"
        plain |= left_out
        for name in left_out:
            del corrected[name]
        if not left_out:
            return


def _shape(layer: nn.Module) -> Any:
    """What layers must have in common to share a weight."""
    kind = kind_of(layer)
    assert kind is not None
    operation = kind.of(layer)
    return kind, operation.groups, operation.features


def _matches(patterns: Patterns, named: dict[str, nn.Module], argument: str) -> set[str]:
    single = isinstance(patterns, str | re.Pattern | type) or not isinstance(patterns, Iterable)
    matched: set[str] = set()
    for pattern in [patterns] if single else patterns:  # type: ignore[union-attr]
        if isinstance(pattern, str):
            found = {name for name in named if name == pattern or name.startswith(pattern + ".")}
        elif isinstance(pattern, re.Pattern):
            found = {name for name in named if pattern.search(name)}
        elif isinstance(pattern, type) and issubclass(pattern, nn.Module):
            found = {name for name, module in named.items() if isinstance(module, pattern)}
        else:
            raise TypeError(f"{argument} takes module types, names or compiled regular expressions, got {pattern!r}")
        if not found:
            raise ValueError(f"{argument}={pattern!r} matches no module of the model; {_hint(pattern, named)}")
        matched |= found
    return matched


def _hint(pattern: Pattern, named: dict[str, nn.Module]) -> str:
    close = difflib.get_close_matches(str(pattern), named, n=3) if isinstance(pattern, str) else []
    if close:
        return f"did you mean {' or '.join(map(repr, close))}?"
    names = [name for name in named if name]
    if isinstance(pattern, type):
        names = sorted({type(module).__name__ for module in named.values()})
    return f"there are {names[:8]}" + (" …" if len(names) > 8 else "")
