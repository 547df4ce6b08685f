"""What torch says of a sharded tensor (``DTensor``), without importing what only sharded training needs."""

from math import prod
from typing import Any

from torch import Tensor


def is_sharded(tensor: Any) -> bool:
    """Whether it is a ``DTensor``, of which this rank has a part."""
    return hasattr(tensor, "device_mesh")


def local(tensor: Tensor) -> Tensor:
    """This rank's part: the same memory. An ordinary tensor is all of it."""
    return tensor._local_tensor if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def holders_of(tensor: Tensor, ranks: int) -> int:
    """How many ranks have the same part of it as this one: all, unless it is sharded.

    Args:
        tensor: the tensor.
        ranks: how many there are.
    """
    if not is_sharded(tensor):
        return ranks
    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    return prod(mesh.size(place) for place, placement in enumerate(placements) if placement.is_replicate())


def is_nonzero(gradient: Tensor) -> bool:
    """Whether this rank's part of a gradient, dense or sparse, is not all zeros. Waits for a GPU."""
    part = local(gradient)
    return bool((part._values() if part.is_sparse else part).any())


def why_not_by_rows(parameter: Tensor) -> str | None:
    """Why a sharded parameter is not sharded by rows, as data parallelism does it, if it is not."""
    if not is_sharded(parameter):
        return None
    placements = parameter.placements  # type: ignore[attr-defined]
    sharded = [placement for placement in placements if not placement.is_replicate()]
    if len(sharded) == 1 and type(sharded[0]).__name__ == "Shard" and sharded[0].dim == 0:
        return None
    return f"its weight is sharded otherwise than by rows ({', '.join(map(str, placements))})"


def own_rows(parameter: Tensor) -> slice:
    """Which rows of the whole parameter this rank has."""
    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    (place,) = [place for place, placement in enumerate(placements) if not placement.is_replicate()]
    rows, parts = parameter.shape[0], mesh.size(place)
    each = -(-rows // parts)
    start = min(each * mesh.get_local_rank(place), rows)
    return slice(start, min(start + each, rows))
