"""What is timed: training steps, made of a task (data, loss, number formats) and an entrant (model, optimiser)."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import consequent
from consequent_lab.graphs import GraphedStep
from consequent_lab.optimizers import plain_optimizer

LEARNING_RATE = 1e-4  # so small that even thousands of steps on one batch stay finite


@dataclass(frozen=True)
class Task:
    """A batch of random numbers with random classes, and how the model sees it."""

    title: str
    shape: tuple[int, ...]  # of the inputs, the batch first
    classes: int = 10
    tokens: bool = False  # the inputs are tokens, and every one has a class
    channels_last: bool = False
    autocast: bool = False  # to bfloat16

    def batch(self, device: str) -> tuple[Tensor, Tensor]:
        """Returns inputs and classes, always the same; made by the default device's random numbers."""
        torch.manual_seed(1)
        targets = torch.randint(0, self.classes, self.shape if self.tokens else self.shape[:1]).to(device)
        if self.tokens:
            return torch.randint(0, self.classes, self.shape).to(device), targets
        inputs = (torch.rand(self.shape) - 0.5).to(device)
        return (inputs.to(memory_format=torch.channels_last) if self.channels_last else inputs), targets

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean cross-entropy."""
        with torch.autocast(inputs.device.type, torch.bfloat16) if self.autocast else nullcontext():
            return cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


@dataclass(frozen=True)
class Entrant:
    """A model and its optimiser, plain or, with a correction, consequentialist."""

    name: str
    model: Callable[[], nn.Module]
    optimizer: str  # one of torch's, as `plain_optimizer` calls it
    correction: dict[str, Any] | None = None  # options of `consequent.attach`; None is the plain one
    way: str = ""  # in which it is corrected: with each mini-batch's "own" inputs, or by "averages"


class TrainingStep:
    """A step of an entrant on a task, to be called again and again, if asked as a CUDA graph that is replayed."""

    def __init__(self, task: Task, entrant: Entrant, device: str, *, graph: bool = False) -> None:
        self._task = task
        self._batch = task.batch(device)
        torch.manual_seed(0)
        self._model = entrant.model().to(device)
        if task.channels_last:
            self._model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        decay = 0.01 if entrant.optimizer == "adamw" else 0.0  # torch's own defaults
        self._optimizer = plain_optimizer(
            entrant.optimizer, self._model.parameters(), LEARNING_RATE, decay, momentum=0.95, capturable=graph
        )
        options = entrant.correction
        self._correction = None if options is None else consequent.attach(self._optimizer, self._model, **options)
        self._graphed = GraphedStep(self._model, self._optimizer, task.loss, self._batch) if graph else None

    def __call__(self) -> Tensor:
        """Takes the step and returns the loss."""
        if self._graphed is not None:
            return self._graphed()
        self._optimizer.zero_grad()
        loss = self._task.loss(self._model, *self._batch)
        loss.backward()
        self._optimizer.step()
        return loss.detach()

    @property
    def failed(self) -> int:
        """How many factorisations failed so far; 0 of a plain entrant, and of a graph, which replays."""
        return 0 if self._correction is None or self._graphed is not None else self._correction.failed
