"""What the paper's fourth experiment runs: ResNet-20 on CIFAR-10, three optimisers, plain and C-, and BatchNorm.

The paper's SGD has momentum here, 0.95 as Nesterov has.
"""

from dataclasses import replace
from typing import Literal

from consequent_lab.paper.rates import Search
from consequent_lab.paper.recipes import Contestant, Race
from consequent_lab.train_config import TrainConfig

NAME = "resnet20"
SEEDS = (0, 1, 2)
LONG, SHORT = 40_000, 10_000  # iterations; the paper has C-SGD and SGD-BN cross after 25,000
# In the order of importance. Those with three seeds carry the headlines.
LABELS = {
    "C-SGD": (LONG, SEEDS),
    "SGD-BN": (LONG, SEEDS),
    "C-Nesterov": (SHORT, SEEDS),
    "Nesterov-BN": (SHORT, SEEDS),
    "SGD": (SHORT, SEEDS),
    "Nesterov": (SHORT, SEEDS),
    "Adam": (SHORT, SEEDS[:1]),
    "C-Adam": (SHORT, SEEDS[:1]),
    "Adam-BN": (SHORT, SEEDS[:1]),
    "C-SGD-BN": (SHORT, SEEDS[:1]),
}
OPTIMISERS: dict[str, Literal["momentum", "nesterov", "adam"]] = {
    "SGD": "momentum",
    "Nesterov": "nesterov",
    "Adam": "adam",
}


def race(quick: bool = False) -> Race:
    """Returns the experiment, or a really small one on the digits."""
    contestants = tuple(
        Contestant(
            label.lower(),
            label,
            _config(label, iterations, quick),
            seeds[:2] if quick else seeds,
            headline=len(seeds) > 1,
        )
        for label, (iterations, seeds) in LABELS.items()
    )
    if quick:
        search = Search(epochs=2, lowest=-8, highest=-6, extensions=0, half_ways=False)
        return Race(f"{NAME}-quick", contestants, search, timed_iterations=20)
    return Race(NAME, contestants, Search(epochs=3), timed_iterations=300)


def _config(label: str, iterations: int, quick: bool) -> TrainConfig:
    consequentialist = label.startswith("C-")
    config = TrainConfig(
        dataset="cifar10",
        model="resnet20-bn" if label.endswith("-BN") else "resnet20",
        optimiser=OPTIMISERS[label.removeprefix("C-").removesuffix("-BN")],
        consequentialist=consequentialist,
        head_lr_factor=0.1 if consequentialist else 1.0,
        momentum=0.95,
        betas=(0.9, 0.999),
        damping=0.03,
        batch_size=128,
        iterations=iterations,
        normalisation="centred" if consequentialist else "symmetric",
        log_every=100,
        gradient_norms="both",
        checkpoint_every=2000,
    )
    if not quick:
        return config
    config = replace(config, dataset="digits", widths=(4, 8), blocks=1, batch_size=32)
    return replace(config, iterations=iterations // 500 + 70, log_every=10, checkpoint_every=40)
