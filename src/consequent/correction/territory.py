"""No gradient is corrected by two corrections, and no layer is split between them: what attaching refuses."""

import weakref
from collections.abc import Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from consequent.capture.at_step import StepCorrector
from consequent.capture.capture import Capture
from consequent.options.parameter_groups import Groups, parameters_of
from consequent.ranks.sharded_tensors import is_sharded
from consequent.reports.guards import refuse_parameters_in_two, refuse_split_layers


class Territory:
    """The parameters that one correction is for.

    Args:
        capture: its layers.
        groups: of its optimisers.
        corrector: what it has recorded.
        at: when it corrects.
    """

    def __init__(self, capture: Capture, groups: Groups, corrector: StepCorrector, at: str) -> None:
        self._capture = capture
        self._groups = groups
        self._corrector = corrector
        self._at = at
        _LIVE.add(self)

    def by_layer(self) -> dict[nn.Module, list[Tensor]]:
        """The parameters of each layer."""
        layers = self._capture.layers.values()
        return {layer: [p for unit in self._capture.units_of(layer) for p in unit] for layer in layers}

    def parameters(self) -> set[Tensor]:
        """Those of all layers."""
        return {p for parameters in self.by_layer().values() for p in parameters}

    def _held_by_layer(self) -> dict[nn.Module, set[Tensor]]:
        """Of each layer, the parameters that the optimisers hold."""
        return {layer: set(filter(self._groups.owns, its)) for layer, its in self.by_layer().items()}

    def checked(self, optimizers: Sequence[Optimizer], *, foresight: bool) -> set[Tensor]:
        """The parameters of layers to correct that the optimisers hold. Raises where these cannot be attached to.

        Args:
            optimizers: all of them.
            foresight: whether their step is to be looked at.
        """
        layers = self.by_layer()
        mine = {p for optimizer in optimizers for p in parameters_of(optimizer)}
        mine &= {p for parameters in layers.values() for p in parameters}
        whole = set(self._capture.model.parameters()) | mine
        strange = [one for one in optimizers if not mine or whole.isdisjoint(parameters_of(one))]
        if strange:
            raise ValueError(
                f"{names_of(strange)} holds no parameter of the {len(layers)} layers to correct; "
                "was the optimiser made for another model, or before the model's parameters were replaced?"
            )
        if len(optimizers) > 1:
            self._refuse_what_several_cannot(optimizers, layers, foresight=foresight)
        self._refuse_others_on(optimizers, mine)
        return mine

    def _refuse_what_several_cannot(
        self, optimizers: Sequence[Optimizer], layers: dict[nn.Module, list[Tensor]], *, foresight: bool
    ) -> None:
        self._refuse_parameters_in_two(optimizers)
        if foresight:
            raise ValueError(
                f"foresight=True looks at what one optimiser's step does, and {names_of(optimizers)} make a step "
                "together: leave it out, or put all parameters in one optimiser"
            )
        for layer, parameters in layers.items():
            holders = {id(one) for one in optimizers if not set(parameters_of(one)).isdisjoint(parameters)}
            if len(holders) > 1 and self._at == "step" and is_sharded(parameters[0]):
                raise ValueError(
                    f"layer {self._capture.names[layer]!r}: its weight and its bias are sharded and lie in two "
                    "optimisers, which is not corrected at the step. Put both in one optimiser, or attach with "
                    'at="backward".'
                )

    def _refuse_parameters_in_two(self, optimizers: Sequence[Optimizer]) -> None:
        by_name = {self._capture.names[layer]: its for layer, its in self.by_layer().items()}
        refuse_parameters_in_two(by_name, optimizers)

    def _refuse_others_on(self, optimizers: Sequence[Optimizer], mine: set[Tensor]) -> None:
        """Raise if another correction would correct the same gradients, or a part of the same layers.

        Args:
            optimizers: to be attached.
            mine: the parameters of layers that they hold.
        """
        for other in self._others():
            theirs = other._groups.optimizers
            is_same = any(one is their for one in optimizers for their in theirs)
            both = {p for p in mine & other.parameters() if other._groups.owns(p)}
            if both and (is_same or "backward" in (self._at, other._at)):
                raise RuntimeError(
                    f"{names_of(theirs) or 'another correction'}: attached to these layers already, "
                    "which would be corrected twice. Keep the first correction, or detach() it."
                )
            if theirs:
                held = {layer: mine.intersection(its) for layer, its in self.by_layer().items()}
                refuse_split_layers(held, other._held_by_layer(), self._capture.names)

    def refuse_layers_split_since(self) -> None:
        """A group was added: weight and bias of a layer may lie in two corrections' optimisers now, or one in both."""
        self._refuse_parameters_in_two(self._groups.optimizers)
        for other in self._others():
            if other._groups.optimizers and self._groups.optimizers:
                refuse_split_layers(self._held_by_layer(), other._held_by_layer(), self._capture.names)

    def _others(self) -> list["Territory"]:
        return [other for other in _LIVE if other is not self and other._capture.is_installed]

    def other_correctors(self) -> list[StepCorrector]:
        """What other corrections have recorded: they may have rewritten the same gradients."""
        return [other._corrector for other in _LIVE if other is not self]


_LIVE: "weakref.WeakSet[Territory]" = weakref.WeakSet()  # all that exist


def is_corrected(parameter: Tensor) -> bool:
    """Whether somebody corrects the parameter's gradient now."""
    return any(
        one._capture.is_installed and one._groups.owns(parameter) and parameter in one.parameters() for one in _LIVE
    )


def names_of(optimizers: Sequence[Optimizer]) -> str:
    """Their classes, in a message."""
    return " and ".join(type(optimizer).__name__ for optimizer in optimizers)
