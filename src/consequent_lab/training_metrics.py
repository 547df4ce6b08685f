"""What is read while a model trains. Counting stays on the device; the host waits only where it reads."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

EVALUATED_AT_ONCE = 2000  # samples


class Samples:
    """Inputs and labels on a device, to be taken in any order.

    Args:
        inputs: a row of features, or an image, per sample.
        labels: their classes.
        channels_last: hand out images in this memory format; they are kept in it, so that taking some copies once.
    """

    def __init__(self, inputs: Tensor, labels: Tensor, *, channels_last: bool = False) -> None:
        self._inputs = inputs.permute(0, 2, 3, 1).contiguous() if channels_last else inputs
        self._channels_last = channels_last
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the inputs and labels of these samples."""
        return self._shown(self._inputs.index_select(0, indices)), self.labels.index_select(0, indices)

    def in_order(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields all inputs and labels, a few at a time."""
        for inputs, labels in zip(
            self._inputs.split(EVALUATED_AT_ONCE), self.labels.split(EVALUATED_AT_ONCE), strict=True
        ):
            yield self._shown(inputs), labels

    def _shown(self, inputs: Tensor) -> Tensor:
        return inputs.permute(0, 3, 1, 2) if self._channels_last else inputs


def loss_of(outputs: Tensor, targets: Tensor, reduction: Literal["mean", "sum"]) -> Tensor:
    """Returns the loss over samples: cross-entropy of classes, half of the squared error of numbers.

    Args:
        outputs: of the model, `[N, classes]` or of the targets' shape.
        targets: classes as whole numbers, `[N]`, or floats, `[N, …]`: errors are summed over all but samples.
        reduction: over samples.

    >>> loss_of(torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.zeros(2, 2), "mean")
    tensor(1.2500)
    """
    if targets.is_floating_point():
        total = (outputs - targets).square().sum() / 2
        return total / len(targets) if reduction == "mean" else total
    return cross_entropy(outputs, targets, reduction=reduction)


def is_correct(outputs: Tensor, targets: Tensor) -> Tensor:
    """Says of every sample whether its class has the largest output; numbers are never just right or wrong."""
    if targets.is_floating_point():
        return torch.zeros(len(targets), dtype=torch.bool, device=targets.device)
    return outputs.argmax(1) == targets


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


@dataclass(frozen=True)
class Evaluation:
    """A model's answers to all samples of a set."""

    loss: float
    correct: Tensor  # for each sample

    @property
    def accuracy(self) -> float:
        """The fraction of correct answers."""
        return int(self.correct.sum()) / len(self.correct)

    def forgotten_since(self, before: Tensor) -> int:
        """Returns how many samples are answered wrongly now that were answered correctly before."""
        return int((before & ~self.correct).sum())


@torch.no_grad()
def evaluate(model: nn.Module, samples: Samples) -> Evaluation:
    """Evaluates the model as it would be used: BatchNorm takes its running statistics."""
    was_training = model.training
    model.eval()
    loss = torch.zeros((), dtype=torch.float64, device=samples.labels.device)
    correct = []
    for inputs, labels in samples.in_order():
        outputs = model(inputs)
        loss += loss_of(outputs, labels, "sum")
        correct.append(is_correct(outputs, labels))
    model.train(was_training)
    return Evaluation(loss.item() / len(samples), torch.cat(correct))
