"""The six optimisers of the race: three of torch's, each plain and with the one line that makes it C-."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

import consequent
from consequent.maths.bound import DEFAULT as BOUND


def sgd(parameters: Iterator[nn.Parameter], lr: float) -> Optimizer:
    """Returns plain stochastic gradient descent."""
    return torch.optim.SGD(parameters, lr=lr)


def nesterov(parameters: Iterator[nn.Parameter], lr: float) -> Optimizer:
    """Returns gradient descent with Nesterov's momentum."""
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, nesterov=True)


def adam(parameters: Iterator[nn.Parameter], lr: float) -> Optimizer:
    """Returns Adam with its usual moments."""
    return torch.optim.Adam(parameters, lr=lr)


FAMILIES: dict[str, Callable[[Iterator[nn.Parameter], float], Optimizer]] = {
    "SGD": sgd,
    "Nesterov": nesterov,
    "Adam": adam,
}


@dataclass(frozen=True)
class Contestant:
    """An optimiser of the race.

    >>> [contestant.name for contestant in CONTESTANTS]
    ['SGD', 'C-SGD', 'Nesterov', 'C-Nesterov', 'Adam', 'C-Adam']
    """

    family: str
    consequentialist: bool

    @property
    def name(self) -> str:
        """The name in tables and pictures."""
        return f"C-{self.family}" if self.consequentialist else self.family

    def optimizer(
        self, model: nn.Module, lr: float, *, damping: float | None = None, relative_damping: float | None = None
    ) -> Optimizer:
        """Returns the optimiser over all parameters of the model; the dampings are for the C- versions.

        With the paper's absolute one there is no bound on the step, as in the paper.
        """
        optimizer = FAMILIES[self.family](model.parameters(), lr)
        if self.consequentialist:
            bound = BOUND if damping is None else None
            consequent.attach(optimizer, model, damping, relative_damping=relative_damping, bound=bound)
        return optimizer


CONTESTANTS = tuple(Contestant(family, consequentialist) for family in FAMILIES for consequentialist in (False, True))
