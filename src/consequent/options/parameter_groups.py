"""What the optimisers' parameter groups say: which parameters they hold, their learning rates and dampings."""

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from operator import is_
from typing import Any

from torch import Tensor, nn
from torch.optim import ASGD, SGD, Optimizer

from consequent.capture.torch_internals import answers_at_once
from consequent.maths.damping import DEFAULT, DEFAULT_OF_OTHERS, Damping
from consequent.options.settings import check_largest_block


def default_damping(optimizer: Optimizer | None) -> Damping:
    """λ where nobody has chosen one."""
    return DEFAULT if optimizer is None or isinstance(optimizer, SGD | ASGD) else DEFAULT_OF_OTHERS


def damping_in(group: dict[str, Any]) -> Damping | None:
    """λ of a parameter group's own, if it has one. Raises if it can be none."""
    return Damping.chosen(group.get("damping"), group.get("relative_damping"), " (in a parameter group)")


def largest_block_in(group: dict[str, Any], default: int | None) -> int | None:
    """How many features are solved for together in a parameter group. Raises if it can be no such number."""
    largest_block: int | None = group.get("largest_block", default)
    check_largest_block(largest_block, " (in a parameter group)")
    return largest_block


class Groups:
    """The parameter groups of one optimiser or several; without any, all parameters of the model in a group by itself.

    Attributes:
        model: the model.
        chosen: λ of groups that have none of their own; None: the default of their optimiser.
        largest_block: B of groups that have none of their own; None: features are not cut into blocks.
    """

    def __init__(self, model: nn.Module, chosen: Damping | None, largest_block: int | None = None) -> None:
        self.model = model
        self.chosen = chosen
        self.largest_block = largest_block
        self._default = DEFAULT  # of the first of the optimisers that were taken last
        self._optimizers: tuple[weakref.ref[Optimizer], ...] = ()
        self._group_of: dict[Tensor, dict[str, Any]] = {}
        self._optimizer_of: dict[Tensor, weakref.ref[Optimizer]] = {}
        self._seen: list[tuple[dict[str, Any], list[Tensor]]] = []  # the groups that this was made from

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimisers, as long as somebody else holds them."""
        return [optimizer for held in self._optimizers if (optimizer := held()) is not None]

    @property
    def are_several(self) -> bool:
        """Whether more than one optimiser was taken."""
        return len(self._optimizers) > 1

    def take(self, optimizers: Sequence[Optimizer], when_gone: Callable[[], None]) -> None:
        """Look at these optimisers from now on. They are held weakly: one that is thrown away is gone.

        Args:
            optimizers: all of them.
            when_gone: called when the last of them is thrown away.
        """

        def one_is_gone(_: Any) -> None:
            if not self.optimizers:
                when_gone()

        self._optimizers = tuple([weakref.ref(optimizer, one_is_gone) for optimizer in optimizers])
        self._default = default_damping(optimizers[0]) if optimizers else self._default
        self.read_again()

    def param_groups(self) -> list[dict[str, Any]]:
        """Those of all optimisers."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def read_again(self) -> bool:
        """Look at the groups anew; whether the optimisers hold other parameters than before."""
        groups = self.param_groups()
        if len(groups) == len(self._seen) and all(map(_is_as_seen, groups, self._seen)):
            return False
        self._seen = [(group, list(group["params"])) for group in groups]
        self._group_of = {p: group for group in groups for p in group["params"]}
        before, self._optimizer_of = self._optimizer_of, {}
        for held in self._optimizers:
            self._optimizer_of |= dict.fromkeys(parameters_of(held()), held)
        return before != self._optimizer_of

    def forget(self) -> None:
        """Be as if the groups had never been read."""
        self._group_of, self._optimizer_of, self._seen = {}, {}, []

    def group_of(self, parameter: Tensor) -> dict[str, Any] | None:
        """The group that holds the parameter, if any does."""
        return self._group_of.get(parameter)

    def optimizer_of(self, parameter: Tensor) -> Optimizer | None:
        """The optimiser that holds the parameter, if any does."""
        held = self._optimizer_of.get(parameter)
        return None if held is None else held()

    def owns(self, parameter: Tensor) -> bool:
        """Whether an optimiser holds the parameter."""
        return not self._optimizers or parameter in self._group_of

    def are_apart(self, parameters: Iterable[Tensor]) -> bool:
        """Whether the parameters lie in more than one group, of one optimiser or of several."""
        return len(self._seen) > 1 and len({id(self._group_of.get(p)) for p in parameters}) > 1

    def parameters(self) -> list[Tensor]:
        """All parameters that a step changes."""
        return list(self._group_of) if self._optimizers else list(self.model.parameters())

    def dampings(self) -> list[Damping]:
        """All that are in use, each once."""
        used = dict.fromkeys(
            damping_in(group) or self.chosen or default_damping(optimizer)
            for optimizer in self.optimizers
            for group in optimizer.param_groups
        )
        return list(used) or [self.chosen or self._default]

    @property
    def default(self) -> Damping:
        """λ of groups without one of their own; where all have the same one, that."""
        used = self.dampings()
        return used[0] if len(used) == 1 else self.chosen or self._default

    @property
    def lost_its_optimizer(self) -> bool:
        """Whether there were optimisers, and nobody else held any of them."""
        return bool(self._optimizers) and not self.optimizers

    def damping_of(self, parameter: Tensor) -> Damping:
        """λ for a parameter: its group's own, the one that was chosen, or the default of its optimiser."""
        group = self._group_of.get(parameter)
        own = damping_in(group) if group is not None and ("damping" in group or "relative_damping" in group) else None
        return own or self.chosen or default_damping(self.optimizer_of(parameter))

    def largest_block_of(self, parameter: Tensor) -> int | None:
        """B for a parameter: its group's own, or the default."""
        group = self._group_of.get(parameter)
        return self.largest_block if group is None else largest_block_in(group, self.largest_block)

    def learning_rate_of(self, parameter: Tensor) -> float:
        """μ for a parameter: how far a step goes down the gradient in ``.grad``."""
        group = self._group_of.get(parameter, {})
        rate = float(group.get("lr", math.nan)) * (-1 if group.get("maximize") else 1)
        grad_scale = getattr(self.optimizer_of(parameter), "grad_scale", None)  # a fused optimiser with a GradScaler
        return rate if grad_scale is None else rate / float(grad_scale)

    def rate_in_the_long_run(self, parameter: Tensor) -> float | None:
        """How far a gradient moves a parameter in all, momentum included; None where that is not proportional to it.

        None also where it cannot be known without waiting: a learning rate on a GPU, a fused optimiser with a
        GradScaler. And with several optimisers: what becomes of a gradient until the others step is not known.
        """
        if self.are_several:
            return None
        optimizer, group = self.optimizer_of(parameter), self._group_of.get(parameter)
        if not isinstance(optimizer, SGD) or group is None or getattr(optimizer, "grad_scale", None) is not None:
            return None
        if isinstance(group["lr"], Tensor) and not answers_at_once(group["lr"]):
            return None
        momentum = float(group["momentum"])
        if not 0 <= momentum < 1:
            return None
        rate = abs(float(group["lr"]))
        is_first = "momentum_buffer" not in optimizer.state.get(parameter, {})  # then torch does not dampen it
        dampening = 0.0 if is_first else float(group["dampening"])
        return rate * (1 - dampening) / (1 - momentum) if momentum else rate

    def change_default(self, default: Damping) -> None:
        """Change λ for all groups that have none of their own (a ready-made optimiser's groups repeat the default)."""
        old = self.default
        for group in self.param_groups():
            if damping_in(group) == old:
                group.pop("damping", None)
                group.pop("relative_damping", None)
                group["relative_damping" if default.relative else "damping"] = default.value
        self.chosen = default


def parameters_of(optimizer: Optimizer | None) -> list[Tensor]:
    """All that an optimiser holds."""
    return [] if optimizer is None else [p for group in optimizer.param_groups for p in group["params"]]


def _is_as_seen(group: dict[str, Any], seen: tuple[dict[str, Any], list[Tensor]]) -> bool:
    """Whether it is the same group with the same parameters; asked often, and tensors are slow to look up."""
    known, parameters = seen
    now = group["params"]
    return group is known and len(now) == len(parameters) and all(map(is_, now, parameters))
