"""``Correction``: what ``attach`` returns."""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from consequent.averages.choice import why_own_inputs
from consequent.averages.layer import AveragedLayer
from consequent.averages.look import Look
from consequent.averages.step import Averages
from consequent.describe import describe
from consequent.layers import kind_of
from consequent.maths.damping import DEFAULT, DEFAULT_OF_SGD, Damping
from consequent.minibatch.entry import Entry
from consequent.minibatch.layer import OwnInputs
from consequent.minibatch.product import FAILED
from consequent.selection import Selection, shown
from consequent.settings import Settings
from consequent.stepping import Stepping

_corrections: "weakref.WeakSet[Correction]" = weakref.WeakSet()


class Correction:
    """The correction of a model's gradients; :func:`consequent.attach` makes it.

    Attributes:
        corrected: the layers that are corrected, by name.
        plain: the modules that keep their plain gradient, by name, and why.
        own_inputs: the layers that are corrected with each mini-batch's own inputs, by name,
        why_own_inputs: and why so.
        averaged: the layers that are corrected by averages, by name.
        settings: as ``attach`` was given them.
        optimizers: the class names of the optimisers.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], model: nn.Module, selection: Selection, settings: Settings
    ) -> None:
        self.corrected, self.plain, self.settings = selection.corrected, selection.plain, settings
        self.optimizers = [type(optimizer).__name__ for optimizer in optimizers]
        self._references = [weakref.ref(optimizer) for optimizer in optimizers]
        holders = {p: one for one in reversed(optimizers) for group in one.param_groups for p in group["params"]}
        _refuse_foreign(self.optimizers, self.corrected, holders)
        self._entry = Entry(model)
        self.own_inputs: dict[str, OwnInputs] = {}
        self.why_own_inputs: dict[str, str] = {}
        self.averaged: dict[str, AveragedLayer] = {}
        self._sort(holders, optimizers[0])
        for own in self.own_inputs.values():
            own.put_on()
        if self.own_inputs:
            self._entry.hold()
        self._steppings = [self._stepping(optimizer, holders) for optimizer in optimizers]
        self._entry.correction = self  # which lives as long as the model, even if nobody keeps it
        _corrections.add(self)

    def _sort(self, holders: Mapping[Tensor, Optimizer], first: Optimizer) -> None:
        """Give each layer its mechanism."""
        names: dict[Tensor, list[str]] = {}
        for name, layer in self.corrected.items():
            names.setdefault(_weight(layer), []).append(name)
        for name, layer in self.corrected.items():
            kind, weight = kind_of(layer), _weight(layer)
            assert kind is not None
            damping = self.settings.damping or _default_damping(holders.get(weight, first))
            averaging, uses = self.settings.averaging, len(names[weight])
            why = why_own_inputs(layer, kind.of(layer), averaging, holders, uses)
            options = (name, layer, kind, damping, self.settings.loss_reduction)
            if why is None:
                self.averaged[name] = AveragedLayer(*options, Look(layer, kind, self._entry))
            else:
                self.why_own_inputs[name] = why
                self.own_inputs[name] = OwnInputs(*options, self._entry, self.own_inputs.get(names[weight][0]))

    def _stepping(self, optimizer: Optimizer, holders: Mapping[Tensor, Optimizer]) -> Stepping:
        averaged = [one for one in self.averaged.values() if holders.get(one.weight) is optimizer]
        own = [one for one in self.own_inputs.values() if holders.get(_weight(one.module)) is optimizer]
        settings = self.settings
        averages = Averages(averaged, self._entry, settings.averaging or 0.0, settings.refresh)
        return Stepping(optimizer, averages, own, settings.bound, self._count_layers)

    def _count_layers(self) -> int:
        """How many weights of corrected layers have a gradient."""
        weights = [_weight(layer) for layer in self.corrected.values()]
        return len({id(weight) for weight in weights if weight.grad is not None})

    @property
    def is_abandoned(self) -> bool:
        """Whether nobody holds any of its optimisers any more."""
        return all(reference() is None for reference in self._references)

    @property
    def failed(self) -> int:
        """How many factorisations failed so far, and got a shortened plain gradient. On a GPU this waits for it."""
        told = [own.probe.grad for own in self.own_inputs.values() if own.probe.grad is not None]
        found = sum(float(grad[FAILED]) for grad in told) + sum(own.failed for own in self.own_inputs.values())
        return int(found) + sum(int(layer.failed) for layer in self.averaged.values())

    @property
    def holds_bound(self) -> bool:
        """Whether the bound is held for any layer."""
        return any(stepping.holds_bound for stepping in self._steppings) and len(self.corrected) > 1

    def detach(self) -> None:
        """Take everything off the model and the optimisers, which are plain again."""
        if self not in _corrections:
            return
        _corrections.remove(self)
        for stepping in self._steppings:
            stepping.remove()
        if self.own_inputs:
            self._entry.release()
        for own in self.own_inputs.values():
            own.take_off()

    def state_dict(self) -> dict[str, Any]:
        """The averages of each optimiser's layers, for ``torch.save``. Own inputs have no state."""
        return {"averages": [stepping.averages.state_dict() for stepping in self._steppings]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state: the next step is the one that would have followed."""
        kept = state.get("averages")
        if not isinstance(kept, list) or len(kept) != len(self._steppings):
            raise ValueError(
                f"this is no state of a correction of {len(self._steppings)} optimisers: its keys are {sorted(state)}"
            )
        for stepping, averages in zip(self._steppings, kept, strict=True):
            stepping.averages.load_state_dict(averages)

    def __repr__(self) -> str:
        return describe(self)

    def __reduce__(self) -> Any:
        return type(None), ()  # a copied or pickled model is plain


def corrected_layers() -> set[nn.Module]:
    """The layers that are corrected already; corrections whose optimisers are gone are taken off first."""
    for correction in [one for one in _corrections if one.is_abandoned]:
        correction.detach()
    return {layer for correction in _corrections for layer in correction.corrected.values()}


def _weight(layer: nn.Module) -> Tensor:
    weight = layer._parameters["weight"]
    assert weight is not None
    return weight


def _default_damping(optimizer: Optimizer) -> Damping:
    return DEFAULT_OF_SGD if isinstance(optimizer, SGD) else DEFAULT


def _refuse_foreign(
    optimizers: Sequence[str], layers: Mapping[str, nn.Module], holders: Mapping[Tensor, Optimizer]
) -> None:
    if not any(parameter in holders for layer in layers.values() for parameter in layer.parameters(recurse=False)):
        names = ", ".join(map(shown, list(layers)[:3])) + (", …" if len(layers) > 3 else "")
        raise ValueError(
            f"{' and '.join(optimizers)} holds no parameter of the layers to be corrected ({names}): was it made from "
            "another model, or from a copy of this one? Give it this model's parameters()"
        )
