"""Trains one run in its folder, from the beginning or from its last checkpoint.

A run reads what costs nothing every `log_every` iterations, evaluates every `evaluate_every`, and ends cleanly when its
loss is no longer finite. Every reading is a line of metrics:

    iteration, epoch, seconds     seconds were spent in training; reading, evaluating and saving are not counted
    lr                            of the last step
    batch_loss, batch_accuracy    of the last mini-batch, before its step (the paper's reading, every 100 iterations)
    running_loss, running_accuracy    over the mini-batches of this epoch so far
    epoch_loss, epoch_accuracy    over those of the last complete epoch; absent in the first
    gradient_norms                by layer: "applied", what the optimiser got, and "plain", what backpropagation gives
                                  on the same mini-batch after the step
    failed                        factorisations of the correction, so far
    train_loss, train_accuracy    over the full training set, where it is evaluated, as are
    forgotten                     samples of it that were correct at the last evaluation and are not now
    test_loss, test_accuracy      or validation_loss and validation_accuracy, where a part was held out
    diverged                      true, on the last line of a run whose loss was not finite

Where targets are numbers and not classes, there are no accuracies.
"""

import math
import signal
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from consequent_lab.configured import ConfiguredLearner
from consequent_lab.datasets import Dataset, held_out, load
from consequent_lab.own_code import own_data
from consequent_lab.progress import Watcher
from consequent_lab.rank_group import RankGroup
from consequent_lab.rounding import tf32
from consequent_lab.runs import RunFolder, environment
from consequent_lab.samples import evaluate, usual_loss
from consequent_lab.schedules import rate_factor
from consequent_lab.train_config import TrainConfig, is_own

SECONDS_BETWEEN_CHECKPOINTS = 60.0  # at most


def train(
    config: TrainConfig,
    folder: RunFolder,
    device: torch.device | str = "cpu",
    *,
    data: Path | None = None,
    watcher: Watcher = lambda *_: None,
    ranks: RankGroup | None = None,
) -> None:
    """Trains the run, or what is left of it; a finished one is left alone.

    The folder must be empty or a run with the same config. A run that was killed goes on bit for bit on the CPU with as
    many threads as before. Of several ranks each calls this, with a folder that is theirs.

    Raises:
        ValueError: if the folder holds another run or a damaged file, or the config does not fit the data.
        KeyboardInterrupt: on Ctrl-C, after a checkpoint was written; at once on a second one.
    """
    with folder.opened(config), tf32(allowed=config.tf32):
        outcome = folder.outcome()
        if outcome is not None:
            watcher("ended", outcome, True)
            return
        state = folder.resume()  # raises if a file is damaged, before anything costly is done
        dataset = own_data(config.dataset) if is_own(config.dataset) else load(config.dataset, data)
        if config.validation:
            dataset = held_out(dataset, config.validation)
        place = torch.device(device)
        with torch.random.fork_rng(devices=[place] if place.type == "cuda" else []):
            training = _Training(config, folder, place, dataset, state, watcher, ranks)
            with _first_interrupt(ranks is None) as interrupt:
                training.run(interrupt)


