"""Which of the two mechanisms corrects a layer: averages, or each mini-batch's own inputs."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from consequent.averages.ranks import is_sharded, why_not_by_rows
from consequent.layers import Operation

WIDEST = 8192  # columns of a moment that is kept: 256 MiB in float32, and as much again for its inverse


def why_own_inputs(
    layer: Any, operation: Operation, averaging: float | None, optimizer_of: Mapping[Tensor, Optimizer], uses: int
) -> str | None:
    """Why a layer is corrected with each mini-batch's own inputs; None: by averages.

    Args:
        layer: the layer.
        operation: how it is ``Z = W X``.
        averaging: β as the user gave it; None leaves the choice to this function.
        optimizer_of: the optimiser of each parameter.
        uses: how many layers have its weight.
    """
    if not averaging:
        return "as averaging=0 asks for" if averaging is not None else "the default"
    if operation.features >= WIDEST:
        return f"a moment of {operation.features} columns is not kept"
    if uses > 1:
        return "its weight is that of another layer, too"
    parameters = [p for p in (layer.weight, getattr(layer, "bias", None)) if p is not None]
    if len({id(optimizer_of.get(p)) for p in parameters}) > 1 or layer.weight not in optimizer_of:
        return "its weight and its bias are not in one optimiser"
    if is_sharded(layer.weight):
        if not operation.has_rows_of_outputs or operation.groups > 1:
            return "its weight is sharded, and not by whole outputs"
        return why_not_by_rows(layer.weight)
    return None
