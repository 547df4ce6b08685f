"""``Correction``: what ``attach`` returns."""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from consequent.averages.average import AveragedLayer
from consequent.averages.choice import why_own_inputs
from consequent.averages.observer import InputObserver
from consequent.averages.step import Averages
from consequent.describe import describe
from consequent.layers import kind_of
from consequent.maths.damping import DEFAULT, DEFAULT_OF_SGD, Damping
from consequent.minibatch.model_forward import ModelForward
from consequent.minibatch.own_inputs import Gatherer, OwnInputs
from consequent.minibatch.product import FAILED
from consequent.optimizer_step import OptimizerStep
from consequent.selection import Selection, display_name
from consequent.settings import GONE_METHODS, Settings

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
        optimizer_of = {p: one for one in reversed(optimizers) for group in one.param_groups for p in group["params"]}
        _refuse_foreign(self.optimizers, self.corrected, optimizer_of)
        _refuse_twice(optimizers, self.corrected)
        self._model_forward = ModelForward(model)
        self.own_inputs: dict[str, OwnInputs] = {}
        self.why_own_inputs: dict[str, str] = {}
        self.averaged: dict[str, AveragedLayer] = {}
        self._optimizer_steps: list[OptimizerStep] = []
        self._sort(optimizer_of, optimizers[0])
        self._gatherer = Gatherer(list(self.own_inputs.values())) if self.own_inputs else None
        self._model_forward.gathers = self._gatherer
        for own in self.own_inputs.values():
            own.put_on()
        if self.own_inputs:
            self._model_forward.hold()
        _corrections.add(self)
        try:
            for optimizer in optimizers:
                self._optimizer_steps.append(self._optimizer_step(optimizer, optimizer_of))
        except BaseException:
            self.detach()
            raise
        self._model_forward.correction = self  # which lives as long as the model, even if nobody keeps it

    def _sort(self, optimizer_of: Mapping[Tensor, Optimizer], first: Optimizer) -> None:
        """Give each layer its mechanism."""
        names: dict[Tensor, list[str]] = {}
        for name, layer in self.corrected.items():
            names.setdefault(_weight(layer), []).append(name)
        for name, layer in self.corrected.items():
            kind, weight = kind_of(layer), _weight(layer)
            assert kind is not None
            damping = self.settings.damping or _default_damping(optimizer_of.get(weight, first))
            uses = len(names[weight])
            averaging = None if self.settings.averaging is None else self.settings.beta
            why = why_own_inputs(layer, kind.of(layer), averaging, optimizer_of, uses)
            reduction, forward = self.settings.loss_reduction, self._model_forward
            if why is None:
                observer = InputObserver(layer, kind, reduction, forward)
                self.averaged[name] = AveragedLayer(name, layer, kind, damping, observer)
            else:
                same_weight = self.own_inputs.get(names[weight][0])
                self.why_own_inputs[name] = why
                self.own_inputs[name] = OwnInputs(name, layer, kind, damping, reduction, forward, same_weight)

    def _optimizer_step(self, optimizer: Optimizer, optimizer_of: Mapping[Tensor, Optimizer]) -> OptimizerStep:
        averaged = [one for one in self.averaged.values() if optimizer_of.get(_weight(one.layer)) is optimizer]
        own = [one for one in self.own_inputs.values() if optimizer_of.get(_weight(one.module), optimizer) is optimizer]
        settings, forward = self.settings, self._model_forward
        reduction, is_auto = settings.loss_reduction, settings.is_auto
        averages = Averages(averaged, forward, settings.beta, settings.refresh, reduction, is_auto=is_auto)
        return OptimizerStep(optimizer, averages, own, settings.bound, list(self.corrected.values()), self._adopt)

    def _adopt(self, layer: AveragedLayer) -> OwnInputs:
        """Give an averaged layer own inputs instead."""
        name, reduction = layer.name, self.settings.loss_reduction
        del self.averaged[name]
        own = OwnInputs(name, layer.layer, layer.kind, layer.damping, reduction, self._model_forward)
        self.why_own_inputs[name] = "fewer rows than features at the first step"
        if not self.own_inputs:
            self._model_forward.hold()
        self.own_inputs[name] = own
        own.put_on()
        self._gatherer = self._model_forward.gathers = Gatherer(list(self.own_inputs.values()))
        return own

    def is_undecided(self, name: str) -> bool:
        """Whether it is not known yet which of the two mechanisms a layer gets."""
        return any(layer.name == name for step in self._optimizer_steps for layer in step.averages.undecided)

    @property
    def is_abandoned(self) -> bool:
        """Whether nobody holds any of its optimisers any more."""
        return all(reference() is None for reference in self._references)

    @property
    def failed(self) -> int:
        """How many factorisations failed so far, and were solved in another way. On a GPU this waits for it."""
        told = [own.probe.grad for own in self.own_inputs.values()]
        told += [self._gatherer.probe.grad] if self._gatherer is not None else []
        found = sum(float(grad[..., FAILED].sum()) for grad in told if grad is not None)
        return round(found) + sum(step.failed for step in self._optimizer_steps)

    @property
    def holds_bound(self) -> bool:
        """Whether the bound is held for any layer."""
        weights = {id(_weight(layer)) for layer in self.corrected.values()}
        return any(step.holds_bound for step in self._optimizer_steps) and len(weights) > 1

    def detach(self) -> None:
        """Take everything off the model and the optimisers, which are plain again."""
        if self not in _corrections:
            return
        _corrections.remove(self)
        for step in self._optimizer_steps:
            step.remove()
        if self.own_inputs:
            self._model_forward.release()
        for own in self.own_inputs.values():
            own.take_off()

    def state_dict(self) -> dict[str, Any]:
        """The averages of each optimiser's layers, for ``torch.save``. Own inputs have no state."""
        return {"averages": [step.averages.state_dict() for step in self._optimizer_steps]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state: the next step is the one that would have followed."""
        kept = state.get("averages") if isinstance(state, Mapping) else None
        if not isinstance(kept, list) or len(kept) != len(self._optimizer_steps):
            number, what = len(self._optimizer_steps), f"it is a {type(state).__name__}"
            what = f"its keys are {sorted(state)}" if isinstance(state, Mapping) else what
            raise ValueError(f"this is no state of a correction of {number} optimisers: {what}")
        read = [step.averages.read(averages) for step, averages in zip(self._optimizer_steps, kept, strict=True)]
        for step, averages in zip(self._optimizer_steps, read, strict=True):
            step.averages.go_on_from(averages)
            step.give_own_inputs()

    def __getattr__(self, name: str) -> Any:
        if name in GONE_METHODS:
            raise AttributeError(f"correction.{name} is gone since the third edition; instead: {GONE_METHODS[name]}")
        raise AttributeError(f"a Correction has no attribute {name!r}")

    def __repr__(self) -> str:
        return describe(self)

    def __reduce__(self) -> Any:
        return type(None), ()  # a copied or pickled model is plain


def corrected_layers(model: nn.Module) -> set[nn.Module]:
    """The layers of a model that are corrected already; corrections whose optimisers are gone are taken off first."""
    modules = set(model.modules())
    found: set[nn.Module] = set()
    for correction in list(_corrections):
        its = modules.intersection(correction.corrected.values())
        if its and correction.is_abandoned:
            correction.detach()
        else:
            found |= its
    return found


def _weight(layer: Any) -> Tensor:
    weight: Tensor = layer.weight
    return weight


def _default_damping(optimizer: Optimizer) -> Damping:
    return DEFAULT_OF_SGD if isinstance(optimizer, SGD) else DEFAULT


def _refuse_foreign(
    optimizers: Sequence[str], layers: Mapping[str, nn.Module], optimizer_of: Mapping[Tensor, Optimizer]
) -> None:
    if not any(parameter in optimizer_of for layer in layers.values() for parameter in layer.parameters(recurse=False)):
        names = ", ".join(map(display_name, list(layers)[:3])) + (", …" if len(layers) > 3 else "")
        raise ValueError(
            f"{' and '.join(optimizers)} holds no parameter of the layers to be corrected ({names}): was it made from "
            "another model, or from a copy of this one? Give it this model's parameters()"
        )


def _refuse_twice(optimizers: Sequence[Optimizer], layers: Mapping[str, nn.Module]) -> None:
    held = [{p for group in one.param_groups for p in group["params"]} for one in optimizers]
    for name, layer in layers.items():
        for parameter in layer.parameters(recurse=False):
            holders = [type(one).__name__ for one, its in zip(optimizers, held, strict=True) if parameter in its]
            if len(holders) > 1:
                raise ValueError(
                    f"{' and '.join(holders)} hold the same parameter of layer {display_name(name)!r}, which would get "
                    "two steps: give each parameter to one of the optimisers"
                )