class _Training:
    """A run that is being trained."""

    def __init__(
        self,
        config: TrainConfig,
        folder: RunFolder,
        device: torch.device,
        dataset: Dataset,
        state: dict[str, Any] | None,
        watcher: Watcher,
        ranks: RankGroup | None,
    ) -> None:
        self._config = config
        self._folder = folder
        self._device = device
        self._watcher = watcher
        self._ranks = ranks
        self._has_classes = dataset.classes is not None
        self._learner = ConfiguredLearner(config, dataset, device, ranks)
        self._total = config.total_iterations(self._learner.per_epoch)
        self._evaluate_every = config.evaluate_every or self._learner.per_epoch
        if config.warm_up >= self._total:
            raise ValueError(f"warm_up {config.warm_up} must be less than the {self._total} iterations of the run")
        self._fingerprint = _fingerprint(dataset)
        self._iteration = 0
        self._seconds = 0.0
        self._saved_at = time.perf_counter()
        self._remembered: Tensor | None = None  # what of the training set was correct at the last evaluation
        if state is not None:
            self._take_over(state)
        self._learner.settle(None if state is None else state["learner"])
        start = {"iteration": self._iteration, "graph": self._learner.is_graphed}
        several = {} if ranks is None else {"ranks": ranks.size}
        folder.add_environment(start | environment(str(device)) | several)

    def run(self, interrupt: threading.Event) -> None:
        """Trains to the end, or to an interrupt."""
        self._watcher("started", self._iteration, self._total)
        outcome = "finished"
        if self._iteration == 0:
            self._read()
        while self._iteration < self._total:
            self._advance(self._next_stop(), interrupt)
            if self._is_due(self._config.log_every) or self._is_due(self._evaluate_every):
                line = self._read()
                if "diverged" in line:
                    outcome = "diverged"
                    break
            if self._is_due(self._config.checkpoint_every) or self._told(self._is_late or interrupt.is_set()):
                self._save()
            if interrupt.is_set():
                raise KeyboardInterrupt
        done = {"outcome": outcome, "iteration": self._iteration, "seconds": self._seconds}
        self._folder.finish(done)
        self._watcher("ended", done, False)

    # ---- training -----------------------------------------------------------------------------------------------

    def _is_due(self, interval: int) -> bool:
        return self._iteration % interval == 0 or self._iteration == self._total

    @property
    def _is_late(self) -> bool:
        """Whether the last checkpoint is too old."""
        return time.perf_counter() - self._saved_at > SECONDS_BETWEEN_CHECKPOINTS

    def _told(self, decision: bool) -> bool:
        """Returns the first rank's decision: clocks differ."""
        return decision if self._ranks is None else self._ranks.told(decision)

    def _next_stop(self) -> int:
        intervals = (self._config.log_every, self._evaluate_every, self._config.checkpoint_every)
        return min(self._total, *((self._iteration // interval + 1) * interval for interval in intervals))

    def _advance(self, stop: int, interrupt: threading.Event) -> None:
        """Trains up to an iteration, or until a checkpoint is due, without waiting for the device in between."""
        start = time.perf_counter()
        while self._iteration < stop:
            self._learner.step(self._iteration, self._total)
            self._iteration += 1
            self._watcher("advanced", self._iteration)
            if self._ranks is None and (interrupt.is_set() or self._is_late):
                break
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._seconds += time.perf_counter() - start

    # ---- reading ------------------------------------------------------------------------------------------------

    def _read(self) -> dict[str, Any]:
        """Writes a line of metrics and returns it."""
        line: dict[str, Any] = {
            "iteration": self._iteration,
            "epoch": self._iteration / self._learner.per_epoch,
            "seconds": self._seconds,
            "lr": self._config.lr * rate_factor(self._config, max(0, self._iteration - 1), self._total),
        }
        if self._iteration > 0:
            line |= self._learner.tally.read(self._iteration)
            if self._config.gradient_norms != "none":
                line["gradient_norms"] = self._learner.gradient_norms(self._iteration - 1)
            if self._config.consequentialist:
                line["failed"] = self._learner.failed()
        # A loss that is not finite needs no evaluation, which would only say so again.
        if self._is_due(self._evaluate_every) and math.isfinite(line.get("batch_loss", 0.0)):
            line |= self._evaluate()
        if not all(math.isfinite(line.get(name, 0.0)) for name in ("batch_loss", "train_loss")):
            line["diverged"] = True
        if not self._has_classes:
            line = {name: value for name, value in line.items() if not name.endswith(("accuracy", "forgotten"))}
        self._folder.append(line)
        self._watcher("read", line)
        return line

    def _evaluate(self) -> dict[str, float]:
        metrics: dict[str, float] = {}
        self._learner.share_buffers()
        if self._config.evaluate_training:
            training = evaluate(self._learner.model, self._learner.samples, usual_loss)
            metrics |= {"train_loss": training.loss, "train_accuracy": training.accuracy}
            if self._remembered is not None:
                metrics["forgotten"] = training.forgotten_since(self._remembered)
            self._remembered = training.correct
        test = evaluate(self._learner.model, self._learner.test_samples, usual_loss)
        name = "validation" if self._config.validation else "test"
        return metrics | {f"{name}_loss": test.loss, f"{name}_accuracy": test.accuracy}

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def _save(self) -> None:
        state = {
            "iteration": self._iteration,
            "seconds": self._seconds,
            "data": self._fingerprint,
            "remembered": None if self._remembered is None else self._remembered.cpu(),
            "learner": self._learner.state_dict(),
        }
        self._folder.save_checkpoint(state)
        self._saved_at = time.perf_counter()

    def _take_over(self, state: dict[str, Any]) -> None:
        if state["data"] != self._fingerprint:
            raise ValueError(
                f"{self._folder.path} was trained on other data, or on the same in another order: "
                f"{state['data']} there, {self._fingerprint} now"
            )
        self._iteration = state["iteration"]
        self._seconds = state["seconds"]
        if state["remembered"] is not None:
            self._remembered = state["remembered"].to(self._device)


@contextmanager
def _first_interrupt(is_alone: bool) -> Iterator[threading.Event]:
    """Yields what takes note of the first Ctrl-C, so that it waits until the step is over; the second is handed on.

    Nothing is noted beside other ranks, outside of the main thread, and where somebody else deals with it.
    """
    came, before = threading.Event(), signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_alone or not is_main or before is not signal.default_int_handler:
        yield came
        return

    def note(*_: Any) -> None:
        came.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield came
    finally:
        signal.signal(signal.SIGINT, before)


def _fingerprint(dataset: Dataset) -> str:
    """Returns what tells one data set, in one order, from another."""
    digest = 0
    for tensor in (dataset.train_images, dataset.train_labels, dataset.test_images, dataset.test_labels):
        digest = zlib.crc32(tensor.contiguous().numpy().data, digest)
    return f"{dataset.name} {list(dataset.train_images.shape)} {digest:08x}"
