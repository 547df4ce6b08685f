"""What is run on the digits for statements that the paper's larger experiments leave open: RMSprop, momentum, ridge."""

from typing import Literal

from consequent_lab.paper.rates import Search
from consequent_lab.paper.recipes import Contestant, Race
from consequent_lab.train_config import TrainConfig

Optimiser = Literal["sgd", "momentum", "nesterov", "adam", "rmsprop"]

NAME = "digits"
SEEDS = (0, 1, 2)
DAMPING = 1e-3
DAMPINGS = (1e-9, 1e-7, 1e-5, DAMPING, 1e-1, 10.0)  # of C-SGD
MOMENTA = (0.5, 0.8, 0.9, 0.95, 0.99)
BEST_MOMENTUM = 0.95  # the paper's
OPTIMISERS: dict[str, Optimiser] = {"SGD": "sgd", "Nesterov": "nesterov", "Adam": "adam", "RMSprop": "rmsprop"}
WITH_MOMENTUM: dict[str, Optimiser] = {"SGD": "momentum", "Nesterov": "nesterov"}


def damped(damping: float) -> str:
    """Returns the label of C-SGD with a λ.

    >>> damped(1e-3), damped(0.1)
    ('C-SGD', 'C-SGD, λ = 0.1')
    """
    return "C-SGD" if damping == DAMPING else f"C-SGD, λ = {damping:g}"


def with_momentum(label: str, momentum: float) -> str:
    """Returns the label of an optimiser with a momentum.

    >>> with_momentum("SGD", 0.9), with_momentum("Nesterov", 0.95)
    ('SGD, momentum 0.9', 'Nesterov')
    """
    is_the_papers = label == "Nesterov" and momentum == BEST_MOMENTUM
    return label if is_the_papers else f"{label}, momentum {momentum:g}"


def race(quick: bool = False) -> Race:
    """Returns the experiment; the small one has a smaller network and fewer rates."""
    configs: dict[str, TrainConfig] = {}
    for name, optimiser in OPTIMISERS.items():
        for label in (name, f"C-{name}"):
            configs[label] = _config(optimiser, quick, consequentialist=label.startswith("C-"))
    for name, optimiser in WITH_MOMENTUM.items():
        for momentum in MOMENTA:
            configs[with_momentum(name, momentum)] = _config(optimiser, quick, momentum=momentum)
    for damping in DAMPINGS:
        configs[damped(damping)] = _config("sgd", quick, consequentialist=True, damping=damping)
    contestants = tuple(
        Contestant(variant_of(label), label, config, SEEDS[:1] if quick else SEEDS, timed_with="sgd")
        for label, config in configs.items()
    )
    if quick:
        search = Search(epochs=1, lowest=-8, highest=-6, extensions=0, half_ways=False)
        return Race(f"{NAME}-quick", contestants, search, timed_iterations=20)
    return Race(NAME, contestants, Search(epochs=3), timed_iterations=100)


def variant_of(label: str) -> str:
    """Returns a contestant's name.

    >>> variant_of("SGD, momentum 0.9"), variant_of("C-SGD, λ = 1e-07")
    ('sgd-momentum-0.9', 'c-sgd-damping-1e-07')
    """
    return label.lower().replace("λ =", "damping").replace(",", "").replace(" ", "-")


def _config(
    optimiser: Optimiser,
    quick: bool,
    *,
    consequentialist: bool = False,
    momentum: float = BEST_MOMENTUM,
    damping: float = DAMPING,
) -> TrainConfig:
    return TrainConfig(
        dataset="digits",
        model="mlp",
        hidden=(16,) * 2 if quick else (64,) * 8,
        optimiser=optimiser,
        consequentialist=consequentialist,
        momentum=momentum,
        damping=damping,
        normalisation="unit",
        batch_size=32,
        epochs=2 if quick else 20,
        log_every=15,
        gradient_norms="none",
        checkpoint_every=10_000,
    )
