"""Samples enter the model: N, one number for all layers, and how often each weight is used in a forward pass."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from consequent.minibatch.forwards import Replacement
from consequent.minibatch.product import Calls


class ForwardPass:
    """One call of the model.

    Attributes:
        samples: N, the leading dimension of the first tensor that entered; None if none did.
        builds_graph: whether gradients are wanted, though perhaps not of each part of it.
        calls: of each weight so far, by the name of its layer.
    """

    def __init__(self, samples: int | None) -> None:
        self.samples = samples
        self.builds_graph = torch.is_grad_enabled()
        self.calls: dict[str, Calls] = {}


class ModelForward(Replacement):
    """The model's ``forward``: it knows of the forward pass that is under way.

    Attributes:
        current: that pass, the outermost one if the model calls itself.
        calls: how often each weight was used in the last pass, by the name of its layer. Compiled code goes by this.
        counters: told of the samples of each pass that builds a graph.
        correction: whose it is.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.current: ForwardPass | None = None
        self.calls: dict[str, int] = {}
        self.counters: list[Callable[[int], None]] = []
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
        """The plain forward, with the pass under way meanwhile."""
        if self.current is not None:
            return self.plain(self.module, args, kwargs)
        tensor = first_tensor((args, kwargs))
        self.current = ForwardPass(None if tensor is None else tensor.shape[0])
        if tensor is not None and self.current.builds_graph:
            for count in self.counters:
                count(tensor.shape[0])
        try:
            return self.plain(self.module, args, kwargs)
        finally:
            for name, calls in self.current.calls.items():
                self.calls[name] = calls.number
            self.current = None


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
