"""Inputs and targets on a device, and what a model makes of them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

EVALUATED_AT_ONCE = 2000  # samples

Loss = Callable[[Tensor, Tensor], Tensor]  # of outputs and targets, a mean over samples


class Samples:
    """Inputs and targets, to be taken in any order; images are kept in their memory format: taking some copies once."""

    def __init__(self, inputs: Tensor, targets: Tensor, *, channels_last: bool = False) -> None:
        self._kept = inputs.permute(0, 2, 3, 1).contiguous() if channels_last else inputs
        self._channels_last = channels_last
        self.targets = targets

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, rows: slice) -> "Samples":
        return Samples(self.inputs[rows], self.targets[rows], channels_last=self._channels_last)

    @property
    def inputs(self) -> Tensor:
        """All inputs, as a model takes them."""
        return self._shown(self._kept)

    @property
    def device(self) -> torch.device:
        """Where they lie."""
        return self.targets.device

    def to(self, device: torch.device | str) -> "Samples":
        """Returns the same on a device."""
        return Samples(self.inputs.to(device), self.targets.to(device), channels_last=self._channels_last)

    def with_own_inputs(self) -> "Samples":
        """Returns the same with a copy of the inputs, which may be written to."""
        return Samples(self.inputs.clone(), self.targets, channels_last=self._channels_last)

    def take(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the inputs and targets of these samples."""
        return self._shown(self._kept.index_select(0, indices)), self.targets.index_select(0, indices)

    def in_order(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields all inputs and targets, a few at a time."""
        parts = zip(self._kept.split(EVALUATED_AT_ONCE), self.targets.split(EVALUATED_AT_ONCE), strict=True)
        for inputs, targets in parts:
            yield self._shown(inputs), targets

    def _shown(self, inputs: Tensor) -> Tensor:
        return inputs.permute(0, 3, 1, 2) if self._channels_last else inputs


@dataclass(frozen=True)
class Data:
    """What is learnt, and what it is judged by; no test samples where the training set itself is what counts."""

    train: Samples
    test: Samples

    def to(self, device: torch.device | str) -> "Data":
        """Returns the same on a device."""
        return Data(self.train.to(device), self.test.to(device))

    def first(self, samples: int) -> "Data":
        """Returns the first of the training samples, and all test samples."""
        return Data(self.train[:samples], self.test)

    def with_validation(self) -> "Data":
        """Returns the training data alone, its last tenth as the test data: a search is not to see the real ones."""
        kept = len(self.train) - max(1, len(self.train) // 10)
        return Data(self.train[:kept], self.train[kept:])


# ---- losses ------------------------------------------------------------------------------------------------------


def usual_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean over samples: cross-entropy of classes, `[N]`, half of the squared error of numbers, `[N, …]`.

    >>> usual_loss(torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.zeros(2, 2))
    tensor(1.2500)
    """
    if targets.is_floating_point():
        return (outputs - targets).square().sum() / 2 / len(targets)
    return cross_entropy(outputs, targets)


def is_correct(outputs: Tensor, targets: Tensor) -> Tensor:
    """Says of every class whether it has the largest output; numbers are never just right or wrong."""
    if targets.is_floating_point():
        return torch.zeros(len(targets), dtype=torch.bool, device=targets.device)
    return outputs.argmax(-1) == targets


# ---- evaluation --------------------------------------------------------------------------------------------------


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
def evaluate(model: nn.Module, samples: Samples, loss: Loss) -> Evaluation:
    """Evaluates the model as it would be used: BatchNorm takes its running statistics."""
    was_training = model.training
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=samples.device)
    correct = []
    for inputs, targets in samples.in_order():
        outputs = model(inputs)
        total += loss(outputs, targets).double() * len(targets)
        correct.append(is_correct(outputs, targets))
    model.train(was_training)
    return Evaluation(total.item() / len(samples), torch.cat(correct))
