"""What is read while a model trains. Counting stays on the device; the host waits only where it reads."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

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


@torch.no_grad()
def gradient_norms(model: nn.Module) -> dict[str, float]:
    """Returns the norm of the gradient of each layer's parameters, by the layer's name."""
    named = dict(model.named_parameters())
    gradients = [p.grad if p.grad is not None else p.new_zeros(()) for p in named.values()]
    squares: dict[str, float] = {}
    for name, norm in zip(named, torch.stack(torch._foreach_norm(gradients)).tolist(), strict=True):
        layer = name.rpartition(".")[0]
        squares[layer] = squares.get(layer, 0.0) + norm**2
    return {layer: square**0.5 for layer, square in squares.items()}
