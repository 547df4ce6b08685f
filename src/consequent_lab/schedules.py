"""The learning rate of every iteration, as a fraction of its peak."""

import math

from consequent_lab.train_config import TrainConfig


def cosine(iteration: int, total: int) -> float:
    """Returns half a cosine from 1 to 0.

    >>> cosine(0, 10), round(cosine(5, 10), 6)
    (1.0, 0.5)
    """
    return 0.5 * (1 + math.cos(math.pi * iteration / total))


def rate_factor(config: TrainConfig, iteration: int, total: int) -> float:
    """Returns by what the learning rates are multiplied in one iteration, from 0 on, of a run of so many.

    >>> config = TrainConfig(schedule="cosine", warm_up=2)
    >>> [round(rate_factor(config, iteration, 6), 3) for iteration in range(6)]
    [0.5, 1.0, 1.0, 0.854, 0.5, 0.146]
    """
    if iteration < config.warm_up:
        return (iteration + 1) / config.warm_up
    if config.schedule == "constant":
        return 1.0
    return cosine(iteration - config.warm_up, total - config.warm_up)
