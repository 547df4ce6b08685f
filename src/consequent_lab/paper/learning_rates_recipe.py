"""What is run to see how much a learning rate needs tuning: a small perceptron at rates over four decades.

The same for ResNet-20 is what the search of that experiment has tried anyway: the same rates, one seed.
"""

from typing import Literal

from consequent_lab.paper import resnet20_recipe
from consequent_lab.paper.recipes import Contestant, Race, Sweep
from consequent_lab.train_config import TrainConfig

NAME = "learning-rates"
SEEDS = (0, 1, 2)
RUNGS = tuple(range(-16, 1, 2))  # 1e-4 to 1
OPTIMISERS: dict[str, Literal["sgd", "adam"]] = {"SGD": "sgd", "Adam": "adam"}
LABELS = ("SGD", "C-SGD", "Adam", "C-Adam")
RESNET20_LABELS = ("SGD", "C-SGD", "Nesterov", "C-Nesterov", "Adam", "C-Adam")


def sweep(quick: bool = False) -> Sweep:
    """Returns the runs of the small perceptron."""
    contestants = tuple(
        Contestant(label.lower(), label, _config(label, quick), SEEDS[:1] if quick else SEEDS) for label in LABELS
    )
    return Sweep(f"{NAME}-quick" if quick else NAME, contestants, RUNGS[4::4] if quick else RUNGS)


def resnet20_race(quick: bool = False) -> Race:
    """Returns the contestants of ResNet-20 whose search shows their learning rates."""
    return resnet20_recipe.race(quick).select(tuple(label.lower() for label in RESNET20_LABELS), ())


def _config(label: str, quick: bool) -> TrainConfig:
    return TrainConfig(
        dataset="digits" if quick else "fashion-mnist",
        model="mlp",
        hidden=(32,) * 2 if quick else (128,) * 4,
        optimiser=OPTIMISERS[label.removeprefix("C-")],
        consequentialist=label.startswith("C-"),
        damping=1e-3,
        batch_size=32,
        epochs=1,
        log_every=15 if quick else 500,
        gradient_norms="none",
        checkpoint_every=10_000,
    )
