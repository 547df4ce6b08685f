"""Samples enter the model: N, one number for all layers, and how often each weight is used in a forward pass."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from consequent.maths.torch_private import in_backward_pass
from consequent.minibatch.forwards import Replacement
from consequent.minibatch.gather import Calls, Gathering


class WeightCalls:
    """How often a weight is used.

    Attributes:
        in_this_pass: the calls in the forward pass under way.
        in_last_pass: how many there were in the one before. Compiled code goes by this.
    """

    def __init__(self) -> None:
        self.in_this_pass = Calls()
        self.in_last_pass = 1


class ForwardPass(NamedTuple):
    """One call of the model with gradients wanted, though perhaps not of each part of it.

    Attributes:
        samples: N, the leading dimension of the first tensor that entered; None if none did.
        is_repeated: whether checkpointing computes it once more.
        gathering: of what its backward passes reach; None: each layer is corrected for itself.
    """

    samples: int | None
    is_repeated: bool
    gathering: Gathering | None = None


class ModelForward(Replacement):
    """The model's ``forward``: it knows of the forward pass that is under way.

    Attributes:
        current: that pass, the outermost one if the model calls itself.
        weights: how often each is used.
        counters: told of the samples of each pass.
        builds_graphs: whether there was a pass outside of backward passes, so that those inside are repeated ones.
        gathers: makes what gathers, for each pass.
        correction: whose it is.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.current: ForwardPass | None = None
        self.weights: list[WeightCalls] = []
        self.counters: list[Callable[[int], None]] = []
        self.builds_graphs = False
        self.gathers: Callable[[], Gathering | None] | None = None
        self.correction: Any = None
        self._users = 0

    def hold(self) -> None:
        """Somebody needs it: it is put on, and stays so until as many have let it go."""
        self._users += 1
        if self._users == 1:
            self.put_on()

    def release(self) -> None:
        """Somebody who held it does not need it any more."""
        self._users -= 1
        if self._users == 0:
            self.take_off()

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The plain forward, with the pass under way meanwhile. Evaluations, also those of other threads, are none."""
        if self.current is not None or not torch.is_grad_enabled():
            return self.plain(self.module, args, kwargs)
        tensor = first_tensor((args, kwargs))
        is_repeated = len(self.counters) > 0 and in_backward_pass() and self.builds_graphs
        gathering = None if self.gathers is None or torch.compiler.is_compiling() else self.gathers()
        self.current = ForwardPass(None if tensor is None else tensor.shape[0], is_repeated, gathering)
        try:
            if self.counters and not in_backward_pass():
                self.builds_graphs = True
            if tensor is not None and not is_repeated:
                for count in self.counters:
                    count(tensor.shape[0])
            for weight in self.weights:
                weight.in_this_pass = Calls()
            return self.plain(self.module, args, kwargs)
        finally:
            for weight in self.weights:
                weight.in_last_pass = weight.in_this_pass.number or weight.in_last_pass
            self.current = None
            if gathering is not None:
                gathering.aliases = {}  # through which it would hold itself


def first_tensor(value: Any) -> Tensor | None:
    """The first tensor with a leading dimension in nested arguments.

    Example:
        >>> first_tensor(([3, torch.tensor(1.0)], {"x": torch.zeros(2, 5)})).shape
        torch.Size([2, 5])
    """
    if isinstance(value, Tensor):
        return value if value.ndim > 0 else None
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    for item in inside:
        tensor = first_tensor(item)
        if tensor is not None:
            return tensor
    return None
