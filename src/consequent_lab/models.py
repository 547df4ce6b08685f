"""Networks of the experiments."""

from collections.abc import Sequence
from itertools import pairwise

from torch import nn


def mlp(inputs: int, hidden: Sequence[int], outputs: int) -> nn.Sequential:
    """Returns the paper's multi-layer perceptron: ReLU after every layer but the last, Kaiming's initialisation.

    >>> mlp(64, [32], 10)
    Sequential(
      (0): Linear(in_features=64, out_features=32, bias=True)
      (1): ReLU()
      (2): Linear(in_features=32, out_features=10, bias=True)
    )
    """
    modules: list[nn.Module] = []
    for fan_in, fan_out in pairwise([inputs, *hidden, outputs]):
        layer = nn.Linear(fan_in, fan_out)
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        nn.init.zeros_(layer.bias)
        modules += [layer, nn.ReLU()]
    return nn.Sequential(*modules[:-1])
