"""A run of the race: a learner that goes through to its end in memory, with evaluations in between.

The learning rate stays the same from one evaluation to the next: a step that is captured in a CUDA graph is then
captured anew as often, which costs what a few steps cost, and sees learning rates as the plain numbers they are.
"""

import gc
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import fmean

import torch
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from consequent_lab.learner import Learner, first_model
from consequent_lab.race.contestants import Contestant, Settings
from consequent_lab.race.curves import Curve
from consequent_lab.race.task import Task
from consequent_lab.samples import Data, evaluate
from consequent_lab.schedules import cosine

DIVERGED = 1e4  # a training loss from which no run has come back


class Run(Learner):
    """The learner of a contestant on a task; everybody has the same first weights and batches with the same seed.

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
        self._steps = steps
        device = data.train.device
        self.wants_graph = graph and contestant.graphs and device.type == "cuda"
        torch.backends.cudnn.benchmark = True  # shapes stay the same: the fastest convolutions, for all contestants
        model = first_model(seed, partial(task.model, contestant.variant)).to(device)
        optimizers = contestant.make(model, settings, task, self.wants_graph)
        super().__init__(
            model, optimizers, data.train, task.loss, task.batch_size, seed, task.augment, self.wants_graph
        )

    def __iter__(self) -> Iterator[dict[str, float]]:
        """Trains and yields an evaluation, the first one before any step; ends early where the run diverges."""
        done = 0
        line = self._evaluated(done)
        yield line
        for number in range(self._task.evaluations):
            self.schedule(cosine(done, self._steps))
            stop = round(self._steps * (number + 1) / self._task.evaluations)
            try:
                while done < stop:
                    self.learn(self.batch(done))
                    done += 1
            except LinAlgError:  # what numbers that are not finite end in
                yield dict.fromkeys(line, math.nan) | {"iteration": done}
                return
            line = self._evaluated(done)
            yield line
            if not line["train_loss"] < DIVERGED:
                return

    def _evaluated(self, step: int) -> dict[str, float]:
        line: dict[str, float] = {"iteration": step}
        for name, samples in (("train", self._data.train[: self._task.evaluated]), ("test", self._data.test)):
            if not len(samples):
                continue
            found = evaluate(self.model, samples, self._task.loss)
            line[f"{name}_loss"] = found.loss
            if self._task.metric == "accuracy":
                line[f"{name}_accuracy"] = found.accuracy
            elif self._task.metric == "psnr":
                line["psnr" if name == "train" else "test_psnr"] = _decibels(found.loss)
        return line


def _decibels(loss: float) -> float:
    """Returns 20 log₁₀(range / error) where values have a range of 2."""
    return 10 * float(torch.log10(4 / torch.tensor(loss, dtype=torch.float64)))


def _mean(lines: Sequence[dict[str, float]]) -> dict[str, float]:
    means = {name: fmean(line[name] for line in lines) for name in lines[0]}
    return means | {"iteration": max(line["iteration"] for line in lines)}


def curve_of(
    task: Task,
    contestant: Contestant,
    settings: Settings,
    data: Mapping[int, Data],
    steps: int,
    graph: bool,
    watch: Callable[[Curve], bool],
) -> tuple[Curve, bool]:
    """Returns the curve of a run, and whether its step was a CUDA graph; a capture that fails makes an eager run.

    The arguments are those of :class:`Run`; `data` has them for every seed. With several seeds there are as many runs,
    from one evaluation to the next in turn, and the curve is their mean, which ends where the first of them does.
    `watch` is called with the curve so far after every evaluation, and the run ends early where it returns True.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # learning rates far too large are part of a search, and so is what they cause
        runs = [Run(task, contestant, settings, own, seed, steps, graph) for seed, own in data.items()]
        is_graphed = runs[0].wants_graph
        curve: Curve = []
        try:
            for lines in zip(*runs, strict=False):
                curve.append(_mean(lines))
                if watch(curve):
                    break
        except (RuntimeError, ValueError) as error:
            if not is_graphed:
                raise
            message = f"{contestant.name}: no CUDA graph, eager steps instead: {error}"
        else:
            return curve, is_graphed
        finally:
            del runs
            if is_graphed:
                torch.cuda.synchronize()
                gc.collect()  # a graph and what it replays hold each other
                torch.cuda.empty_cache()  # the graph's memory, which nothing else can have
    warnings.warn(message, stacklevel=2)
    return curve_of(task, contestant, settings, data, steps, False, watch)
