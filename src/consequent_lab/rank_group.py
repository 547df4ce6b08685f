"""One run trained by several processes that `torchrun` has started.

    torchrun --nproc-per-node 4 -m consequent_lab.cli train …

Each rank takes its share of every mini-batch. With a plain optimiser the run is then the one that a single process
would train; C- versions correct on each rank with that rank's own samples. The first rank alone writes the run's
folder, and tells the others what it reads there.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from consequent_lab.runs import RunFolder

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Value = TypeVar("Value")

# How long ranks wait for each other, also when they first meet: for one that is lost without its connections being
# closed. Longer than any of them ever works by itself; torch's own default is half an hour.
TIMEOUT = timedelta(minutes=5)


class RankGroup:
    """The ranks of one run, after they have met."""

    def __init__(self) -> None:
        self.size = dist.get_world_size()
        self.rank = dist.get_rank()

    @property
    def is_first(self) -> bool:
        """Whether this rank writes the files."""
        return self.rank == 0

    def share(self, indices: Tensor) -> Tensor:
        """Returns this rank's part of a mini-batch."""
        return indices.chunk(self.size)[self.rank]

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        """Returns the model that averages its gradients over ranks."""
        return DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)

    def add_up(self, loss_and_correct: Tensor) -> None:
        """Makes a rank's mean loss and number of correct answers those of the whole mini-batch."""
        dist.all_reduce(loss_and_correct)
        loss_and_correct[0] /= self.size

    def share_buffers(self, model: nn.Module) -> None:
        """Gives all ranks the first one's running statistics."""
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)

    def told(self, value: Value) -> Value:
        """Returns the first rank's value."""
        values = [value]
        dist.broadcast_object_list(values, 0)
        return values[0]


@contextmanager
def joined(device: str) -> Iterator[tuple[RankGroup | None, str]]:
    """Meets the other ranks if `torchrun` has started this process, and parts from them.

    Yields:
        the ranks, None for a process on its own, and this rank's device.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield None, device
        return
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.startswith("cuda") else "gloo", timeout=TIMEOUT)
    try:
        yield RankGroup(), device
    finally:
        dist.destroy_process_group()


def _by_the_first(method: Callable[..., Value]) -> Callable[..., Value]:
    """Returns what the first rank does for all of them: each gets its value, and none goes on before."""

    @wraps(method)
    def done(self: "RankGroupFolder", *arguments: Any) -> Value:
        value = getattr(RunFolder, method.__name__)(self, *arguments) if self.ranks.is_first else None
        return cast(Value, self.ranks.told(value))

    return done


class RankGroupFolder(RunFolder):
    """A run's folder that the first rank reads and writes for all of them."""

    def __init__(self, path: Path, ranks: RankGroup) -> None:
        super().__init__(path)
        self.ranks = ranks

    @contextmanager
    def opened(self, config: "DataclassInstance") -> Iterator[None]:
        """Holds the folder, on the first rank."""
        with super().opened(config) if self.ranks.is_first else nullcontext():
            yield

    outcome = _by_the_first(RunFolder.outcome)
    resume = _by_the_first(RunFolder.resume)
    add_environment = _by_the_first(RunFolder.add_environment)
    append = _by_the_first(RunFolder.append)
    save_checkpoint = _by_the_first(RunFolder.save_checkpoint)
    finish = _by_the_first(RunFolder.finish)
