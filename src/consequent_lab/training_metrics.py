"""What is read while a model trains. Counting stays on the device; the host waits only where it reads."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from consequent_lab.samples import is_correct


@dataclass(frozen=True)
class BatchTotals:
    """Loss and correct answers over mini-batches, each taken before the step that learns from it."""

    loss: float
    correct: float


class Tally:
    """Counts mini-batches on the device: the last one, those of this epoch, and those of the last complete epoch.

    Args:
        device: where to count.
        add_up: makes the loss and the correct answers of a rank's part those of the mini-batch, in place.
    """

    def __init__(self, device: torch.device, add_up: Callable[[Tensor], None] | None = None) -> None:
        self._add_up = add_up
        self.values = torch.zeros(3, 2, dtype=torch.float64, device=device)  # (last, epoch, complete) × (loss, correct)

    def add(self, loss: Tensor, outputs: Tensor, targets: Tensor) -> None:
        """Counts a mini-batch; may be captured in a CUDA graph."""
        self.values[0, 0].copy_(loss)
        self.values[0, 1].copy_(is_correct(outputs, targets).sum())
        if self._add_up is not None:
            self._add_up(self.values[0])
        self.values[1].add_(self.values[0])

    def begin_epoch(self) -> None:
        """The next mini-batch is the first of an epoch."""
        self.values[1].zero_()

    def end_epoch(self) -> None:
        """The last mini-batch was the last of an epoch."""
        self.values[2].copy_(self.values[1])

    def read(self) -> tuple[BatchTotals, BatchTotals, BatchTotals]:
        """Returns the last mini-batch, and sums over this epoch and over the last complete one."""
        last, epoch, complete = self.values.tolist()
        return BatchTotals(*last), BatchTotals(*epoch), BatchTotals(*complete)


class GradientNorms:
    """Norms of the gradients, by layer.

    Args:
        model: whose gradients.
        keep_plain: note in every step what backpropagation left, before a correction rewrites it.
    """

    def __init__(self, model: nn.Module, *, keep_plain: bool) -> None:
        named = dict(model.named_parameters())
        self._parameters = list(named.values())
        self._layers = [name.rpartition(".")[0] for name in named]
        self._plain = torch.zeros(len(named), device=self._parameters[0].device) if keep_plain else None
        self._hook: RemovableHandle | None = None

    def watch(self, optimizer: Optimizer) -> None:
        """Looks at gradients before each step; to be called before a correction is attached."""
        if self._hook is not None:
            self._hook.remove()
        if self._plain is not None:
            self._hook = optimizer.register_step_pre_hook(self._note)

    def _note(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        assert self._plain is not None
        self._plain.copy_(self._norms())

    @torch.no_grad()
    def _norms(self) -> Tensor:
        gradients = [p.grad if p.grad is not None else p.new_zeros(()) for p in self._parameters]
        return torch.stack(torch._foreach_norm(gradients))

    def read(self) -> dict[str, dict[str, float]]:
        """Returns the norms of the last step: of the gradients that the optimiser got and, if kept, the plain ones."""
        readings = {"applied": self._by_layer(self._norms())}
        if self._plain is not None:
            readings["plain"] = self._by_layer(self._plain)
        return readings

    def _by_layer(self, norms: Tensor) -> dict[str, float]:
        squares: dict[str, float] = {}
        for layer, norm in zip(self._layers, norms.tolist(), strict=True):
            squares[layer] = squares.get(layer, 0.0) + norm**2
        return {layer: square**0.5 for layer, square in squares.items()}
