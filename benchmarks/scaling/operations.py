"""How many multiplications the correction takes on paper: what measured times are compared with."""

import torch
from torch import Tensor, nn

from consequent_lab.workloads import Task


def correction_operations(task: Task, model: nn.Module) -> float:
    """Returns the multiplications of all layers' corrections for one batch.

    Args:
        task: says the shape of the batch.
        model: on the meta device, where shapes are all that is computed.
    """
    total = 0.0

    def count(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal total
        assert isinstance(layer, nn.Linear | nn.Conv2d)
        outputs = layer.weight.shape[0]
        features = layer.weight[0].numel() + (layer.bias is not None)
        total += layer_operations(rows=output.numel() // outputs, features=features, outputs=outputs)

    handles = [m.register_forward_hook(count) for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    try:
        model(torch.empty(task.shape, device="meta"))
    finally:
        for handle in handles:
            handle.remove()
    return total


def layer_operations(rows: int, features: int, outputs: int) -> float:
    """Returns the multiplications of one layer's correction, on the side with the smaller matrix.

    Samples: Gram matrix R²D, Cholesky R³/6, solve R²O, final product ROD. Features: Gram matrix RD², Cholesky D³/6,
    solve D²O; that a convolution's Gram matrix has far fewer different entries makes it cheaper by a constant.

    >>> layer_operations(rows=6, features=10, outputs=1), layer_operations(rows=10, features=6, outputs=1)
    (492.0, 432.0)
    """
    if rows < features:
        return rows**2 * features + rows**3 / 6 + rows**2 * outputs + rows * outputs * features
    return rows * features**2 + features**3 / 6 + features**2 * outputs
