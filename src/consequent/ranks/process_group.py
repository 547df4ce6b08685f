"""The ranks that train one model together: who they are, and the few things they say to each other.

Everything that crosses ranks goes through here, on torch's own engine. Numbers that decide what is done next (how many
rows each rank has) are exchanged between hosts, so that no host waits for its GPU; matrices go from device to device.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist  # which is there, but empty, where torch was built without it
from torch import Tensor, nn

from consequent.capture.torch_internals import backend_of, patience_of, running_wrapper, serves_hosts
from consequent.ranks.sharded_tensors import is_sharded
from consequent.ranks.traffic import Traffic

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work


class Ranks:
    """The processes of a group, this one among them.

    Args:
        group: the process group.
    """

    def __init__(self, group: "ProcessGroup") -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.traffic = Traffic(self.size)
        self._hosts: ProcessGroup | None = None

    @property
    def hosts(self) -> "ProcessGroup":
        """A group that exchanges what is in the hosts' memory: the same one, unless it only knows GPUs."""
        if self._hosts is None:
            self._hosts = self.group if serves_hosts(self.group) else _group_of_hosts(self.group)
        return self._hosts

    def gather_numbers(self, numbers: list[int]) -> list[list[int]]:
        """Every rank's numbers, as many from each, by rank."""
        mine = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        everyones = torch.empty(self.size * len(numbers), dtype=torch.int64, device="cpu")
        _gather(everyones, mine, group=self.hosts)
        self.traffic.add_gathered(everyones.nbytes)
        return everyones.view(self.size, -1).tolist()

    def gather_objects(self, mine: Any) -> list[Any]:
        """Every rank's object, by rank. Only for what is said once."""
        everyones: list[Any] = [None] * self.size
        dist.all_gather_object(everyones, mine, group=self.hosts)
        return everyones

    def is_true_everywhere(self, flag: bool) -> bool:
        """Whether all ranks say so."""
        answer = torch.tensor([int(flag)], dtype=torch.int32, device="cpu")
        dist.all_reduce(answer, dist.ReduceOp.MIN, group=self.hosts)
        self.traffic.add_summed(answer.nbytes)
        return bool(answer)

    def spread(self, bad: Tensor) -> None:
        """Raise a device's flag where any rank has raised its own; no host waits."""
        dist.all_reduce(bad, dist.ReduceOp.MAX, group=self.group)
        self.traffic.add_summed(bad.nbytes)

    def add_up(self, number: Tensor) -> None:
        """Put the sum of all ranks' numbers in the place of each; no host waits for its device."""
        self.start_sum(number).wait()

    def start_sum(self, tensor: Tensor) -> "Work":
        """Start to add up every rank's tensor, in place."""
        self.traffic.add_summed(tensor.nbytes)
        work: Work = dist.all_reduce(tensor, group=self.group, async_op=True)
        return work

    def start_sum_at(self, owner: int, tensor: Tensor) -> "list[Work]":
        """Start to add up every rank's tensor at one rank, in place; what the others have left means nothing."""
        self.traffic.add_summed_at_one(tensor.nbytes)
        pieces = tensor.split(self._longest_sum_at_one // tensor.itemsize) if self._is_gloo(tensor) else (tensor,)
        root = dist.get_global_rank(self.group, owner)
        return [dist.reduce(piece, root, group=self.group, async_op=True) for piece in pieces]

    def start_send(self, owner: int, tensor: Tensor) -> "Work":
        """Start to send one rank's tensor to all others, into theirs."""
        self.traffic.add_from_one(tensor.nbytes)
        root = dist.get_global_rank(self.group, owner)
        work: Work = dist.broadcast(tensor, root, group=self.group, async_op=True)
        return work

    @property
    def _longest_sum_at_one(self) -> int:
        """Bytes; of anything longer gloo sends up to half as much again (measured, torch 2.13)."""
        return 2 * self.size * 2**20

    def _is_gloo(self, tensor: Tensor) -> bool:
        return "gloo" in backend_of(self.group, tensor.device).name().lower()

    def start_gather(self, everyones: Tensor, mine: Tensor) -> "Work":
        """Start to put every rank's tensor, all of one size, into the first argument, by rank."""
        self.traffic.add_gathered(everyones.nbytes)
        work: Work = _gather(everyones, mine, group=self.group, async_op=True)
        return work


def _gather(everyones: Tensor, mine: Tensor, **options: Any) -> Any:
    """``all_gather_into_tensor`` got another name in torch 2.13, and the old one a warning."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(everyones, mine, **options)


def several_are_running() -> bool:
    """Whether this process belongs to a group of several."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def group_of_model(model: nn.Module, parameters: Iterable[Tensor]) -> "ProcessGroup | None":
    """The group of a model that is, or contains, a ``DistributedDataParallel``, or that ``fully_shard`` has sharded.

    Args:
        model: the model.
        parameters: of its layers, as the optimiser holds them.
    """
    for module in model.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            return module.process_group
    for parameter in parameters:
        if is_sharded(parameter):
            return _group_of_mesh(parameter.device_mesh)  # type: ignore[attr-defined]
    return None


def group_of_running_wrapper(parameter: Tensor) -> "ProcessGroup | None":
    """The group of the ``DistributedDataParallel`` whose forward pass is running, if the parameter is one of its own.

    So a model may be attached before it is wrapped. torch keeps this note for ``torch.compile``.
    """
    wrapper = running_wrapper()
    if wrapper is None or not any(p is parameter for p in wrapper.parameters()):
        return None
    return wrapper.process_group


def check_process_group(group: Any) -> None:
    """Raise unless this process is in the group."""
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"process_group must be a torch.distributed.ProcessGroup, got {group!r}: the ranks whose gradients are "
            "averaged, torch.distributed.group.WORLD for all"
        )
    if dist.get_rank(group) < 0:
        raise ValueError(f"process_group: this process (rank {dist.get_rank()}) is not in the group")


def _group_of_mesh(mesh: Any) -> "ProcessGroup":
    """All ranks of a mesh: with hybrid sharding, those of both dimensions have samples of their own."""
    if mesh.ndim == 1:
        return mesh.get_group()  # type: ignore[no-any-return]
    ranks = mesh.mesh.flatten().tolist()
    if sorted(ranks) == list(range(dist.get_world_size())):
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    return dist.new_group(ranks, use_local_synchronization=True)  # type: ignore[no-any-return]


def _group_of_hosts(group: "ProcessGroup") -> "ProcessGroup":
    """The same ranks through gloo, with the same patience."""
    ranks = dist.get_process_group_ranks(group)
    return dist.new_group(ranks, patience_of(group), "gloo", use_local_synchronization=True)  # type: ignore[no-any-return]
