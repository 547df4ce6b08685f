"""What is read while a model trains. Counting stays on the device; the host waits only where it reads."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from consequent_lab.samples import is_correct


class Tally:
    """Adds up loss and correct answers over mini-batches, on the device, each before the step that learns from it.

    Of several ranks, `add_up` makes loss and correct answers of a rank's part those of the mini-batch, in place.
    """

    def __init__(
        self, device: torch.device, batch_size: int, per_epoch: int, add_up: Callable[[Tensor], None] | None = None
    ) -> None:
        self._batch_size = batch_size
        self._per_epoch = per_epoch
        self._add_up = add_up
        # (the last mini-batch, those of this epoch, those of the last complete one) × (loss, correct answers)
        self.values = torch.zeros(3, 2, dtype=torch.float64, device=device)

    def begin(self, iteration: int) -> None:
        """The next mini-batch is that of an iteration."""
        if iteration % self._per_epoch == 0:
            self.values[1].zero_()

    def add(self, loss: Tensor, outputs: Tensor, targets: Tensor) -> None:
        """Counts a mini-batch; may be captured in a CUDA graph."""
        self.values[0, 0].copy_(loss)
        self.values[0, 1].copy_(is_correct(outputs, targets).sum())
        if self._add_up is not None:
            self._add_up(self.values[0])
        self.values[1].add_(self.values[0])

    def end(self, iteration: int) -> None:
        """The last mini-batch was that of an iteration."""
        if (iteration + 1) % self._per_epoch == 0:
            self.values[2].copy_(self.values[1])

    def read(self, done: int) -> dict[str, float]:
        """Returns the means, as metrics have them, after so many iterations."""
        counts = {"batch": 1, "running": (done - 1) % self._per_epoch + 1}  # of this epoch so far: all at its end
        if done >= self._per_epoch:
            counts["epoch"] = self._per_epoch
        means: dict[str, float] = {}
        for (name, count), (loss, correct) in zip(counts.items(), self.values.tolist(), strict=False):
            means |= {f"{name}_loss": loss / count, f"{name}_accuracy": correct / (count * self._batch_size)}
        return means


class GradientNorms:
    """Norms of the gradients, by layer; also, if kept, of what backpropagation left before a correction rewrote it."""

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
        norms = {"applied": self._by_layer(self._norms())}
        if self._plain is not None:
            norms["plain"] = self._by_layer(self._plain)
        return norms

    def _by_layer(self, norms: Tensor) -> dict[str, float]:
        squares: dict[str, float] = {}
        for layer, norm in zip(self._layers, norms.tolist(), strict=True):
            squares[layer] = squares.get(layer, 0.0) + norm**2
        return {layer: square**0.5 for layer, square in squares.items()}
