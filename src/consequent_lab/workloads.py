"""What is timed: a network's training step on random data, plain or corrected, eager, compiled or as a CUDA graph."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import consequent
from consequent_lab.graphs import GraphedStep
from consequent_lab.optimizers import plain_optimizer

RATE = 1e-4  # of learning; so small that even thousands of steps on one batch stay finite
# What torch.compile is told in the modes in which it compiles the model.
COMPILED: dict[str, dict[str, Any]] = {
    "compiled": {},
    "reduce-overhead": {"fullgraph": True, "mode": "reduce-overhead"},
}


@dataclass(frozen=True)
class Work:
    """A network that learns a batch of random numbers with random classes."""

    title: str
    model: Callable[[], nn.Module]
    shape: tuple[int, ...]  # of the inputs, the batch first
    classes: int = 10
    optimizer: str = "sgd"  # one of torch's, as `plain_optimizer` calls it
    exclude: tuple[str, ...] = ()  # from the correction
    tokens: bool = False  # the inputs are tokens, and every one has a class
    autocast: bool = False  # to bfloat16

    def batch(self, layout: torch.memory_format) -> tuple[Tensor, Tensor]:
        """Returns inputs and classes, on the default device."""
        targets = torch.randint(0, self.classes, self.shape if self.tokens else self.shape[:1])
        inputs = torch.randint(0, self.classes, self.shape) if self.tokens else torch.rand(self.shape) - 0.5
        return inputs.contiguous(memory_format=layout), targets

    def loss(self, model: Callable[[Tensor], Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean cross-entropy."""
        with torch.autocast(inputs.device.type, torch.bfloat16) if self.autocast else nullcontext():
            return cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def training_step(
    work: Work, correction: Mapping[str, Any] | None, device: str, mode: str = "eager"
) -> Callable[[], Tensor]:
    """Returns what takes a step and returns its loss; it is plain without options of `attach` for a correction."""
    layout = torch.channels_last if len(work.shape) == 4 else torch.contiguous_format
    torch.manual_seed(0)
    with torch.device(device):
        batch, model = work.batch(layout), work.model()
    model.to(memory_format=layout)  # type: ignore[call-overload]
    decay = 0.01 if work.optimizer == "adamw" else 0.0  # torch's own defaults
    graph = mode == "CUDA graph"
    optimizer = plain_optimizer(work.optimizer, model.parameters(), RATE, decay, momentum=0.95, capturable=graph)
    if correction is not None:
        reduction: Any = (lambda samples: samples * work.shape[1]) if work.tokens else "mean"
        consequent.attach(optimizer, model, loss_reduction=reduction, exclude=work.exclude, **correction)
    if graph:
        return GraphedStep(model, optimizer, work.loss, batch)
    called = torch.compile(model, **COMPILED[mode]) if mode in COMPILED else model

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = work.loss(called, *batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step
