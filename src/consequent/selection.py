"""Which modules of a model are corrected, which keep their plain gradient, and why."""

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from consequent.dtensor import is_sharded, why_not_by_rows
from consequent.layers import Layer, groups, is_layer, is_transposed, spatial_dims

Pattern = type[nn.Module] | str | re.Pattern[str]
Patterns = Pattern | Iterable[Pattern]


@dataclass
class Selection:
    """The modules with parameters of a model, by name."""

    corrected: dict[str, Layer]
    plain: dict[str, str]  # name -> why


def select_layers(model: nn.Module, include: Patterns | None, exclude: Patterns) -> Selection:
    """Sort the modules of a model into corrected and plain ones.

    Args:
        model: the model.
        include: types, names or compiled regular expressions; None is every layer that can be corrected. A name
            stands for the module and everything inside it; a regular expression is searched in the name.
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
    corrected: dict[str, Layer] = {}
    plain: dict[str, str] = {}
    reason: str | None
    for name, module in named.items():
        if not _has_parameters(module):
            continue
        if not is_layer(module):
            reason = f"{type(module).__name__} is not a Linear or Conv1d/2d/3d layer"
        elif name in unwanted:
            reason = "excluded"
        elif wanted is not None and name not in wanted:
            reason = "not included"
        else:
            reason = _why_not(name, module, named.get(name.rpartition(".")[0]))
        if reason is None:
            assert is_layer(module)
            corrected[name] = module
        else:
            plain[name] = reason
    _leave_out_shared(corrected, plain, named)
    if not corrected:
        listed = "\n".join(f"  {name or '(the model itself)'}: {reason}" for name, reason in plain.items())
        raise ValueError(
            "nothing in this model can be corrected: it needs an nn.Linear or nn.Conv1d/2d/3d layer that is neither "
            f"excluded nor left out by include=…\n{listed or '  (the model has no parameters)'}"
        )
    return Selection(corrected, plain)


def readable_name(name: str) -> str:
    """A module's name without what ``torch.compile`` and other wrappers put before it."""
    return re.sub(r"(^|\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.|$)", "", name).lstrip(".")


def _has_parameters(module: nn.Module) -> bool:
    return any(p is not None for p in module._parameters.values()) or hasattr(module, "parametrizations")


def _why_not(name: str, module: Layer, parent: nn.Module | None) -> str | None:
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
    if is_sharded(weight) and is_transposed(module):
        return "its weight is sharded by its inputs, not by its outputs"
    if not weight.is_floating_point():
        return f"its weight is {weight.dtype}"
    if isinstance(parent, nn.MultiheadAttention):
        return "nn.MultiheadAttention uses its weight without calling it"
    if module.bias is not None and "bias" not in module._parameters:
        return "its bias is not a parameter of its own"
    return None


def _leave_out_shared(corrected: dict[str, Layer], plain: dict[str, str], named: dict[str, nn.Module]) -> None:
    """A shared weight is corrected only if all its uses are seen, and are matrix products of one shape."""
    owners: dict[Tensor, list[str]] = {}
    for name, module in named.items():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(parameter, []).append(name)
    while True:  # what is left out may be shared in turn
        left_out: dict[str, str] = {}
        for name, layer in corrected.items():
            for other in owners[layer.weight]:
                if other not in corrected:
                    left_out[name] = f"its weight is shared with {other!r}, which is not corrected"
                elif _shape(layer) != _shape(corrected[other]):
                    left_out[name] = f"its weight is shared with {other!r}, which uses it in another shape"
            for other in owners.get(layer.bias, []) if layer.bias is not None else []:
                if named[other]._parameters.get("weight") is not layer.weight:
                    left_out[name] = f"its bias is shared with {other!r}, which has another weight"
        plain |= left_out
        for name in left_out:
            del corrected[name]
        if not left_out:
            return


def _shape(layer: Layer) -> tuple[int, int, bool]:
    return spatial_dims(layer), groups(layer), is_transposed(layer)


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
            hint = f"there are {names[:8]}" + (" …" if len(names) > 8 else "")
            if close:
                hint = f"did you mean {' or '.join(map(repr, close))}?"
            raise ValueError(f"{argument}={pattern!r} matches no module of the model; {hint}")
        matched |= found
    return matched
