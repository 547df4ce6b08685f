"""What happens at the steps of one optimiser: averages are multiplied into ``.grad``, and the bound is held."""

from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import SGD, Optimizer

from consequent.averages.ranks import ranks
from consequent.averages.step import Averages
from consequent.minibatch.bounding import shorten
from consequent.minibatch.layer import OwnInputs


class Stepping:
    """The layers of one optimiser, and its steps.

    Args:
        optimizer: the optimiser.
        averages: its averaged layers.
        own_inputs: its layers with own inputs.
        bound: β; None: no bound.
        count_layers: how many corrected layers of the model have a gradient. One alone is not bounded.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        averages: Averages,
        own_inputs: Sequence[OwnInputs],
        bound: float | None,
        count_layers: Callable[[], int],
    ) -> None:
        self.averages = averages
        self._own_inputs = [own for own in own_inputs if own.weight_owner is own]
        self._bound = bound if isinstance(optimizer, SGD) else None
        self._count_layers = count_layers
        self._handle = None
        for own in own_inputs:
            own.measured = self._bound is not None
        if averages.layers or (self._bound is not None and own_inputs):
            self._handle = optimizer.register_step_pre_hook(self._before_step)

    @property
    def holds_bound(self) -> bool:
        """Whether any layer is bounded. Of own inputs, each of several ranks would find another bound."""
        return self._bound is not None and (bool(self.averages.layers) or ranks() == 1)

    def remove(self) -> None:
        """Leave the optimiser and the layers alone."""
        self.averages.look_away()
        if self._handle is not None:
            self._handle.remove()

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Correct now, or after each call of the closure that computes the gradients."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._correct(optimizer)
            return None

        def corrected() -> Any:
            loss = closure()
            self._correct(optimizer)
            return loss

        return args[:1], {**kwargs, "closure": corrected}

    def _correct(self, optimizer: Any) -> None:
        groups = {p: group for group in optimizer.param_groups for p in group["params"]}
        bound = self._bound if self._count_layers() > 1 else None
        scale = getattr(optimizer, "grad_scale", None)  # a GradScaler's, by which fused optimisers divide themselves
        scale = 1 if scale is None else scale
        self.averages.before_step(groups, bound, scale)
        if bound is not None and ranks() == 1:
            shorten(self._own_inputs, groups, bound, scale)
