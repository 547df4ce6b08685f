"""The training loop: data that lies on the device, a seeded order, a schedule, and evaluations in between.

The learning rate stays the same from one evaluation to the next: a step that is captured in a CUDA graph is then
captured anew as often, which costs what a few steps cost, and sees learning rates as the plain numbers they are.
"""

import hashlib
import math
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from consequent.reports.errors import StandstillError
from consequent_lab.graphs import GraphedStep
from consequent_lab.race.contestants import Contestant, Optimizers, Settings, cosine
from consequent_lab.race.curves import Point
from consequent_lab.race.task import Data, Task

WARM_UP_STEPS = 5  # eager ones, before a capture
DIVERGED = 1e4  # a training loss from which no run has come back


class Run:
    """A training run of a contestant; everybody has the same first weights and batches with the same seed.

    Args:
        task: what is learnt.
        contestant: what learns.
        settings: the contestant's.
        data: on the device.
        seed: of the first weights, the order of samples and the augmentation.
        steps: how many there will be.
        graph: replay the step as a CUDA graph, where data lie on such a device and the contestant can.
    """

    def __init__(
        self, task: Task, contestant: Contestant, settings: Settings, data: Data, seed: int, steps: int, graph: bool
    ) -> None:
        self._task = task
        self._data = data
        self._seed = seed
        self._steps = steps
        self._device = data.train_inputs.device
        self._per_epoch = task.steps_per_epoch(len(data.train_inputs))
        self.is_graphed = graph and contestant.graphs and self._device.type == "cuda"
        self.model = first_model(task, contestant.variant, seed).to(self._device)
        self.optimizers = contestant.make(self.model, settings, task, self.is_graphed)
        self._inputs = data.train_inputs if task.augment is None else torch.empty_like(data.train_inputs)
        self._order = torch.empty(0)
        self._stepper = Stepper(self.model, self.optimizers, self._loss, self.is_graphed)

    def __iter__(self) -> Iterator[Point]:
        """Trains and yields an evaluation, the first one before any step; ends early where the run diverges."""
        done = 0
        yield self._evaluated(done)
        for number in range(self._task.evaluations):
            self.optimizers.schedule(cosine(done, self._steps))
            self._stepper.changed()
            stop = round(self._steps * (number + 1) / self._task.evaluations)
            try:
                while done < stop:
                    self._stepper(self._batch(done))
                    done += 1
            except (StandstillError, LinAlgError):  # what numbers that are not finite end in
                yield Point(done, dict.fromkeys(self._names, math.nan))
                return
            point = self._evaluated(done)
            yield point
            if not point.metrics["train_loss"] < DIVERGED:
                return

    def same_step(self, factor: float) -> Callable[[], None]:
        """Returns a step on the first batch, at a fraction of the learning rate, to be timed."""
        self.optimizers.schedule(factor)
        batch = self._batch(0)
        return lambda: self._stepper(batch)

    def _batch(self, step: int) -> Tensor:
        """Returns the indices of the samples of a step."""
        epoch, place = divmod(step, self._per_epoch)
        if place == 0:
            samples, size = len(self._data.train_inputs), self._task.batch_size
            if size < samples:
                generator = torch.Generator().manual_seed(_number(self._seed, "order", epoch))
                self._order = torch.randperm(samples, generator=generator).to(self._device)  # the same everywhere
            elif epoch == 0:
                self._order = torch.arange(samples, device=self._device)
            if self._task.augment is not None:
                generator = torch.Generator(self._device).manual_seed(_number(self._seed, "augmentation", epoch))
                self._inputs.copy_(self._task.augment(self._data.train_inputs, generator))
        return self._order[place * self._task.batch_size : (place + 1) * self._task.batch_size]

    def _loss(self, model: nn.Module, indices: Tensor) -> Tensor:
        inputs = self._inputs[indices]
        if inputs.ndim == 4 and inputs.is_cuda:  # convolutions are then faster, everybody's
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        return self._task.loss(model(inputs), self._data.train_targets[indices])

    @torch.no_grad()
    def _evaluated(self, step: int) -> Point:
        self.model.eval()
        metrics = self._task.evaluate(self.model, self._data)
        self.model.train()
        self._names = list(metrics)
        return Point(step, dict(zip(metrics, torch.stack(list(metrics.values())).tolist(), strict=True)))


class Stepper:
    """A training step, eager or replayed.

    Args:
        model: what is trained.
        optimizers: over its parameters.
        loss: of the model on the samples with the given indices.
        graph: replay it as a CUDA graph; the first steps are eager, on a stream of their own, as a capture needs it.
    """

    def __init__(
        self, model: nn.Module, optimizers: Optimizers, loss: Callable[[nn.Module, Tensor], Tensor], graph: bool
    ) -> None:
        self._model = model
        self._optimizers = optimizers
        self._loss = loss
        self._eager_left = WARM_UP_STEPS if graph else math.inf
        self._graphed: GraphedStep | None = None
        self._is_outdated = False

    def __call__(self, indices: Tensor) -> None:
        """Trains on the samples with these indices."""
        if self._eager_left > 0:
            self._eager_left -= 1
            if self._eager_left == math.inf:
                self._eager(indices)
            else:
                self._aside(indices)
            return
        if self._graphed is None:
            optimizer: torch.optim.Optimizer = self._optimizers  # type: ignore[assignment]  # all that is asked of one
            self._graphed = GraphedStep(self._model, optimizer, self._loss, (indices,), warm_up=0)
        elif self._is_outdated:
            self._graphed.capture()
        self._is_outdated = False
        self._graphed(indices)

    def changed(self) -> None:
        """Is to be called after a change of learning rates, which a captured step would not see."""
        self._is_outdated = True

    def _eager(self, indices: Tensor) -> None:
        self._optimizers.zero_grad()
        self._loss(self._model, indices).backward()
        self._optimizers.step()

    def _aside(self, indices: Tensor) -> None:
        before, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(before)
        with torch.cuda.stream(aside):
            self._eager(indices)
        before.wait_stream(aside)


def curve_of(
    task: Task,
    contestant: Contestant,
    settings: Settings,
    data: Data,
    seed: int,
    steps: int,
    graph: bool,
    watch: Callable[[list[Point]], bool],
) -> tuple[list[Point], bool]:
    """Returns the curve of a run, and whether its step was a CUDA graph; a capture that fails makes an eager run.

    Args:
        task: what is learnt.
        contestant: what learns.
        settings: the contestant's.
        data: on the device.
        seed: of the run.
        steps: how many there will be.
        graph: try to replay the step as a CUDA graph.
        watch: called with the curve so far after every evaluation; the run ends early where it returns True.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # learning rates far too large are part of a search, and so is what they cause
        run = Run(task, contestant, settings, data, seed, steps, graph)
        curve: list[Point] = []
        try:
            for point in run:
                curve.append(point)
                if watch(curve):
                    break
        except (RuntimeError, ValueError) as error:
            if not run.is_graphed:
                raise
            message = f"{contestant.name}: no CUDA graph, eager steps instead: {error}"
        else:
            return curve, run.is_graphed
        finally:
            was_graphed = run.is_graphed
            del run
            if was_graphed:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()  # the memory of its graphs, which nothing else can have
    warnings.warn(message, stacklevel=2)
    return curve_of(task, contestant, settings, data, seed, steps, False, watch)


def first_model(task: Task, variant: str, seed: int) -> nn.Module:
    """Returns the model with the seed's first weights, the same for every contestant on every device."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return task.model(variant)


def _number(seed: int, purpose: str, epoch: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {purpose} {epoch}".encode()).digest()[:7], "big")
