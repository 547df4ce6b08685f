"""What learns: a model, its optimisers and its samples in a seeded order, and the step that changes them.

All training is this: a race lets it run through in memory (`race/training.py`), `consequent train` and the paper's
experiments keep a folder beside it (`trainer.py`).
"""

import hashlib
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from consequent_lab.graphs import WARM_UP_STEPS, GraphedStep, step_aside
from consequent_lab.optimizers import Optimizers
from consequent_lab.samples import Loss, Samples

Model = TypeVar("Model", bound=nn.Module)
Augmentation = Callable[[Tensor, torch.Generator], Tensor]


class Learner:
    """A model in training.

    The last batch of an epoch is dropped if it is not full. Order and augmentation depend on the seed and the epoch
    alone: nothing needs to be kept to make them again.

    `augment` is what becomes of all inputs in every epoch. With `graph`, the step is replayed as a CUDA graph: the
    first steps are eager, on a stream of their own, as a capture needs it, and after every change of learning rates
    there is another capture.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizers,
        samples: Samples,
        loss: Loss,
        batch_size: int,
        seed: int,
        augment: Augmentation | None = None,
        graph: bool = False,
    ) -> None:
        if len(samples) < batch_size:
            raise ValueError(f"batch_size {batch_size} is more than the {len(samples)} training samples")
        self.model = model
        self.optimizers = optimizers
        self.samples = samples
        self.per_epoch = len(samples) // batch_size
        self._called = model  # or what stands for it in training
        self._loss = loss
        self._batch_size = batch_size
        self._seed = seed
        self._augment = augment
        self._trained_on = samples if augment is None else samples.with_own_inputs()
        self._epoch: int | None = None  # of the order and the augmentation
        self._order = torch.empty(0)
        self._eager_left = WARM_UP_STEPS if graph else None  # None: all of them
        self._graphed: GraphedStep | None = None
        self._is_outdated = False  # the graph, by its learning rates

    @property
    def is_graphed(self) -> bool:
        """Whether the step is replayed as a CUDA graph."""
        return self._graphed is not None

    # ---- samples ------------------------------------------------------------------------------------------------

    def batch(self, iteration: int) -> Tensor:
        """Returns the indices of the samples of an iteration."""
        epoch, place = divmod(iteration, self.per_epoch)
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = order_of(len(self.samples), self._batch_size, self._seed, epoch).to(self.samples.device)
            if self._augment is not None:
                generator = torch.Generator(self.samples.device)
                generator.manual_seed(seed_number(self._seed, "augmentation", epoch))
                self._trained_on.inputs.copy_(self._augment(self.samples.inputs, generator))
        return self._order[place * self._batch_size : (place + 1) * self._batch_size]

    def forget_epoch(self) -> None:
        """Brings back the samples as they are; the next batch makes its epoch's again."""
        self._epoch = None
        if self._augment is not None:
            self._trained_on.inputs.copy_(self.samples.inputs)

    # ---- the step -----------------------------------------------------------------------------------------------

    def learn(self, indices: Tensor) -> None:
        """Trains on the samples with these indices."""
        if self._graphed is None and self._eager_left == 0:
            self.capture(indices)
        if self._graphed is not None:
            if self._is_outdated:
                self._graphed.capture()
                self._is_outdated = False
            self._graphed(indices)
        elif self._eager_left is None:
            self.eager_step(indices)
        else:
            self._eager_left -= 1
            step_aside(partial(self.eager_step, indices))

    def schedule(self, factor: float) -> None:
        """Sets all learning rates to a fraction of their peaks, which a captured step would not see."""
        self.optimizers.schedule(factor)
        self._is_outdated = True

    def loss(self, model: nn.Module, indices: Tensor) -> Tensor:
        """Returns the loss over the samples with these indices."""
        inputs, targets = self._trained_on.take(indices)
        return self._loss(model(inputs), targets)

    def capture(self, indices: Tensor, warm_up: int = 0) -> None:
        """Makes the step a CUDA graph, after so many steps on these samples."""
        self._graphed = GraphedStep(self.model, self.optimizers, self.loss, (indices,), warm_up)
        self._is_outdated = False

    def eager_step(self, indices: Tensor) -> None:
        """Trains on the samples with these indices, without a graph."""
        self.optimizers.zero_grad()
        self.loss(self._called, indices).backward()
        self.optimizers.step()


def first_model(seed: int, make: Callable[[], Model]) -> Model:
    """Returns the model with the seed's first weights, the same on every device."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def order_of(samples: int, batch_size: int, seed: int, epoch: int) -> Tensor:
    """Returns the order of samples in an epoch, the same on every device; one full batch is always in order.

    >>> first = order_of(5, 2, 0, 0)
    >>> sorted(first.tolist()), torch.equal(first, order_of(5, 2, 0, 0)), order_of(3, 3, 0, 0)
    ([0, 1, 2, 3, 4], True, tensor([0, 1, 2]))
    """
    if batch_size >= samples:
        return torch.arange(samples)
    return torch.randperm(samples, generator=torch.Generator().manual_seed(seed_number(seed, "order", epoch)))


def seed_number(seed: int, purpose: str, number: int) -> int:
    """Returns a seed that has nothing to do with those of other purposes."""
    return int.from_bytes(hashlib.sha256(f"{seed} {purpose} {number}".encode()).digest()[:7], "big")
