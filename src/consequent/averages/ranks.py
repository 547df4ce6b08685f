"""Several ranks: moments are added up, and a gradient that is sharded by rows is multiplied shard by shard."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def ranks() -> int:
    """How many ranks the default process group has; 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def add_up(tensors: Sequence[Tensor], group: Any = None) -> list[Tensor]:
    """The sums of the tensors over all ranks of a process group, by one all-reduce for each kind of them.

    Args:
        tensors: any.
        group: the process group; None: the default one, if there is one.
    """
    sums = list(tensors)
    if ranks() == 1:
        return sums
    for kind in dict.fromkeys((tensor.device, tensor.dtype) for tensor in tensors):
        places = [place for place, tensor in enumerate(tensors) if (tensor.device, tensor.dtype) == kind]
        flat = torch.cat([tensors[place].flatten() for place in places])
        dist.all_reduce(flat, group=group)
        for place, part in zip(places, flat.split([tensors[place].numel() for place in places]), strict=True):
            sums[place] = part.view_as(tensors[place])
    return sums


def is_sharded(tensor: Any) -> bool:
    """Whether the tensor is a part of one that several ranks hold (FSDP2, tensor parallelism)."""
    return hasattr(tensor, "to_local") and hasattr(tensor, "placements")


def local(tensor: Tensor) -> Tensor:
    """What of a tensor lies on this rank."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def why_not_by_rows(tensor: Any) -> str | None:
    """Why a sharded tensor's gradient cannot be multiplied shard by shard; None if it can."""
    if not is_sharded(tensor):
        return None
    dims = [placement.dim if placement.is_shard() else None for placement in tensor.placements]
    sharded = [dim for dim in dims if dim is not None]
    return None if sharded == [0] else f"its weight is sharded as {tuple(tensor.placements)}"


def add_up_shards(values: Sequence[Tensor], like: Sequence[Any]) -> list[Tensor]:
    """The sums of values over the ranks that hold the rows of sharded tensors, by one all-reduce for each group.

    Args:
        values: one for each tensor.
        like: the tensors. What belongs to one that is not sharded is whole already.
    """
    sums, groups = list(values), [_shard_group(tensor) for tensor in like]
    for group in dict.fromkeys(group for group in groups if group is not None):
        places = [place for place, other in enumerate(groups) if other is group]
        for place, total in zip(places, add_up([values[place] for place in places], group), strict=True):
            sums[place] = total
    return sums


def _shard_group(tensor: Any) -> Any:
    """The process group whose ranks hold the rows of a tensor; None if it is not sharded."""
    if not is_sharded(tensor):
        return None
    return tensor.device_mesh.get_group(next(dim for dim, one in enumerate(tensor.placements) if one.is_shard()))
