"""What a task of the race is: data on a device, a model with its first weights, a loss, and a measure."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from consequent_lab.race.measures import Measure

EVALUATION_BATCH = 4096  # samples
SEARCH_SEED = 1000  # of the search; the finals have seeds from 0 on


@dataclass(frozen=True)
class Data:
    """Inputs and targets, all on one device, a row for each sample."""

    train_inputs: Tensor
    train_targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor

    def to(self, device: torch.device | str) -> "Data":
        """Returns the same on a device."""
        return Data(*(tensor.to(device) for tensor in self._tensors()))

    def first(self, samples: int) -> "Data":
        """Returns the first of the training data, and all test data."""
        return Data(self.train_inputs[:samples], self.train_targets[:samples], self.test_inputs, self.test_targets)

    def with_validation(self) -> "Data":
        """Returns the training data alone, its last tenth as the test data: a search is not to see the real ones."""
        kept = len(self.train_inputs) - max(1, len(self.train_inputs) // 10)
        return Data(
            self.train_inputs[:kept], self.train_targets[:kept], self.train_inputs[kept:], self.train_targets[kept:]
        )

    def _tensors(self) -> tuple[Tensor, ...]:
        return self.train_inputs, self.train_targets, self.test_inputs, self.test_targets


Evaluation = Callable[[nn.Module, Data], dict[str, Tensor]]
Augmentation = Callable[[Tensor, torch.Generator], Tensor]


@dataclass(frozen=True)
class Task:
    """All that is the same for every contestant.

    Attributes:
        name: as on the command line and of the file of results.
        title: as in a sentence.
        load: returns the data of a folder or file, on the CPU; the seed is for tasks that split at random.
        model: returns the network of a variant ("" or "BN"), called under the run's seed.
        loss: of outputs and targets.
        evaluate: metrics of a model, as tensors on the device.
        measure: what the search goes by.
        reported: what else the table has.
        contestants: their names.
        batch_size: samples a step.
        epochs: of a run; the last batch of an epoch is dropped if it is not full.
        evaluations: in a run, evenly spread; the learning rate stays the same from one to the next.
        search_epochs: of a trial in the search, if fewer.
        search_samples: how many of the training data a search has, if not all.
        loss_reduction: what the loss is divided by, as `consequent.attach` wants it.
        augment: what becomes of the training inputs in every epoch.
        searches_decay: whether weight decay is a knob of every contestant.
        settings_from: the task whose search is taken over, so that this one has finals alone.
        starts: settings that a contestant's search begins with here, where they differ from its usual ones.
    """

    name: str
    title: str
    load: Callable[[Path | None, int], Data]
    model: Callable[[str], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    evaluate: Evaluation
    measure: Measure
    contestants: tuple[str, ...]
    batch_size: int
    epochs: int
    evaluations: int
    reported: tuple[Measure, ...] = ()
    search_epochs: int | None = None
    search_samples: int | None = None
    loss_reduction: str = "mean"
    augment: Augmentation | None = None
    searches_decay: bool = False
    settings_from: str | None = None
    starts: tuple[tuple[str, tuple[tuple[str, float], ...]], ...] = ()

    def steps(self, samples: int, *, search: bool = False) -> int:
        """Returns how many a run has."""
        epochs = self.search_epochs if search and self.search_epochs else self.epochs
        return epochs * self.steps_per_epoch(samples)

    def steps_per_epoch(self, samples: int) -> int:
        """Returns how many full batches the samples make."""
        if samples < self.batch_size:
            raise ValueError(f"{self.name}: {samples} samples make no batch of {self.batch_size}")
        return samples // self.batch_size

    @property
    def holds_out(self) -> bool:
        """Whether the search is judged by data that it is not trained on."""
        return self.measure.metric.startswith("test")

    def recipe(self) -> dict[str, Any]:
        """Returns what results must have in common to be in one file."""
        return {
            "task": self.name,
            "measure": str(self.measure),
            "batch_size": self.batch_size,
            "epochs": self.epochs,
            "evaluations": self.evaluations,
            "search_epochs": self.search_epochs,
            "settings_from": self.settings_from,
            **({} if self.search_samples is None else {"search_samples": self.search_samples}),
        }

    def with_epochs(self, epochs: int) -> "Task":
        """Returns a shorter or longer form, with a name of its own."""
        per_epoch = self.evaluations / self.epochs
        return replace(
            self,
            name=f"{self.name}-{epochs}ep",
            epochs=epochs,
            evaluations=max(1, round(per_epoch * epochs)),
            search_epochs=None if self.search_epochs is None else min(self.search_epochs, epochs),
        )


def classification(model: nn.Module, data: Data) -> dict[str, Tensor]:
    """Returns loss and accuracy over the training and the test set."""
    metrics: dict[str, Tensor] = {}
    sets = {"train": (data.train_inputs, data.train_targets), "test": (data.test_inputs, data.test_targets)}
    for name, (inputs, targets) in sets.items():
        logits = torch.cat([model(part) for part in inputs.split(EVALUATION_BATCH)])
        metrics[f"{name}_loss"] = nn.functional.cross_entropy(logits, targets)
        metrics[f"{name}_accuracy"] = (logits.argmax(1) == targets).float().mean()
    return metrics


def classification_of_some(model: nn.Module, data: Data) -> dict[str, Tensor]:
    """Returns the same with a fixed part of the training set, where the test set is what counts."""
    some = Data(
        data.train_inputs[:EVALUATION_BATCH], data.train_targets[:EVALUATION_BATCH], data.test_inputs, data.test_targets
    )
    return classification(model, some)


def signal(model: nn.Module, data: Data) -> dict[str, Tensor]:
    """Returns the mean square error, and 20 log₁₀(range / error) where values have a range of 2, in decibels."""
    metrics: dict[str, Tensor] = {}
    sets = {"": (data.train_inputs, data.train_targets), "test_": (data.test_inputs, data.test_targets)}
    for name, (inputs, targets) in sets.items():
        values = torch.cat([model(part) for part in inputs.split(8 * EVALUATION_BATCH)])
        error = nn.functional.mse_loss(values, targets)
        metrics[f"{name or 'train_'}loss"] = error
        metrics[f"{name}psnr"] = 10 * torch.log10(4 / error)
    return metrics


def regression(model: nn.Module, data: Data) -> dict[str, Tensor]:
    """Returns the mean square error over the training and the test set."""
    return {
        "train_loss": nn.functional.mse_loss(model(data.train_inputs), data.train_targets),
        "test_loss": nn.functional.mse_loss(model(data.test_inputs), data.test_targets),
    }
